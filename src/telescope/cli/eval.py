"""Implements `telescope eval`, which measures saved checkpoints and models. The exit code is 1 if an eval failed."""

from __future__ import annotations

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from telescope.cli.main import EXIT_FAILED, CommandParser, file_to_write, make_console
from telescope.errors import UserError
from telescope.utils.data import to_json_value
from telescope.utils.text import user_path

if TYPE_CHECKING:
    from telescope.orchestrator.eval_run import EvalJob, EvalOutcome

DESCRIPTION = """\
Measures models on evals or environments. A MODEL is a run directory (all its checkpoints), a step_N folder, a folder of
them, a model in Hugging Face format, or a name on the hub. Checkpoints need not be converted.

  telescope eval runs/first                                 the run's own evals at every checkpoint
  telescope eval runs/first --step 50,100 --eval math500    two checkpoints on another eval
  telescope eval --model Qwen/Qwen3-0.6B --eval math500 --num-samples 100
  telescope eval --config configs/evals/eval.yaml           see the comments in that file"""

EPILOG = """\
  --FIELD VALUE         fields of `telescope train` that concern sampling, servers and environments, such as
                        --temperature 0.6 --max_tokens 2048 --max_model_len 4096 --inference_num_workers 4

Sampling settings and prompts of a run's checkpoints are the run's own, unless they are set here. All models share one
pool of servers, which is started once. Results are in the run's record: telescope query "select * from evals".
Ctrl-C leaves nothing behind; the same command continues with the samples that are not done yet."""

RESULT_VALUES = (
    "name", "number", "accuracy", "metric", "num_items", "num_completions", "num_scored", "num_failed", "temperature",
    "metrics",
)  # fmt: skip
FIELDS = ("checkpoint_dir", "wandb_run_path", "max_concurrent_samples_per_server")
"""Options that are also fields of the file."""


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope eval",
        takes_fields=True,
        usage="telescope eval [MODEL ...] [--eval NAME ...] [--config FILE] [options] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--model", action="append", default=[], help="as MODEL; repeatable")
    parser.add_argument("--step", type=_steps, metavar="N,M|all", help="only these checkpoints of runs and folders")
    parser.add_argument(
        "--eval", action="append", default=[], metavar="NAME",
        help="eval or environment to measure, with the run's settings for it if it has some; repeatable",
    )  # fmt: skip
    parser.add_argument("--num-samples", type=int, metavar="N", help="items of each eval, the first ones (-1: all)")
    parser.add_argument("--config", "-c", type=user_path, metavar="FILE", help="file of evals, checkpoints and fields")
    parser.add_argument("--checkpoint-dir", metavar="D", help="as MODEL")
    parser.add_argument(
        "--output", type=user_path, metavar="DIR",
        help="folder for samples, logs and the plot (default: RUN_DIR/evals/<settings>, or evals/<model>-...)",
    )  # fmt: skip
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--plot", type=file_to_write, metavar="FILE", help="write the plot here (SVG; default: in the output folder)"
    )
    parser.add_argument("--wandb-run-path", metavar="P", help="also log to this W&B run: entity/project/run_id")
    parser.add_argument(
        "--max-concurrent-samples-per-server", type=int, metavar="N", help="samples of a server at once (default: 256)"
    )
    return parser


def run(own: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code; raises `UserError` for bad input, before anything is started."""
    leading = list(takewhile(lambda argument: not argument.startswith("-"), own.fields))

    from telescope.config.eval_config import load_eval_request
    from telescope.orchestrator.eval_run import prepare

    command = {name: value for name in FIELDS if (value := getattr(own, name)) is not None}
    request = load_eval_request(own.config, own.fields[len(leading) :], command)
    run_path = _run_path(request.command.wandb_run_path)
    job = prepare(
        request,
        [*leading, *own.model],
        steps=own.step or None,
        names=own.eval,
        num_samples=own.num_samples,
        output=own.output,
    )
    outcome = _measure(job, run_path)
    plot = own.plot or job.output / "accuracy.svg"
    _write_plot(outcome, plot)
    text = json.dumps(to_json_value(as_json(outcome)), indent=1) + "\n"
    for file in (job.output / "results.json", own.json):
        if file is not None:
            file.write_text(text)
    print_outcome(outcome, plot)
    return EXIT_FAILED if outcome.problems else 0


def _measure(job: EvalJob, run_path: str | None) -> EvalOutcome:
    from telescope.cli.train import try_environments_of
    from telescope.evals.entries import environment_keys
    from telescope.orchestrator.eval_run import run_evals
    from telescope.trackers.launch import TrackerProcess
    from telescope.tui.live import phases

    notices = try_environments_of(job.config, environment_keys(job.config, with_training=False))
    with phases("evaluation", (*job.notes, *notices), ". The same command continues") as view:
        evals = run_path and dict(zip(("entity", "project", "run_id"), run_path.split("/"), strict=True))
        record = {"record": str(job.run_dir or job.output), "evals": job.eval_names()}
        trackers = TrackerProcess(job.config, job.output, {**evals, **record} if evals else None)
        trackers.tell = view.say
        try:
            return run_evals(job, view)
        finally:
            trackers.close()


def as_json(outcome: EvalOutcome) -> dict[str, Any]:
    """Returns the results as JSON values: models with their evals."""
    models = [
        {
            "model": result.target.label,
            "path": str(result.target.path),
            "step": result.target.step,
            "version": result.version,
            "evals": [
                {
                    **{name: getattr(each, name) for name in RESULT_VALUES},
                    "interval": each.estimate and [each.estimate.low, each.estimate.high],
                    "gain": each.gain and [each.gain.mean, each.gain.low, each.gain.high],
                }
                for each in result.results
            ],
        }
        for result in outcome.results
    ]
    return {"models": models, "problems": outcome.problems, "output": str(outcome.job.output)}


def print_outcome(outcome: EvalOutcome, plot: Path) -> None:
    """Prints a table of the results, the problems, and the output folders."""
    from telescope.record.reader import eval_names

    console, named = make_console(), eval_names(outcome.job.config.values)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "eval"):
        table.add_column(name)
    shown = dict.fromkeys(each.label for result in outcome.results for each in result.results)
    for name in (" or ".join(shown) or "accuracy", "95 % interval", "gain", "items", "failed"):
        table.add_column(name, justify="right")
    for result in outcome.results:
        for each in result.results:
            low_high = "" if each.estimate is None else f"{each.estimate.low:.3f} to {each.estimate.high:.3f}"
            gain = ""
            if each.gain is not None:
                # Items that all change equally, such as not at all, give the bootstrap an interval without width.
                wide = each.gain.low < each.gain.high
                between = f"{each.gain.low:+.3f} to {each.gain.high:+.3f}" if wide else "on every item"
                gain = f"{each.gain.mean:+.3f} ({between})"
            name = named(each.name, each.number) + (f", {each.label}" if len(shown) > 1 else "")
            table.add_row(
                Text(result.target.label), Text(name), f"{each.accuracy:.4f}", low_high, gain,
                str(each.num_items), str(each.num_failed),
            )  # fmt: skip
            for name, value in each.metrics.items():
                if name.startswith("pass"):
                    table.add_row("", Text(f"  {name}"), f"{value:.4f}")
    console.print(table)
    for problem in outcome.problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    job = outcome.job
    where = f"{job.output}, and in the record of {job.run_dir}" if job.run_dir else str(job.output)
    console.print(f"results in {where}; plot in {plot}", soft_wrap=True)


def _write_plot(outcome: EvalOutcome, path: Path) -> None:
    from telescope.record.charts import Point, line_chart
    from telescope.record.reader import eval_names

    series: dict[str, list[Point]] = {}
    shown: dict[str, None] = {}
    named = eval_names(outcome.job.config.values)
    for result in outcome.results:
        for each in result.results:
            low, high = (each.estimate.low, each.estimate.high) if each.estimate else (None, None)
            series.setdefault(named(each.name, each.number), []).append(Point(result.version, each.accuracy, low, high))
            shown[each.label] = None
    if series:
        path.write_text(line_chart(series, title=f"{' or '.join(shown).capitalize()}, with 95 % intervals"))


def _steps(text: str) -> list[int]:
    """Parses a list of steps. Empty for all checkpoints."""
    numbers = [] if text == "all" else text.replace(" ", "").split(",")
    if not all(number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is neither numbers of checkpoints, as in 50,100, nor all")
    return [int(number) for number in numbers]


def _run_path(path: str | None) -> str | None:
    """Checks `wandb_run_path`. The address of a run has /runs/ before the id."""
    if path is None:
        return None
    parts = [part for part in path.strip("/").split("/") if part != "runs"]
    if len(parts) != 3:
        raise UserError(f"wandb_run_path is {path!r}. Give entity/project/run_id, or leave it null")
    return "/".join(parts)
