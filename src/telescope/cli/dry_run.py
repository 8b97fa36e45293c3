"""`telescope train --dry-run`: what a run would be, printed and not started.

The resolved configuration with what the user set, its hash, the placement on nodes and GPUs, and a memory estimate for
trainer and engine. Reads the model's small files (from the hub if need be); contacts no cluster.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope.config import LoadedConfig, TelescopeConfig, preflight
from telescope.config.describe import yaml_text
from telescope.config.machine import local_resources, ray_cluster_is_configured
from telescope.config.memory import GIB, EngineMemory, MemoryEstimate, TrainerMemory, estimate_memory
from telescope.config.model_files import ModelReport, inspect_model
from telescope.config.plan import ClusterResources, Placement, PlacementError, assumed_cluster, plan_placement
from telescope.config.run_dir import choose_run_dir
from telescope.config.sections import SECTIONS
from telescope.errors import UserError

LONGEST_VALUE = 60  # characters of a default in the table of fields; what the user set is shown in full


def print_dry_run(loaded: LoadedConfig, console: Console) -> None:
    """Print everything. Raises `UserError` for what would be wrong on any machine (environments, model files).

    What is wrong with this machine alone (too small, a port in use) is printed as a remark: the run may be meant for
    another one.
    """
    config = loaded.config
    preflight.check_environments(config)
    preflight.check_evals(config)
    report = inspect_model(config)
    remarks = list(loaded.notes)

    _print_config(loaded, console)
    placement, resources, remark = _plan(config)
    if remark:
        remarks.append(remark)
    _print_placement(config, placement, console)
    remarks += _print_memory(config, report, placement, resources, console)
    if report.unchecked:
        remarks.append(f"Not checked: {report.unchecked}.")
    remarks += _problems_of_this_machine(config)
    if remarks:
        console.print(Text("\nRemarks", style="bold cyan"))
        for text in remarks:
            console.print(Text(f"· {text}", style="yellow"))
    console.print("\nDry run: nothing was started.", style="dim")


def _print_config(loaded: LoadedConfig, console: Console) -> None:
    config = loaded.config
    values = config.values
    console.print(Text("Configuration", style="bold cyan"))
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", no_wrap=True)
    for section in SECTIONS:
        table.add_row(Text(section.TITLE, style="bold"), "", "")
        for name in section.model_fields:
            chosen = name in config.user_set
            text = yaml_text(values[name])
            if len(text) > LONGEST_VALUE and not chosen:
                text = f"{text[: LONGEST_VALUE - 3]}..."
            mark = Text("* " if chosen else "  ", style="green")
            style = "green" if chosen else ""
            table.add_row(mark + Text(name, style=style), Text(text, style=style), Text(_source(loaded, name)))
    console.print(table)
    console.print(Text.assemble(("* ", "green"), "set by you; everything else is a default.", style="dim"))
    console.print(f"\n[bold]config hash[/]    {config.hash}", highlight=False)
    console.print(Text.assemble(("run directory  ", "bold"), str(choose_run_dir(config))), soft_wrap=True)
    prompts, answers = config.prompts_batch_size_for_trainer, config.group_size
    in_flight = config.num_inference_servers * config.lanes_per_server
    console.print(
        f"[bold]a step[/]         {prompts} prompts x {answers} answers = {prompts * answers} samples, at most "
        f"{in_flight} in flight; {config.number_of_steps} steps",
        highlight=False,
    )


def _source(loaded: LoadedConfig, name: str) -> str:
    """Where a value comes from, without the path that is the same for every line of the file."""
    return loaded.sources.get(name, "").rpartition(", ")[2]


def _plan(config: TelescopeConfig) -> tuple[Placement, ClusterResources, str | None]:
    """A placement on this machine, or on an assumed cluster when this machine cannot hold the run, with a remark."""
    here = local_resources()
    if ray_cluster_is_configured(config.ray_address):
        problem = f"ray_address is {config.ray_address!r}; a dry run does not contact the cluster."
    else:
        try:
            return plan_placement(config, here), here, None
        except PlacementError as error:
            problem = f"This machine cannot hold the run: {error}."
    assumed = assumed_cluster(config)
    return plan_placement(config, assumed), assumed, f"{problem} The placement shown is on assumed nodes."


def _print_placement(config: TelescopeConfig, placement: Placement, console: Console) -> None:
    table = Table(title=Text("\nPlacement", style="bold cyan"), title_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in ("node", "process", "GPUs", "CPU cores", "listens on"):
        table.add_column(heading, header_style="dim", no_wrap=True)
    for node in placement.nodes:
        for placed in placement.bundles:
            if placed.node != node:
                continue
            bundle = placed.bundle
            server = bundle.role == "inference"
            table.add_row(
                node.name,
                f"inference server {bundle.index}" if server else f"trainer rank {bundle.index}",
                ", ".join(map(str, placed.gpu_indices)) or "-",
                f"{bundle.cpus:g}",
                f"port {config.inference_base_port + bundle.index}" if server else "",
            )
    console.print(table)


def _print_memory(
    config: TelescopeConfig,
    report: ModelReport,
    placement: Placement,
    resources: ClusterResources,
    console: Console,
) -> list[str]:
    """Print the estimate. Returns remarks about what does not fit."""
    console.print(Text("\nMemory (estimate)", style="bold cyan"))
    if report.shape is None:
        console.print(f"  no estimate: the sizes of {config.model} are not known (looked at {report.source}).")
        return []
    memory = _device_memory(placement, resources)
    estimate = estimate_memory(config, report.shape, device=placement.device, device_memory_bytes=memory)
    console.print(
        f"  {config.model}: {report.shape.num_parameters / 1e6:,.1f} M parameters, {report.shape.num_layers} layers, "
        f"from {report.source}",
        highlight=False,
    )
    worker = "GPU" if placement.device == "cuda" else "process"
    table = Table(box=None, padding=(0, 3, 0, 2))
    for side in ("trainer", "engine"):
        table.add_column(f"{side}, per {worker}", header_style="dim", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    trainer_rows, engine_rows = _trainer_rows(config, estimate.trainer), _engine_rows(config, estimate.engine, memory)
    for index in range(max(len(trainer_rows), len(engine_rows))):
        left = trainer_rows[index] if index < len(trainer_rows) else ("", "")
        right = engine_rows[index] if index < len(engine_rows) else ("", "")
        table.add_row(*left, *right)
    console.print(table)
    return list(_remarks(config, estimate))


def _trainer_rows(config: TelescopeConfig, trainer: TrainerMemory) -> list[tuple[str, str]]:
    checkpointing = "recomputed" if config.gradient_checkpointing else "kept"
    return [
        (f"parameters ({config.model_dtype}, 1/{config.trainer_num_workers})", _gib(trainer.parameters)),
        ("gradients", _gib(trainer.gradients)),
        ("optimizer (AdamW)", _gib(trainer.optimizer)),
        ("gathered layers", _gib(trainer.unsharded)),
        (f"activations ({config.seq_len:,} tokens, {checkpointing})", _gib(trainer.activations)),
        (f"logprobs (chunks of {config.entropy_chunk_size:,})", _gib(trainer.logprobs)),
        ("libraries", _gib(trainer.overhead)),
        ("total", _gib(trainer.total)),
    ]


def _engine_rows(config: TelescopeConfig, engine: EngineMemory, memory: int | None) -> list[tuple[str, str]]:
    kv_cache = "what is left" if engine.kv_cache is None else _gib(engine.kv_cache)
    rows = [
        (f"weights ({config.engine_dtype}, 1/{config.inference_tensor_parallel_size})", _gib(engine.weights)),
        (f"KV cache ({engine.kv_bytes_per_token / 1024:,.1f} KiB per token)", kv_cache),
        ("workspace", _gib(engine.overhead)),
    ]
    if engine.total is not None:
        rows.append(("total", _gib(engine.total)))
    if engine.tokens is not None:
        full = engine.tokens / config.max_model_len
        rows.append((f"KV cache holds {engine.tokens:,} tokens", f"{full:,.1f} full"))
    elif memory is None:
        rows.append(("GPU memory is not known here", ""))
    rows.append((f"all {config.lanes_per_server} lanes, full length", _gib(engine.lanes_kv)))
    return rows


def _remarks(config: TelescopeConfig, estimate: MemoryEstimate) -> list[str]:
    remarks = list(estimate.problems)
    engine = estimate.engine
    if engine.kv_cache is not None and engine.longest_sequence_kv <= engine.kv_cache < engine.lanes_kv:
        remarks.append(
            f"The KV cache holds {engine.kv_cache / engine.lanes_kv:.0%} of what all lanes need at full length; longer "
            "answers wait for each other. That is fine when most answers are short."
        )
    return remarks


def _device_memory(placement: Placement, resources: ClusterResources) -> int | None:
    """Memory of one GPU, or of the node on the CPU; None where it is not known."""
    if placement.device == "cuda":
        return min((node.gpu_memory_bytes or 0 for node in placement.nodes), default=0) or None
    return min((node.memory_bytes or 0 for node in resources.nodes), default=0) or None


def _problems_of_this_machine(config: TelescopeConfig) -> list[str]:
    problems = []
    for look in (preflight.check_run_dir, preflight.check_ports):
        try:
            look(config)
        except UserError as error:
            problems.append(f"{error}.")
    return problems


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):,.1f} MiB"
