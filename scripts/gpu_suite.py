"""Tests and benchmarks on a machine with GPUs, in order of worth, inside a time limit; one JSON with all results.

    python scripts/gpu_suite.py --json results.json --minutes 10
    python scripts/gpu_suite.py --list                    what there is, what it needs and how long it takes

Each part is a process of its own with a deadline; what needs more GPUs than there are, or more time than is left, is
skipped and says so. Results are written after every part, so a machine that goes away takes only the part in progress
with it. `--only` names parts. Exit code 1 when a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TAIL_LINES = 15


@dataclass(frozen=True)
class Part:
    """`command` may hold {json} for a file of results, {tiny} for a model made beforehand and {folder} for scratch."""

    name: str
    command: str
    num_gpus: int
    seconds: int
    """What it takes on H200s with a cold compile cache, and about a half more: its deadline."""
    results: str = "results.json"
    """Where its results are, in the scratch folder."""


DEMO = (
    "--config configs/examples/demo_countdown.yaml --model {tiny} --device cuda --trainer_num_workers 1 "
    "--inference_num_workers 1 --inference_threads null --trainer_threads null --ray_inference_cpus_per_worker 4 "
    "--ray_trainer_cpus_per_worker 4 --use_wandb false"
)
RUN = f"{sys.executable} -m telescope.cli.main"
PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider -m gpu"
SHARES = "--set ray_inference_cpus_per_worker=4 ray_trainer_cpus_per_worker=4"
PARTS = (
    Part("weights", f"{PYTEST} tests/gpu/weights", 1, 300),
    Part("sync 4b", f"{sys.executable} benchmarks/weight_sync.py --shapes 4b --json {{json}}", 2, 240),
    Part(
        "demo on one gpu",
        f"{RUN} train {DEMO} --share_gpus true --number_of_steps 20 --weight_probe_every 5 --run_dir {{folder}}/run",
        1,
        200,
        "run/summary.json",
    ),
    Part("verify", f"{RUN} verify {DEMO} --gpu_memory_utilization 0.5 --json {{json}}", 2, 200),
    Part("trainer tests", f"{PYTEST} tests/gpu --ignore tests/gpu/weights", 1, 300),
    Part("trainer speed", f"{sys.executable} benchmarks/trainer.py --shapes 0.6b --json {{json}}", 1, 300),
    Part("sync small", f"{sys.executable} benchmarks/weight_sync.py --shapes 0.6b 1.7b --json {{json}}", 2, 360),
    Part(
        "sync 8b on four",
        f"{sys.executable} benchmarks/weight_sync.py --shapes 8b --engines 2 --trainers 2 --json {{json}}",
        4,
        420,
    ),
    Part("throughput", f"{sys.executable} benchmarks/engine_throughput.py {SHARES} --json {{json}}", 1, 420),
    Part("end to end", f"{sys.executable} benchmarks/end_to_end.py {SHARES} --timeout 480 --json {{json}}", 4, 600),
    Part(
        "engine loss",
        # Few lanes and one rank: generation, and not the trainer, says how fast it goes.
        f"{sys.executable} benchmarks/engine_loss.py {SHARES} trainer_num_workers=1 "
        "max_concurrent_prompts_per_server=4 --json {json}",
        3,
        420,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_suite.json"), help="where the results go")
    parser.add_argument("--minutes", type=float, default=30.0, help="start nothing that may not end within this time")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    arguments = parser.parse_args()
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:16} {part.num_gpus} GPU(s), up to {part.seconds} s: {part.command}")
        return 0
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    deadline = time.monotonic() + 60 * arguments.minutes
    gpus = gpu_names()
    report: dict[str, Any] = {"gpus": gpus, "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
    report["parts"] = results = []
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        for part in parts:
            left = deadline - time.monotonic()
            result = why_not(part, len(gpus), left) or run_part(part, Path(folder))
            results.append(asdict(part) | result)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{part.name}: {result['outcome']} ({result.get('took', 0):.0f} s)", flush=True)
            if result["outcome"] == "failed":
                print(*result["tail"], sep="\n", flush=True)
    return int(any(result["outcome"] == "failed" for result in results))


def gpu_names() -> list[str]:
    """The GPUs of this machine, in the words of its driver; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def why_not(part: Part, num_gpus: int, seconds_left: float) -> dict[str, Any] | None:
    """The result of a part that is not run here, or None."""
    if part.num_gpus > num_gpus:
        return {"outcome": f"skipped: needs {part.num_gpus} GPUs, this machine has {num_gpus}"}
    if part.seconds > seconds_left:
        return {"outcome": f"skipped: may take {part.seconds} s, {max(seconds_left, 0):.0f} s are left"}
    return None


def run_part(part: Part, folder: Path) -> dict[str, Any]:
    """Run it within its time, with everything that it starts. `results` is what it wrote, if it writes."""
    results, output = folder / part.results, folder / "output.txt"
    results.unlink(missing_ok=True)
    words = {"json": results, "folder": folder, "tiny": folder / "tiny"}
    if "{tiny}" in part.command and not words["tiny"].exists():
        # Kernels of GPUs want heads of 64 numbers.
        make = f"{RUN} tiny-model --output {words['tiny']} --num-heads 2 --num-kv-heads 1"
        subprocess.run(shlex.split(make), cwd=REPOSITORY, env=environment(), check=True)
    started = time.monotonic()
    with output.open("w") as sink:
        process = subprocess.Popen(
            shlex.split(part.command.format(**words)),
            cwd=REPOSITORY,
            env=environment(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    return {
        "outcome": "passed" if code == 0 else "failed",
        "exit_code": code,
        "took": round(time.monotonic() - started, 1),
        "tail": output.read_text(errors="replace").splitlines()[-TAIL_LINES:],
        "results": json.loads(results.read_text()) if results.exists() else None,
    }


def environment() -> dict[str, str]:
    """This process's, with the sources of this checkout first and what several GPUs on a shared host need."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    sys.exit(main())
