"""Measures the dashboard on the recorded run of the demo, repeated: its server, and its pages in Chromium.

    python benchmarks/dashboard.py --quick                    about 1,000 steps x 150 samples
    python benchmarks/dashboard.py                            about 2,500 steps x 150 samples: a million in all
    python benchmarks/dashboard.py --keep /tmp/run            keeps the run, for `telescope ui /tmp/run`

Requests each address that a page reads, in this process and without a network: once, when the tables are read from
disk, and then several times for a median, with different parameters where pages have them. Then opens each page in
Chromium: from a server that has just started, and again. Memory is that of a server after
all pages were opened.
"""

from __future__ import annotations

import gzip
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from command_line import command, parser_of, write_json
from command_line import show as show_table
from dashboard_browser import measure_pages
from dashboard_run import write_run
from fastapi.testclient import TestClient
from measure import provenance

from telescope.dashboard.app import STATIC, create_app
from telescope.record.reader import Run

REPEATS = 5


def main() -> int:
    parser = parser_of(__doc__, "about 1,000 steps x 150 samples")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--samples", type=int, default=150, help="samples of a step")
    parser.add_argument("--keep", type=Path, help="write the run here and keep it; an existing one is used")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.samples = 1000, 150
    where = provenance(["fastapi", "duckdb", "pyarrow"])
    with tempfile.TemporaryDirectory() as folder:
        run_dir = arguments.keep or Path(folder) / "run"
        begin = time.perf_counter()
        if not run_dir.exists():
            write_run(run_dir, arguments.steps, arguments.samples)
        print(f"{run_dir}: {time.perf_counter() - begin:.0f} s, {size(run_dir) / 2**20:.0f} MiB", flush=True)
        counted = {name: Run(run_dir).num_rows(name) for name in ("samples", "spans", "turns", "gauges")}
        rows = measure(run_dir, arguments.steps)
        show(rows)
        print(f"{psutil.Process().memory_info().rss / 2**20:.0f} MiB of memory in use by this process", flush=True)
        browser = measure_pages(run_dir, REPEATS)
    show(browser["pages"])
    show(browser["inputs"])
    frames = ", ".join(f"{name} {value:.0f}" for name, value in browser["timeline_frames"].items())
    print(f"timeline of the whole run, zooming: {frames}\nserver: {browser['server_mib']:.0f} MiB of memory")
    print(f"server while a page is open: {browser['idle_server_percent_of_a_core']:.1f} % of a core")
    print(f"built pages: {built_kib():.0f} KiB compressed")
    shape = {"steps": arguments.steps, "samples": arguments.samples, "rows": counted, "built_kib": built_kib()}
    write_json(arguments.json, {"where": where, "command": command(), **shape, "addresses": rows, **browser})
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a table of numbers behind a name."""
    titles = [name.replace("_", " ") for name in rows[0]]
    show_table(
        titles, [[value if isinstance(value, str) else f"{value:.0f}" for value in row.values()] for row in rows]
    )


def measure(run_dir: Path, num_steps: int) -> list[dict[str, Any]]:
    """Returns the times of each address in milliseconds."""
    client = TestClient(create_app([run_dir]), base_url="http://localhost")
    ((run_id,),) = ([row["id"]] for row in client.get("/api/runs").json()["runs"])
    run = f"/api/runs/{run_id}"
    middle = num_steps // 2
    steps = client.get(f"{run}/steps").json()
    begin, end = steps["started_at"][middle], steps["ended_at"][min(middle + 3, num_steps - 1)]
    groups = [group for step in range(middle, middle + 2) for group in client.get(f"{run}/groups?step={step}").json()]
    ids = [group["samples"][0]["id"] for group in groups][: REPEATS + 1]
    client = TestClient(create_app([run_dir]), base_url="http://localhost")
    page = f"{run}/samples?limit=100&facets=false"
    addresses: list[list[str]] = [
        ["/api/runs"],
        [run],
        [f"{run}/steps"],
        [f"{run}/health"],
        [f"{run}/distribution?metric=completion_tokens"],
        [f"{run}/groups?step={middle + place}" for place in range(REPEATS + 1)],
        [page],
        [f"{page}&status=kept&step_min={place}" for place in range(REPEATS + 1)],
        [f"{run}/samples?limit=0&status=kept&step_min={place}" for place in range(REPEATS + 1)],
        [f"{page}&reward={place % 2}&sort=-completion_tokens" for place in range(REPEATS + 1)],
        [f"{page}&search=answer>{place + 10}" for place in range(REPEATS + 1)],
        [f"{page}&search=answer>1&offset={100 * place}" for place in range(REPEATS + 1)],
        [f"{run}/samples/1/{sample}" for sample in ids],
        [f"{run}/spans?limit=40000&buckets=2000"],
        [f"{run}/spans?start={begin}&end={end}"],
        [f"{run}/gauges?names=lanes_used&points=400"],
        [f"{run}/logs"],
        [f"{run}/logs?search=step {place}" for place in range(REPEATS + 1)],
    ]
    results = []
    for choices in addresses:
        times, answer = [], None
        for place in range(REPEATS + 1):
            begin = time.perf_counter()
            answer = client.get(choices[place % len(choices)])
            times.append(1000 * (time.perf_counter() - begin))
            assert answer.status_code == 200, answer.text
        assert answer is not None
        then = {
            "median_ms": statistics.median(times[1:]),
            "largest_ms": max(times[1:]),
            "kib": len(answer.content) / 1024,
        }
        results.append({"address": choices[0].removeprefix(run) or run, "first_ms": times[0], **then})
    return results


def built_kib() -> float:
    """Returns the size of the built pages, compressed as the server does. Fonts are compressed already."""
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    contents = [path.read_bytes() if path.suffix == ".woff2" else gzip.compress(path.read_bytes(), 1) for path in files]
    return sum(map(len, contents)) / 1024


def size(folder: Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
