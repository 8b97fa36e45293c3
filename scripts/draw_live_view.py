"""Draws the README's picture of the live view from a real run.

python scripts/draw_live_view.py runs/countdown-demo-... --step 40 docs/images/live.svg
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from telescope.cli.live_view import render
from telescope.orchestrator.status import RunStatus, StepSummary
from telescope.record.reader import Run

WIDTH = 104


def status_at(run: Run, step: int) -> RunStatus:
    """Returns the state of the live view after `step` steps, from the record."""
    rows = sorted(run.table("steps").to_pylist(), key=lambda row: row["step"])
    info = run.info
    assert info is not None, "not a run directory"
    status = RunStatus(info.name, len(rows), phase="training")
    for row in rows[:step]:
        metrics, seconds = dict(row["metrics"]), row["ended_at"] - row["started_at"]
        status.history.append(
            StepSummary(
                step=row["step"],
                reward_mean=row["reward_mean"],
                seconds=seconds,
                staleness_mean=metrics["staleness/steps/mean"],
                tokens_per_second=row["num_tokens_trained"] / seconds,
                kl_inference=metrics["kl_divergence_inference"],
                grad_norm=metrics["grad_norm"],
                entropy=metrics["entropy"],
                waited_share=metrics["timing_waiting_for_data"] / seconds,
            )
        )
    last = rows[step - 1]
    status.step = status.version = step
    status.started_at = time.time() - (last["ended_at"] - info.started_at)
    gauges = {row["name"]: row["value"] for row in run.table("gauges").to_pylist() if row["time"] <= last["ended_at"]}
    status.num_generating, status.num_open_groups = int(gauges["lanes_used"]), int(gauges["groups_open"])
    status.num_finished_groups = int(gauges["groups_ready"])
    lanes = [row["lane"] for row in run.table("samples").to_pylist() if row["lane"] is not None]
    status.num_slots = max(lanes, default=0) + 1
    given_up = [group for group in run.table("groups").to_pylist() if group["status"] == "discarded"]
    status.num_discarded_groups = sum(group["finished_at"] <= last["ended_at"] for group in given_up)
    status.token_times.append((time.monotonic(), int(gauges["tokens_per_second"] * 10)))
    for part, doing in (
        ("trainer", f"training step {step}"),
        ("server 0", "serving"),
        ("dispatch", "waiting for the async window"),
        ("batches", "waiting for 16 usable groups"),
        ("prompts", "waiting for a free place in the prompt buffer"),
    ):
        status.set_component(part, doing)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--step", type=int, required=True, help="steps finished when the picture is taken")
    arguments = parser.parse_args()
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(status_at(Run(arguments.run_dir), arguments.step), WIDTH))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(arguments.output), title="telescope train")


if __name__ == "__main__":
    main()
