"""Draws the pictures of the dashboard in README.md and docs/ from a generated run.

python scripts/draw_dashboard.py                  all of them, into docs/images
python scripts/draw_dashboard.py metrics evals    these alone

Needs Chromium (`make setup CHROMIUM=1`), the built pages, and the font Inter to look as intended (Debian: fonts-inter).
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.sync_api import Page

from telescope.testing.browser import DashboardProcess, open_browser
from telescope.testing.demo_run.curves import Story
from telescope.testing.demo_run.evals import write_eval_samples
from telescope.testing.demo_run.writer import RunWriter

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT, SCALE = 1280, 800, 1.5
NUM_COLORS = 128
"""Colors of a picture: pages have few, and a palette makes a third of the bytes."""

NUM_STEPS = 240
RUN = "countdown-1.7b"
OTHERS = {"countdown-lr-3e-6": Story(learning=1.9, learning_rate=3e-6), "countdown-lr-1e-5": Story(learning=2.6)}
STORY = Story(server_down=(90, 93), spike=150, slow_from=205)


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
    "rollouts": Picture(f"#/{RUN}/rollouts?step=180", "All answers"),
    "timeline": Picture(f"#/{RUN}/timeline?step=221", "Critical path", dark=True),
    "infra": Picture(f"#/{RUN}/infra", "Machine"),
    "evals": Picture(f"#/{RUN}/evals", "Every item"),
    "logs": Picture(f"#/{RUN}/logs", "Avg generation throughput"),
    "compare": Picture(f"#/{RUN}/compare?with={next(iter(OTHERS))}", "learning_rate"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--output", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, DashboardProcess(write_runs(Path(folder))) as dashboard:
        for name in arguments.names or PICTURES:
            with page_of(PICTURES[name].dark) as page:
                page.goto(f"{dashboard.address}{PICTURES[name].place}")
                page.get_by_text(PICTURES[name].shows).locator("visible=true").first.wait_for()
                page.wait_for_timeout(1500)  # what is read after the first paint
                path = arguments.output / f"dashboard-{name}.png"
                save(page.screenshot(), path)
                print(f"{path}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def write_runs(folder: Path) -> Path:
    """Writes the run to draw and those to compare it with. Returns their folder."""
    for seed, (name, story) in enumerate({RUN: STORY, **OTHERS}.items()):
        with RunWriter(folder / name, story, num_steps=NUM_STEPS, num_groups=8, seed=seed) as writer:
            for step in range(NUM_STEPS):
                writer.write_samples(step)
                writer.write_step(step)
            for _ in writer.write_gauges(NUM_STEPS, 2.0):
                pass
            write_eval_samples(writer, NUM_STEPS, writer.now)
            writer.end()
    return folder


@contextmanager
def page_of(dark: bool) -> Iterator[Page]:
    """Yields a page of the size of the pictures."""
    with open_browser() as browser:
        yield browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            device_scale_factor=SCALE,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )


def save(png: bytes, path: Path) -> None:
    """Writes a picture with a palette of its own."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
