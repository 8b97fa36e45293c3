"""Exports a run as one HTML file with the dashboard's pages and the API responses that they need.

Owns the choice of exported data, and the format of a file that opens without a server. Invariants: the constants below
limit the file for runs of any size, and the file names what it leaves out. It loads nothing from the network, and
cannot run code in a completion.
"""

import base64
import gzip
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from telescope.dashboard import code, curves, rollouts, runs
from telescope.dashboard.architecture import architecture_of
from telescope.dashboard.documents import Documents, user_folder
from telescope.dashboard.models import to_json
from telescope.dashboard.registry import Registry
from telescope.dashboard.store import RunStore
from telescope.dashboard.tables import Row
from telescope.errors import UserError

MAX_STEPS = 1500
"""Most steps in the file. If a run has more, evenly spaced steps are exported."""

MAX_DISTRIBUTIONS = 40
"""Most sample numbers whose distributions are in the file."""

ANSWER_STEPS = 10
GROUPS = 6
SAMPLES = 8
"""At most `ANSWER_STEPS` steps, `GROUPS` groups per step and `SAMPLES` completions per group are exported."""

MAX_TEXT = 20_000
"""Characters after which a text is cut."""

MAX_BYTES = 8 * 2**20
"""Size limit of the training completions, and again of the eval completions, before compression."""

DIGITS = 6
"""Significant digits of numbers in steps and distributions."""

UNSAFE_CHARACTERS = "!'()*"
"""Characters that JavaScript's `encodeURIComponent` keeps, in addition to those that `quote` keeps."""

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; font-src data:; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)

LOADER = "loader.js"
"""Built script that starts the pages of an exported file."""

_ENTRY = re.compile(r'<script type="module"[^>]*src="\./assets/([^"]+)"')
_IMPORT = re.compile(r"""(from|import|import\()(\s*["'`])\./([\w.-]+\.js)(["'`])""")
_PRELOAD = re.compile(r"__vite__mapDeps\(\[[\d,]*\]\)")
_FONT = re.compile(r"url\(\.?/?(?:assets/)?([\w.-]+\.woff2)\)")
_SCHEME = "telescope/"
"""Prefix of module names in the import map."""


def export_run(registry: Registry, run_id: str, static: Path, now: float | None = None) -> bytes:
    """Exports a run as HTML. Raises `NotFoundError` for an unknown run, `UserError` if the pages are not built."""
    content = content_of(registry, run_id, time.time() if now is None else now)
    entry, modules, style = _pages(static)
    payload = {"entry": entry, "modules": modules, "style": style, "content": content}
    packed = gzip.compress(to_json(payload), 9, mtime=0)
    title = escape(f"{content['name']} · Telescope")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<title>{title}</title>\n<body><div id="root"></div>\n'
        f'<script id="payload" type="application/gzip">{base64.b64encode(packed).decode()}</script>\n'
        f"<script>{(static / LOADER).read_text()}</script>\n"
    ).encode()


def content_of(registry: Registry, run_id: str, now: float) -> dict[str, Any]:
    """Returns the data of the pages: API responses by address, example completions, and a list of what is left out."""
    store = registry.store(run_id)
    left_out: list[str] = []
    info = runs.run_info(registry, run_id)
    info["info"] = {**info["info"], "live": False}
    health = runs.health_of(store)
    steps = runs.steps(store, 0)
    chosen = _evenly(len(steps["step"]), MAX_STEPS)
    if len(chosen) < len(steps["step"]):
        left_out.append(f"{len(chosen)} of {len(steps['step'])} steps")
    kept_steps = {steps["step"][place] for place in chosen}
    base = f"/api/runs/{quote(run_id, safe=UNSAFE_CHARACTERS)}"
    evals = curves.evals(store)
    answers: dict[str, Any] = {
        "/api/runs": {"runs": [info["info"]], "problems": [], "roots": []},
        base: info,
        f"{base}/health": health,
        f"{base}/steps": {
            **{name: _picked(value, chosen) for name, value in steps.items() if isinstance(value, list)},
            "next": steps["next"],
            "metrics": {name: _rounded(_picked(values, chosen)) for name, values in steps["metrics"].items()},
        },
        f"{base}/model": architecture_of(store.run),
        f"{base}/code": _code(store, left_out),
        f"{base}/tags": {},
        f"{base}/evals": evals,
        "/api/user/colors": {"value": _color(info["info"]["key"]), "version": ""},
    }
    answers |= _distributions(store, base, kept_steps)
    answers |= _eval_answers(store, base, evals, left_out)
    return {
        "run": run_id,
        "name": info["info"]["name"],
        "written_at": now,
        "answers": answers,
        "examples": _examples(store, steps["step"], left_out),
        "left_out": left_out,
    }


def address(path: str, **query: str) -> str:
    """Returns the key of an API response as the pages compute it, with non-empty parameters sorted by name."""
    text = urlencode(sorted((name, value) for name, value in query.items() if value))
    text = text.replace("~", "%7E").replace("%2A", "*")  # as URLSearchParams writes them
    return f"{path}?{text}" if text else path


def _color(key: str) -> dict[str, Any]:
    """Returns the run's color on the pages, if the user chose one."""
    try:
        kept = Documents(user_folder()).read("colors").value
    except UserError:
        kept = None
    return {key: kept[key]} if isinstance(kept, dict) and key in kept else {}


def _code(store: RunStore, left_out: list[str]) -> dict[str, Any]:
    """Returns git state and uncommitted changes, without files."""
    try:
        found = code.overview(store.run)
    except UserError as error:
        left_out.append(f"the code ({error})")
        return code.NOTHING
    changes = found["changes"]
    if len(changes) > 10 * MAX_TEXT:
        left_out.append("the end of the uncommitted changes")
        changes = changes[: 10 * MAX_TEXT]
    return {**found, "changes": changes, "files": []}


def _distributions(store: RunStore, base: str, steps: set[int]) -> dict[str, Any]:
    """Returns the distributions for the charts of metrics, by address."""
    store.refresh("step_stats")
    found = store.fetch(
        "SELECT DISTINCT metric, coalesce(environment, '') AS environment FROM step_stats "
        f"ORDER BY environment != '', metric NOT IN ('reward', 'advantage'), metric LIMIT {MAX_DISTRIBUTIONS}"
    ) or [("reward", "")]
    out = {}
    for metric, environment in found:
        columns = curves.distribution(store, metric, environment)
        rows = [place for place, step in enumerate(columns["step"]) if step in steps]
        out[address(f"{base}/distribution", metric=metric, environment=environment)] = {
            name: _rounded(_picked(values, rows)) if len(values) == len(columns["step"]) else values
            for name, values in columns.items()
        }
    return out


def _eval_answers(store: RunStore, base: str, evals: Sequence[Row], left_out: list[str]) -> dict[str, Any]:
    """Returns completions of evals up to the size limit. Each eval's first and last result come first."""
    finished = [row for row in evals if row["status"] == "finished"]
    first = {row["name"]: row for row in reversed(finished)}
    last = {row["name"]: row for row in finished}
    ordered = [*first.values(), *last.values(), *reversed(finished)]
    out: dict[str, Any] = {}
    room = MAX_BYTES
    for row in ordered:
        key = f"{base}/evals/{row['attempt']}/{quote(row['eval_id'], safe=UNSAFE_CHARACTERS)}/samples"
        if key in out:
            continue
        found = curves.eval_samples(store, row["attempt"], row["eval_id"])
        size = len(to_json(found))
        if size <= room:
            out[key] = found
            room -= size
    if len(out) < len(finished):
        left_out.append(f"answers of {len(out)} of {len(finished)} evals")
    return out


def _examples(store: RunStore, steps: Sequence[int], left_out: list[str]) -> dict[str, Any]:
    """Returns groups of some steps, and their samples' conversations."""
    chosen = [steps[place] for place in _evenly(len(steps), ANSWER_STEPS)]
    kept = [(step, _few_groups(rollouts.groups(store, step))) for step in chosen]
    keys = [(group["attempt"], sample["id"]) for _, groups in kept for group in groups for sample in group["samples"]]
    details: dict[str, Any] = {}
    room = MAX_BYTES
    for key, sample in store.conversations(keys).items():
        value = _cut(rollouts.assemble(sample, []))
        room -= len(to_json(value))
        if room < 0:
            break
        details[f"{key[0]}/{key[1]}"] = value
    left_out.append(f"{len(details)} answers of {len(chosen)} steps, without numbers of tokens and times")
    return {"steps": [{"step": step, "groups": groups} for step, groups in kept if groups], "samples": details}


def _few_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Selects a few groups: kept groups from the highest to the lowest reward, and one discarded group."""
    kept = [group for group in groups if group["status"] == "kept"]
    trained = sorted(kept, key=lambda group: -(group["reward_mean"] or 0.0))
    others = [group for group in groups if group["status"] != "kept"][:1]
    few = [*(trained[place] for place in _evenly(len(trained), GROUPS - len(others))), *others]
    return [{**group, "samples": group["samples"][:SAMPLES]} for group in few]


def _cut(value: Any) -> Any:
    """Returns the value with all texts cut to `MAX_TEXT` characters."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value) - MAX_TEXT} more characters)"
    if isinstance(value, dict):
        return {name: _cut(part) for name, part in value.items()}
    return [_cut(part) for part in value] if isinstance(value, list) else value


def _evenly(number: int, most: int) -> list[int]:
    """Returns at most `most` evenly spaced indices below `number`, including the first and the last."""
    return np.linspace(0, number - 1, min(number, most)).round().astype(int).tolist()


def _picked(values: Sequence[Any], places: Iterable[int]) -> list[Any]:
    return [values[place] for place in places]


def _rounded(values: Sequence[Any]) -> list[Any]:
    return [float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for value in values]


def _pages(static: Path) -> tuple[str, dict[str, str], str]:
    """Returns the name of the first module, all modules that it imports, and the styles with their fonts."""
    index = static / "index.html"
    entry = _ENTRY.search(index.read_text()) if index.is_file() else None
    if entry is None:
        raise UserError("The pages are not built. Build them with `make dashboard`, then export again.")
    assets = static / "assets"
    there = {path.name for path in assets.glob("*.js")}
    modules: dict[str, str] = {}
    left = [entry[1]]
    while left:
        name = left.pop()
        if _SCHEME + name not in modules:
            text = (assets / name).read_text()
            left += [found[3] for found in _IMPORT.finditer(text) if found[3] in there]
            modules[_SCHEME + name] = _PRELOAD.sub("[]", _IMPORT.sub(rf"\1\2{_SCHEME}\3\4", text))
    fonts = {path.name: base64.b64encode(path.read_bytes()).decode() for path in assets.glob("*.woff2")}
    entry_first = sorted(assets.glob("*.css"), key=lambda path: (not path.name.startswith("index-"), path.name))
    style = "\n".join(path.read_text() for path in entry_first)
    style = _FONT.sub(lambda found: f"url(data:font/woff2;base64,{fonts.get(found[1], '')})", style)
    return _SCHEME + entry[1], modules, style
