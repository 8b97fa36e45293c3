"""Draws the pictures of the dashboard in README.md and docs/ from the recorded runs of `telescope ui --demo`.

python scripts/draw_dashboard.py                  all of them, into docs/images
python scripts/draw_dashboard.py metrics evals    these alone
python scripts/draw_dashboard.py --all --output /tmp/pages
                                                  every page in every state, theme and width, to look at
python scripts/draw_dashboard.py metrics --state live --theme dark --width 390 --output /tmp/pages

Needs Chromium (`make setup CHROMIUM=1`), the built pages, and the font Inter to look as intended (Debian: fonts-inter).
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from telescope.testing.replay import RECORDING, Replay

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser import DashboardProcess, open_browser

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
HEIGHTS = {1280: 800, 2560: 1440, 390: 844}
"""Heights of the usual widths of a window; 390 is a phone."""

WIDTH, SCALE = 1280, 1.5
THEMES = ("light", "dark")
STATES = ("ended", "live", "failed", "empty")
NUM_COLORS = 128
"""Colors of a picture: pages have few, and a palette makes a third of the bytes."""

RUN = "demo"
OTHERS = sorted(path.name for path in RECORDING.iterdir() if path.name != RUN)


class Picture(NamedTuple):
    """One page: its address, and the text that is there when it is drawn."""

    place: str
    shows: str
    dark: bool = False


PICTURES = {
    "runs": Picture("#/", RUN),
    "overview": Picture(f"#/{RUN}/overview", "Reward"),
    "overview-dark": Picture(f"#/{RUN}/overview", "Reward", dark=True),
    "metrics": Picture(f"#/{RUN}/metrics?with={','.join(OTHERS)}", "entropy"),
    "rollouts": Picture(f"#/{RUN}/rollouts?step=60", "answers of the group"),
    "timeline": Picture(f"#/{RUN}/timeline?step=48", "Critical path", dark=True),
    "infra": Picture(f"#/{RUN}/infra", "Machine"),
    "evals": Picture(f"#/{RUN}/evals", "Every item"),
    "logs": Picture(f"#/{RUN}/logs", "accuracy"),
    "compare": Picture(f"#/{RUN}/compare?with={OTHERS[-1]}", "learning_rate"),
}
SHOWS_RUN = ("overview", "metrics", "rollouts", "timeline", "infra", "evals", "logs")
"""Pages that differ by the state of their run."""


class View(NamedTuple):
    """How a picture is drawn."""

    name: str
    state: str
    theme: str
    width: int

    @property
    def file(self) -> str:
        """Name of the picture, with what is not usual."""
        usual = ("ended", "dark" if PICTURES[self.name].dark else "light", str(WIDTH))
        unusual = [part for part, other in zip(map(str, self[1:]), usual, strict=True) if part != other]
        return "-".join(["dashboard", self.name, *unusual]) + ".png"

    @property
    def place(self) -> str:
        """Address of the page. A run in another state than ended has the state as its name."""
        place = PICTURES[self.name].place
        return place if self.state == "ended" else f"#/{self.state}/{self.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--output", type=Path, default=IMAGES)
    parser.add_argument("--state", nargs="+", choices=STATES, default=["ended"])
    parser.add_argument("--theme", nargs="+", choices=THEMES, help="default: that of the picture")
    parser.add_argument("--width", nargs="+", type=int, default=[WIDTH], help="1280, 2560, 390 (a phone) or any other")
    parser.add_argument("--all", action="store_true", help="every state, theme and usual width")
    arguments = parser.parse_args()
    if arguments.all:
        arguments.state, arguments.theme, arguments.width = STATES, THEMES, list(HEIGHTS)
    views = list(views_of(arguments.names or PICTURES, arguments.state, arguments.theme, arguments.width))
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        ended, states = Path(folder, "ended"), Path(folder, "states")
        write_runs(ended)
        write_states(states, {view.state for view in views})
        with DashboardProcess(ended) as of_ended, DashboardProcess(states) as of_states:
            for view in views:
                dashboard = of_ended if view.state == "ended" else of_states
                page = browser.new_page(
                    viewport={"width": view.width, "height": HEIGHTS.get(view.width, HEIGHTS[WIDTH])},
                    device_scale_factor=SCALE,
                    color_scheme=view.theme,  # type: ignore[arg-type]
                    reduced_motion="reduce",
                )
                page.goto(f"{dashboard.address}{view.place}")
                page.locator("main > *").first.wait_for()
                if view.state == "ended":
                    page.get_by_text(PICTURES[view.name].shows).locator("visible=true").first.wait_for()
                page.wait_for_timeout(1500)  # what is read after the first paint
                path = arguments.output / view.file
                save(page.screenshot(), path)
                page.close()
                print(f"{path}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def views_of(
    names: Iterable[str], states: Sequence[str], themes: Sequence[str] | None, widths: Sequence[int]
) -> Iterator[View]:
    """Yields what to draw. Each page has one picture, even where the documents show it in two themes."""
    for name in names:
        if themes and name.endswith("-dark"):
            continue
        for state in states:
            if state != "ended" and name not in SHOWS_RUN:
                continue
            for theme in themes or ["dark" if PICTURES[name].dark else "light"]:
                yield from (View(name, state, theme, width) for width in widths)


def write_states(folder: Path, states: set[str]) -> None:
    """Writes a run for each state, of that name. Without an end, a run is live as long as this process."""
    folder.mkdir()
    for state in states - {"ended"}:
        with Replay(folder / state, num_ended=40) as replay:
            if state != "empty":
                replay.write_step(39)
            if state == "failed":
                replay.end("trainer rank 1 is out of GPU memory: lower max_tokens_per_microbatch")


def write_runs(folder: Path) -> None:
    """Writes the run to draw and those to compare it with."""
    for name in (RUN, *OTHERS):
        with Replay(folder / name, name) as replay:
            replay.write_all()


def save(png: bytes, path: Path) -> None:
    """Writes a picture with a palette of its own."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
