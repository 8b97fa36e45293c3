"""Implements `telescope train --dry-run`, which prints the plan of a run without starting it.

Prints the resolved configuration and the fields that the user set, its hash, the placement on nodes and GPUs, and a
memory estimate for trainer and engine. Reads the model's small files (from the hub if needed); contacts no cluster. A
problem on this machine is an error, or a remark if the run is meant for another machine. With an assumed GPU size, the
run is meant for a machine with such GPUs, and problems with them are errors too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.config import LoadedConfig, TelescopeConfig, model_checks
from telescope.config.generate import yaml_text
from telescope.config.loader import choose_run_dir
from telescope.config.machine import local_resources
from telescope.config.memory import GIB, EngineMemory, TrainerMemory, estimate_memory, num_recomputed, plan_staging
from telescope.config.model_files import ModelReport
from telescope.config.plan import ClusterResources, Placement, PlacementError, assumed_cluster, plan_placement
from telescope.config.remarks import remarks_on_place, remarks_on_resuming
from telescope.config.schema import SECTIONS
from telescope.errors import ConfigError, UnreachableError
from telescope.orchestrator import preflight
from telescope.utils.text import pluralize

if TYPE_CHECKING:
    from telescope.orchestrator.checkpoints import Checkpoint

LONGEST_VALUE, LONGEST_CHOSEN = 60, 1000  # characters in the table of fields: a default, and a value of the user
MOST_WORKERS_SHOWN = 64  # rows of the placement


def print_dry_run(
    loaded: LoadedConfig,
    console: Console,
    try_user_code: Callable[[bool], list[str]],
    *,
    gpu_memory_gib: float | None = None,
    all_fields: bool = False,
) -> None:
    """Prints the plan. With `gpu_memory_gib`, plans for a machine with GPUs of that size.

    Calls `try_user_code(here)` if the environments are found, and shows the returned remarks. `here` means that the run
    is for this machine and has no other problem. Raises one `ConfigError` for all problems, after the plan, which is
    left out if the model's files cannot be read. A problem of this machine (too small, a port in use) is a remark if
    the run is meant for another machine or for assumed GPUs.
    """
    config = loaded.config
    assumed = None
    if gpu_memory_gib is not None:
        if config.device == "cpu":
            raise ConfigError(
                f'--gpu-memory-gib is {gpu_memory_gib:g}, but device is "cpu", so that the run takes no GPU. Leave '
                '--gpu-memory-gib out, or set device to "auto" or "cuda"'
            )
        assumed = assumed_cluster(config, gpu_memory_bytes=math.ceil(gpu_memory_gib * GIB))
    found = preflight.examine(config, assumed)
    report, resumed = found.report, found.checkpoint
    elsewhere = found.elsewhere
    if assumed is not None:
        elsewhere = (
            f"GPUs of {gpu_memory_gib:g} GiB are assumed (--gpu-memory-gib): the plan is for a machine with "
            f"{assumed.gpus} of them, and the placement shown is on assumed nodes."
        )
    problems, here = found.of("environments", "plan"), found.of("here")
    if resumed is not None:
        from telescope.orchestrator.checkpoints import refuse_damage

        problems += preflight.problems_of(lambda: refuse_damage(resumed.path, resumed.meta))
    notices: list[str] = []

    def try_components() -> None:
        try:
            notices.extend(try_user_code(not (problems or here or elsewhere or (report and report.unchecked))))
        except UnreachableError as error:
            if elsewhere is None:
                raise
            notices.append(f"Not checked on this machine: {error}")

    trials = [] if found.of("environments") else preflight.problems_of(try_components)
    if report is None or problems:
        raise ConfigError("\n".join([*problems, *([] if elsewhere else here), *trials]))
    remarked: list[str] = []
    if assumed is not None:
        # Prints the plan even if the hub cannot be reached and the sizes come from elsewhere.
        remarked = found.of("here", "files") if report.shape is not None else here
    elif elsewhere:
        remarked = found.of("here", "files", "machine")
    refused = [*(problem for problem in found.of() if problem not in remarked), *trials]

    _print_config(loaded, console, all_fields=all_fields)
    if resumed is not None:
        _print_resumed(resumed, console)
    placement, resources = _plan(config, assumed, elsewhere=elsewhere is not None)
    _print_placement(config, placement, console)
    remarks = [*loaded.notes, *remarks_on_resuming(config), *([elsewhere] if elsewhere else [])]
    remarks += remarks_on_place(config, placement.device, report.shape)
    remarks += _print_memory(config, report, placement, resources, console, assumed=assumed is not None)
    remarks += [f"On this machine, a run would be refused: {problem}." for problem in remarked]
    remarks += resumed.notes if resumed else []
    _print_remarks("Remarks", remarks, console)
    _print_remarks("Remarks of the environments", notices, console)
    if refused:
        raise ConfigError("\n".join(refused))
    console.print("\nDry run: nothing was started.", style="dim")


def _print_remarks(title: str, remarks: list[str], console: Console) -> None:
    if remarks:
        console.print(Text(f"\n{title}", style="bold cyan"))
        for text in remarks:
            console.print(Text(f"· {text}", style="yellow"))


def _print_config(loaded: LoadedConfig, console: Console, *, all_fields: bool) -> None:
    config = loaded.config
    values = config.values
    defaults = TelescopeConfig.model_construct().model_dump(mode="json", warnings=False)
    changed = config.user_set | {name for name, value in values.items() if value != defaults[name]}
    console.print(Text("Configuration", style="bold cyan"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", no_wrap=True)
    for section in SECTIONS:
        names = [name for name in section.model_fields if all_fields or name in changed]
        if names:
            table.add_row(Text(section.TITLE, style="bold"), "", "")
        for name in names:
            chosen = name in config.user_set
            text = yaml_text(values[name])
            longest = LONGEST_CHOSEN if chosen else LONGEST_VALUE
            if len(text) > longest:
                text = f"{text[: longest - 3]}..."
            mark = Text("* " if chosen else "  ", style="green")
            style = "green" if chosen else ""
            # Without the file's path.
            source = loaded.sources.get(name, "").rpartition(", ")[2] or ("adjusted" if name in changed else "")
            table.add_row(mark + Text(name, style=style), Text(text, style=style), Text(source))
    console.print(table)
    rest = (
        "everything else is a default" if all_fields else f"--all shows all {len(values)} fields, with their defaults"
    )
    console.print(Text.assemble(("* ", "green"), f"set by you; {rest}.", style="dim"))
    console.print(f"\n[bold]config hash[/]    {config.hash}")
    console.print(Text.assemble(("run directory  ", "bold"), str(choose_run_dir(config))), soft_wrap=True)
    prompts, answers = config.prompts_batch_size_for_trainer, config.group_size
    in_flight = config.num_inference_servers * config.lanes_per_server
    console.print(
        f"[bold]a step[/]         {prompts} prompts x {answers} answers = {prompts * answers} samples, at most "
        f"{in_flight} in flight; {pluralize(config.number_of_steps, 'step')}"
    )


def _print_resumed(checkpoint: Checkpoint, console: Console) -> None:
    """Prints the checkpoint from which the run would continue."""
    meta, state = checkpoint.meta, checkpoint.state
    kept = "weights and optimizer" if meta["training_state"] else "weights only"
    console.print(Text(f"\nContinues after step {checkpoint.step}", style="bold cyan"))
    console.print(Text(f"  {checkpoint.path}: complete, {kept}, written by {pluralize(meta['ranks'], 'rank')} on "
                       f"{datetime.fromtimestamp(meta['time']):%Y-%m-%d %H:%M}"), soft_wrap=True)  # fmt: skip
    console.print(
        f"  {pluralize(len(state.groups), 'finished group')} to train; "
        f"{pluralize(len(state.sampler.unfinished), 'prompt')} to sample again"
    )


def _plan(
    config: TelescopeConfig, assumed: ClusterResources | None, *, elsewhere: bool
) -> tuple[Placement, ClusterResources]:
    """Plans the placement on this machine or on an assumed cluster."""
    if not elsewhere:
        try:
            return plan_placement(config, here := local_resources()), here
        except PlacementError:
            pass  # reported as a problem of this machine; the plan shows what the run needs
    assumed = assumed or assumed_cluster(config)
    return plan_placement(config, assumed), assumed


def _print_placement(config: TelescopeConfig, placement: Placement, console: Console) -> None:
    table = Table(title=Text("\nPlacement", style="bold cyan"), title_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in ("node", "process", "GPUs", "CPU cores", "listens on"):
        table.add_column(heading, header_style="dim", no_wrap=True)
    order = {node: place for place, node in enumerate(placement.nodes)}
    by_node = sorted(placement.bundles, key=lambda placed: order[placed.node])
    first_for_evals = config.num_inference_servers - config.num_eval_servers
    for placed in by_node[:MOST_WORKERS_SHOWN]:
        bundle = placed.bundle
        server = bundle.role == "inference"
        use = ", for evals" if server and bundle.index >= first_for_evals else ""
        table.add_row(
            placed.node.name,
            f"inference server {bundle.index}{use}" if server else f"trainer rank {bundle.index}",
            ", ".join(map(str, placed.gpu_indices)) or "-",
            f"{bundle.cpus:g}",
            f"port {config.inference_base_port + bundle.index}" if server else "",
        )
    console.print(table)
    if len(by_node) > MOST_WORKERS_SHOWN:
        console.print(f"and {len(by_node) - MOST_WORKERS_SHOWN} more, on {len(order)} nodes in all", style="dim")


def _print_memory(
    config: TelescopeConfig,
    report: ModelReport,
    placement: Placement,
    resources: ClusterResources,
    console: Console,
    *,
    assumed: bool,
) -> list[str]:
    """Prints the estimate. Returns remarks about memory that is too small."""
    if placement.device == "cuda":
        sizes = [node.gpu_memory_bytes for node in placement.nodes]
    else:
        sizes = [node.memory_bytes for node in resources.nodes]
    memory = min((size or 0 for size in sizes), default=0) or None  # None if unknown
    of_which = f", for GPUs of {(memory or 0) / GIB:g} GiB as assumed" if assumed else ""
    console.print(Text(f"\nMemory (estimate{of_which})", style="bold cyan"))
    if report.shape is None:
        console.print(f"  no estimate: the sizes of {config.model} are not known.")
        return []
    estimate = estimate_memory(config, report.shape, device=placement.device, device_memory_bytes=memory)
    console.print(
        f"  {config.model}: {report.shape.num_parameters / 1e6:,.1f} M parameters, {report.shape.num_layers} layers, "
        f"from {report.source}"
    )
    worker = "GPU" if placement.device == "cuda" else "process"
    table = Table(box=None, padding=(0, 3, 0, 2))
    for side in ("trainer", "engine"):
        table.add_column(f"{side}, per {worker}", header_style="dim")
        table.add_column("", justify="right", no_wrap=True)
    trainer_rows = _trainer_rows(config, estimate.trainer, report.shape.num_layers)
    engine_rows = _engine_rows(config, estimate.engine)
    for left, right in zip_longest(trainer_rows, engine_rows, fillvalue=("", "")):
        table.add_row(*left, *right)
    console.print(table)
    if memory is None and placement.device == "cuda":
        console.print("  GPU memory is not known here: --gpu-memory-gib 80 checks the plan for such GPUs.")
    if sentence := model_checks.checkpoint_sentence(config, report):
        console.print(f"  {sentence}", soft_wrap=True)
    remarks, engine = list(estimate.problems), estimate.engine
    if engine.kv_cache is not None and engine.longest_sequence_kv <= engine.kv_cache < engine.all_slots_kv:
        remarks.append(
            f"The KV cache fits {engine.kv_cache / engine.all_slots_kv:.0%} of what all request slots need at full "
            "length; longer answers wait for each other. That is fine when most answers are short."
        )
    in_place = plan_staging(config, report.shape, memory).in_place_because
    # For a dense model on one GPU, the GPU decides; on the CPU there is no choice.
    is_open = config.inference_tensor_parallel_size == 1 and not report.shape.num_experts
    is_decided = not is_open or (placement.device == "cuda" and memory is not None)
    if config.weight_transfer == "auto" and in_place and is_decided:
        remarks.append(
            "A sync loads the adapter alone into each server, in a pause: the base weights stay."
            if config.lora_sync == "adapter"
            else f"Weights reach the servers in place, inside a pause of each: {in_place}."
        )
    return remarks


def _trainer_rows(config: TelescopeConfig, trainer: TrainerMemory, num_layers: int) -> list[tuple[str, str]]:
    if config.train_backend == "megatron":
        dtype, context = config.compute_dtype, config.megatron_context_parallel_size
        parts = config.megatron_tensor_parallel_size * config.megatron_pipeline_parallel_size
        checkpointing = "recomputed" if config.megatron_gradient_checkpointing else "kept"
    else:
        dtype, context, parts = config.model_dtype, config.fsdp_context_parallel_size, config.trainer_num_workers
        layers = num_recomputed(config, num_layers)
        checkpointing = "recomputed" if config.gradient_checkpointing else "kept"
        if config.gradient_checkpointing_layers is not None and layers < num_layers:
            checkpointing = f"{layers} layers recomputed"
        if trainer.recomputes_attention:
            checkpointing += " with attention"
    tokens = f"{config.seq_len:,} tokens"
    if context > 1:
        tokens = f"{-(-config.seq_len // context):,} of {tokens}"
    sizes = [
        (f"parameters ({dtype}, 1/{parts})", trainer.parameters),
        ("gradients", trainer.gradients),
        ("optimizer (AdamW)", trainer.optimizer),
        ("weights that stay gathered", trainer.unsharded),
        (f"activations ({tokens}, {checkpointing})", trainer.activations),
        ("largest moment of a backward pass", trainer.moment),
        ("libraries", trainer.overhead),
        ("total", trainer.total),
    ]
    return [(name, _gib(size)) for name, size in sizes if size]


def _engine_rows(config: TelescopeConfig, engine: EngineMemory) -> list[tuple[str, str]]:
    sizes = [
        (f"weights ({config.engine_dtype}, 1/{config.inference_tensor_parallel_size})", engine.weights),
        ("second copy for weight syncs", engine.staging),
        (f"KV cache ({engine.kv_bytes_per_token / 1024:,.1f} KiB per token)", engine.kv_cache),
        ("workspace", engine.overhead),
    ]
    rows = [(name, "what is left" if size is None else _gib(size)) for name, size in sizes if size != 0]
    if engine.total is not None:
        rows.append(("total", _gib(engine.total)))
    if engine.tokens is not None:
        full = engine.tokens / config.max_model_len
        rows.append((f"KV cache holds {engine.tokens:,} tokens", f"{full:,.1f} full"))
    rows.append((f"all {config.lanes_per_server} request slots, full length", _gib(engine.all_slots_kv)))
    return rows


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):,.1f} MiB"
