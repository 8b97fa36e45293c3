"""Implements `telescope train`, which resolves the configuration, runs the preflight checks, and trains."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from telescope.cli.main import CommandParser, make_console, number
from telescope.config import LoadedConfig, TelescopeConfig, load_config, model_checks
from telescope.config.loader import choose_run_dir, load_resumed_config
from telescope.config.machine import local_resources, ray_cluster_is_configured
from telescope.config.plan import resolve_device
from telescope.config.remarks import remarks_on_place, remarks_on_resuming
from telescope.errors import EXIT_INTERRUPTED, ConfigError, RunError, UserError
from telescope.utils.text import pluralize, user_path

if TYPE_CHECKING:
    from telescope.evals.entries import EnvironmentKeys
    from telescope.orchestrator.status import RunSummary

LARGEST_GPU_GIB = 100_000  # far above any GPU, to detect a value in bytes
EPILOG = """\
Every field is a flag. --learning_rate 5e-7, --learning-rate 5e-7 and --learning_rate=5e-7 are the same; values are
YAML (true, null, [a, b], {key: value}); a boolean alone means true. Later wins: defaults, environment variables, the
YAML file, flags.

example:
  telescope train --config configs/examples/demo_countdown.yaml --number_of_steps 50 --seed 1
"""


def build_parser() -> CommandParser:
    """Returns the parser, whose help `print_train_help` extends by the fields."""
    parser = CommandParser(
        prog="telescope train",
        takes_fields=True,
        add_help=False,
        usage="telescope train --config FILE|--resume RUN_DIR [--dry-run] [--FIELD VALUE ...]",
        description="Trains a model with reinforcement learning, configured by the YAML file and the flags.",
        epilog=EPILOG,
    )
    parser.add_argument("--config", "-c", type=user_path, metavar="FILE", help="YAML file with the fields of this run")
    parser.add_argument(
        "--resume", type=user_path, metavar="RUN_DIR", help="continue this run; flags override its config"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the configuration, placement and memory; no start"
    )
    parser.add_argument(
        "--all", action="store_true", help="with --dry-run: show also the fields that have their default"
    )
    size = number(float, 1, LARGEST_GPU_GIB)
    parser.add_argument("--gpu-memory-gib", type=size, metavar="N", help="with --dry-run: assume GPUs of N GiB each")
    parser.add_argument("--help", "-h", action="store_const", const="short", help="the most used fields")
    parser.add_argument("--help-all", dest="help", action="store_const", const="all", help="every field")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code; raises `UserError` for bad input, before anything is started."""
    if arguments.help:
        from telescope.cli.config import print_train_help

        print_train_help(build_parser(), make_console(), all_fields=arguments.help == "all")
        return 0
    for flag, value, why in (
        ("--gpu-memory-gib", arguments.gpu_memory_gib, "assumes GPUs for a dry run; a run uses those of this machine"),
        ("--all", arguments.all, "lists every field of a dry run"),
    ):
        if value and not arguments.dry_run:
            raise ConfigError(f"{flag} {why}. Add --dry-run, or omit {flag}")
    if arguments.config is None and arguments.resume is None and not arguments.fields:
        raise UserError(
            "train needs a configuration: telescope train --config configs/examples/demo_countdown.yaml. "
            "`telescope train --help` lists its arguments"
        )
    if arguments.resume is not None:
        loaded = load_resumed_config(arguments.resume, arguments.fields, path=arguments.config)
    else:
        loaded = load_config(arguments.config, arguments.fields)
    if arguments.gpu_memory_gib is None:
        loaded = fit_to_machine(loaded)
    if loaded.config.resume_from_checkpoint:
        from telescope.orchestrator.resume import check_has_checkpoint, finished_steps

        run_dir = user_path(choose_run_dir(loaded.config))
        if (steps := finished_steps(loaded.config, run_dir)) is not None:
            print(f"{run_dir} has finished {steps} steps: nothing is left to do. Raise number_of_steps to train on")
            return 0
        if arguments.resume is not None:
            check_has_checkpoint(loaded.config, run_dir, arguments.config or run_dir / "config.yaml")
    if arguments.dry_run:
        from telescope.cli.dry_run import print_dry_run

        print_dry_run(
            loaded,
            make_console(),
            lambda here: try_components(loaded.config, here=here),
            gpu_memory_gib=arguments.gpu_memory_gib,
            all_fields=arguments.all,
        )
        return 0
    return _train(loaded)


def fit_to_machine(loaded: LoadedConfig) -> LoadedConfig:
    """Adjusts defaults that do not fit this machine, with a note."""
    from telescope.orchestrator import preflight

    config, notes = preflight.fit_to_machine(loaded.config)
    return replace(loaded, config=config, notes=[*loaded.notes, *notes])


def _train(loaded: LoadedConfig) -> int:
    notes = [*check_before_start(loaded), *remarks_on_resuming(loaded.config)]

    from telescope.orchestrator.checkpoints import CheckpointFolder
    from telescope.orchestrator.run import run_training
    from telescope.tui.live import LiveView

    try:
        summary = run_training(loaded.config, notes, LiveView(watch=watch_command))
    except (UserError, RunError):
        if loaded.config.debug:
            traceback.print_exc()
        raise
    checkpoints = CheckpointFolder.for_run(loaded.config, Path(summary.run_dir))
    print_summary(
        summary,
        make_console(),
        last_checkpoint=max(checkpoints.steps(), default=0),
        has_evals=bool(loaded.config.evals),
    )
    return 0 if summary.status == "finished" else EXIT_INTERRUPTED


def check_before_start(loaded: LoadedConfig) -> list[str]:
    """Makes all checks that start nothing. Returns remarks. Raises ConfigError for all problems together.

    Tries backend, model and parsers, which takes seconds, only if there is no other problem.
    """
    from telescope.orchestrator import preflight

    config, found = loaded.config, preflight.examine(loaded.config)
    notices: list[str] = []
    problems = found.of()
    if not found.of("environments"):
        here = not problems
        problems += preflight.problems_of(lambda: notices.extend(try_components(config, here=here)))
    if problems:
        raise ConfigError("\n".join(problems))
    assert found.report is not None
    joins = ray_cluster_is_configured(config.ray_address) and config.device == "auto"
    device = None if joins else resolve_device(config, local_resources())
    sentence = model_checks.checkpoint_sentence(config, found.report)
    remarks = [*remarks_on_place(config, device, found.report.shape), *([sentence] if sentence else [])]
    return [*loaded.notes, *remarks, *notices]


def try_components(config: TelescopeConfig, *, here: bool = True) -> list[str]:
    """Loads the environments and evals in a separate process. Returns their notices.

    If the run is meant for this machine (`here`), also tries the backend, the model and the engine, which need packages
    that only another machine may have.
    """
    from telescope.evals.entries import environment_keys
    from telescope.orchestrator.preflight import problems_of

    if not here:
        return try_environments_of(config, environment_keys(config))  # keeps the class of its error
    from telescope.inference.vllm.support import check_chat_parsers
    from telescope.trainer.trial import try_backend, try_model

    notices: list[str] = []
    keys = environment_keys(config)
    with ThreadPoolExecutor() as threads:  # each waits for its own process
        checks = (try_backend, try_model, check_chat_parsers)
        others = [threads.submit(problems_of, partial(check, config)) for check in checks]
        # In this thread, because the process of the environments ends with the thread that started it.
        problems = problems_of(lambda: notices.extend(try_environments_of(config, keys)))
        problems += [problem for other in others for problem in other.result()]
    if problems:
        raise ConfigError("\n".join(problems))
    return notices


def try_environments_of(config: TelescopeConfig, keys: EnvironmentKeys) -> list[str]:
    """Loads environments and evals in a separate process. Returns their notices; raises `UserError`."""
    from telescope.evals.entries import check_eval_items
    from telescope.rollout.trial import notices_of, try_environments

    infos = try_environments(
        keys.specs,
        environments_path=list(config.environments_path),
        making_seconds=config.environment_timeout_seconds,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    found = check_eval_items(config, keys, {spec.identity: info for spec, info in zip(keys.specs, infos, strict=True)})
    return [*notices_of(infos), *found]


def print_summary(summary: RunSummary, console: Console, *, last_checkpoint: int = 0, has_evals: bool = False) -> None:
    """Prints the closing lines of a run. `last_checkpoint` is the newest step, or 0 without checkpoints."""
    from telescope.evals.statistics import metric_label
    from telescope.record.files import RunFiles
    from telescope.weights.model_folder import read_origin

    can_continue = last_checkpoint > 0
    run_dir = _short(summary.run_dir)

    def row(name: str, text: str) -> None:
        console.print(f"  {name:<19}{text}", soft_wrap=True)

    console.print(f"\n[bold]{escape(summary.run_name)}[/] {summary.sentence}")
    failed = " and ".join(map(str, summary.heldout_failed)) if any(summary.heldout_failed) else ""
    items = f"{summary.heldout_items} items" + (f" ({failed} samples failed)" if failed else "")
    before, after = summary.heldout_before, summary.heldout_after
    result = f"held-out {metric_label(summary.heldout_metric)}"
    if before is not None and after is not None:
        interval = summary.heldout_gain_interval
        between = "" if interval is None else f", 95 % interval {interval[0]:+.3f} to {interval[1]:+.3f}"
        if interval is not None and interval[0] == interval[1]:
            between = " on every item"  # equal changes give the bootstrap an interval without width
        gain = f"{after - before:+.3f}{between}; {items}, temperature {summary.heldout_temperature:g}"
        row(result, f"{before:.3f} → [bold]{after:.3f}[/] ({gain})")
    elif before is not None:
        row(result, f"{before:.3f} before training ({items})")
    if summary.reward_first is not None and summary.reward_last is not None:
        last = "the last step" if summary.steps_of_attempt == 1 else f"the last {summary.steps_of_attempt} steps"
        scope = f", in {last}" if summary.is_continued else ""
        trained = f"{summary.reward_trained_first:.3f} → {summary.reward_trained_last:.3f}"
        change = f"{summary.reward_first:.3f} → [bold]{summary.reward_last:.3f}[/]"
        row("reward", f"{change} (all samples{scope}; {trained} in the groups that were trained)")
    if summary.eval_problems:
        count, last = len(summary.eval_problems), summary.eval_problems[-1]
        row("evals", f"{pluralize(count, 'problem')}, the last: {escape(last)}")
    if summary.record_error is not None:
        console.print(f"  [bold red]the record is incomplete[/]: {escape(summary.record_error)}", soft_wrap=True)
    is_there = RunFiles(summary.run_dir).run_json.exists()
    where = run_dir if is_there else f"{run_dir} was removed during the run; its record is lost"
    row("run directory", escape(where))
    if summary.model_dir is not None:
        origin = read_origin(Path(summary.model_dir))
        row("trained model", escape(f"{_short(summary.model_dir)}{f' ({origin})' if origin else ''}"))
    if 0 < last_checkpoint < summary.steps:
        repeated = pluralize(summary.steps - last_checkpoint, "step")
        row("checkpoints", f"the newest is after step {last_checkpoint}: a resume begins there and repeats {repeated}")
    if is_there:
        console.print("\nNext:")
        for arguments in next_commands(summary, run_dir, can_continue=can_continue, has_evals=has_evals):
            console.print(f"  {_own_command()} {arguments}", soft_wrap=True, markup=False)
    sys.stdout.flush()


def next_commands(summary: RunSummary, run_dir: str, *, can_continue: bool, has_evals: bool) -> list[str]:
    """Returns commands that can follow a run, without the program's name."""
    root, run_dir = shlex.quote(str(Path(run_dir).parent)), shlex.quote(run_dir)
    commands = [f"ui {run_dir}", "runs" if root == "runs" else f"runs --root {root}"]
    if summary.steps:
        commands.append(f'query --run {run_dir} "select step, reward_mean from steps order by step"')
    if can_continue or summary.model_dir is not None:
        commands.append(f"chat {run_dir if can_continue else shlex.quote(_short(str(summary.model_dir)))}")
    if can_continue and has_evals:
        commands.append(f"eval {run_dir}")
    if can_continue:
        more = "" if summary.status == "stopped" else f" --number_of_steps {2 * summary.steps}"
        commands.append(f"train --resume {run_dir}{more}")
    return commands


def watch_command(run_dir: str) -> str:
    """Returns the command that opens a run in the dashboard."""
    return f"{_own_command()} ui {shlex.quote(_short(run_dir))}" if run_dir else ""


def _own_command() -> str:
    """Returns how to call `telescope`, by its name or its path."""
    if shutil.which("telescope") is not None:
        return "telescope"
    return _short(str(Path(sys.executable).with_name("telescope")))


def _short(path: str) -> str:
    """Returns the path relative to the working directory, if it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
