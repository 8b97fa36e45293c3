"""Plans where the workers of a run go. It is a pure function of the configuration and the cluster's resources.

Owns the bundles (one per inference server, one per trainer rank) and the message when they do not fit, which names the
field to lower. Ray makes the reservation (`telescope.cluster`) by the same strategies; this plan predicts whether it
can.

Invariants: a server is never split over nodes; the bundles on a node never exceed its cores and GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from telescope.errors import ConfigError
from telescope.utils.text import pluralize

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

Role = Literal["inference", "trainer"]
CPU_TOLERANCE = 1e-6  # cores are fractions of floats: 5 x 0.2 must fit 1


class PlacementError(ConfigError):
    """The run does not fit the cluster. The message names the field to lower."""


GPUS_PER_NODE = 8  # GPUs of an assumed node, the usual number
SAMPLES_PER_ROLLOUT_WORKER = 64
"""Samples in flight for which one worker suffices."""


@dataclass(frozen=True)
class NodeResources:
    """What one node has in total. Memory is None where it is not known."""

    name: str
    cpus: float
    gpus: int
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    """Memory of its smallest GPU."""


@dataclass(frozen=True)
class ClusterResources:
    """The nodes of a cluster."""

    nodes: tuple[NodeResources, ...]

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


@dataclass(frozen=True)
class Bundle:
    """One share of a node: an inference server, or a rank."""

    role: Role
    index: int
    cpus: float
    gpus: int


@dataclass(frozen=True)
class PlacedBundle:
    """A bundle and its node. `gpu_indices` are the node's GPUs in the order of the plan; Ray may number them anew."""

    bundle: Bundle
    node: NodeResources
    gpu_indices: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Every bundle of the run in its place: servers in order, then ranks."""

    device: Literal["cpu", "cuda"]
    bundles: tuple[PlacedBundle, ...]
    order: tuple[Role, ...]
    """The order in which the groups fit; reserved in the other order they may not."""

    @property
    def nodes(self) -> tuple[NodeResources, ...]:
        """The nodes in use, in the cluster's order of first use."""
        return tuple(dict.fromkeys(placed.node for placed in self.bundles))


def resolve_device(config: TelescopeConfig, resources: ClusterResources) -> Literal["cpu", "cuda"]:
    """`device` with `auto` decided: GPUs if the cluster has any."""
    if config.device == "auto":
        return "cuda" if resources.gpus else "cpu"
    return config.device


def bundles_of(config: TelescopeConfig, device: Literal["cpu", "cuda"]) -> tuple[list[Bundle], list[Bundle]]:
    """The bundles of the servers and of the trainer ranks. With `share_gpus` a rank has none but its server's GPU."""
    per_server = config.inference_tensor_parallel_size
    on_gpu = device == "cuda"
    cpus = config.ray_inference_cpus_per_worker * per_server
    servers = [
        Bundle("inference", index, cpus, per_server if on_gpu else 0) for index in range(config.num_inference_servers)
    ]
    own_gpus = 1 if on_gpu and not config.share_gpus else 0
    ranks = [
        Bundle("trainer", rank, config.ray_trainer_cpus_per_worker, own_gpus)
        for rank in range(config.trainer_num_workers)
    ]
    return servers, ranks


def usual_rollout_workers(config: TelescopeConfig, cores: float) -> int:
    """Returns the default number of rollout workers: one per 64 samples in flight, at most one per core."""
    in_flight = config.lanes_per_server * config.num_inference_servers
    return max(1, int(min(cores, math.ceil(in_flight / SAMPLES_PER_ROLLOUT_WORKER))))


def _rollout_cores(config: TelescopeConfig, cores: float = math.inf) -> float:
    return config.rollout_cpus_per_worker * (config.chosen_rollout_workers or usual_rollout_workers(config, cores))


def plan_placement(config: TelescopeConfig, resources: ClusterResources, *, with_trainer: bool = True) -> Placement:
    """Places every server and rank; without the trainer, the servers only. Raises `PlacementError` if they do not fit.

    Rollout workers have their cores first, from one node after the other.
    """
    if not config.rollout_cpus_per_worker:
        return _plan(config, resources, with_trainer=with_trainer)
    workers = config.chosen_rollout_workers or usual_rollout_workers(config, resources.cpus)
    nodes = resources.nodes
    taken = [config.rollout_cpus_per_worker * len(range(i, workers, len(nodes))) for i in range(len(nodes))]
    left = tuple(replace(node, cpus=max(0.0, node.cpus - cpus)) for node, cpus in zip(nodes, taken, strict=True))
    try:
        return _plan(config, ClusterResources(left), with_trainer=with_trainer)
    except PlacementError as error:
        raise PlacementError(
            f"{error}. These are the cores that {pluralize(workers, 'rollout worker')} with rollout_cpus_per_worker "
            f"{config.rollout_cpus_per_worker:g} leave of {resources.cpus:g}: lower it, or rollout_num_workers"
        ) from None


def _plan(config: TelescopeConfig, resources: ClusterResources, *, with_trainer: bool) -> Placement:
    device = resolve_device(config, resources)
    servers, ranks = bundles_of(config, device)
    if not with_trainer:
        ranks = []
    _check_totals(config, resources, servers + ranks, device)
    shares = device == "cuda" and config.share_gpus
    if shares:  # server i and rank i are one bundle, placed by the servers' strategy
        groups = [[replace(server, cpus=server.cpus + rank.cpus) for server, rank in zip(servers, ranks, strict=True)]]
    else:
        groups = [group for group in (servers, ranks) if group]

    def size(group: list[Bundle]) -> tuple[bool, float, float]:
        strategy = _strategy(config, group)
        count = len(group) if strategy == "STRICT_PACK" else 1
        return not strategy.startswith("STRICT"), -count * group[0].gpus, -count * group[0].cpus

    # Ray fills the groups one after the other. What must be on one node goes first, the largest first: that leaves the
    # fewest gaps. Where that order fails, the other one may still fit.
    groups.sort(key=size)
    for order in (groups, groups[::-1]):
        free = _Free.of(resources)
        parts = [_place(group, _strategy(config, group), free) for group in order]
        if None not in parts:
            placed = sorted((item for part in parts for item in part or ()), key=lambda item: item.bundle.index)
            if shares:
                sides = [zip(placed, side, strict=True) for side in (servers, ranks)]
                placed = [replace(pair, bundle=bundle) for side in sides for pair, bundle in side]
            placed.sort(key=lambda item: item.bundle.role)
            return Placement(device, tuple(placed), tuple(group[0].role for group in order))
    wanted, fixes = [], ["lower inference_num_workers or trainer_num_workers"]
    for (first, *others), strategy in ((group, _strategy(config, group)) for group in groups):
        field = f"ray_{first.role}_placement_strategy"
        what = "pairs of a server and a trainer worker" if shares else f"{first.role} bundles"
        wanted.append(
            f"{1 + len(others)} {what}, each of {pluralize(first.gpus, 'GPU')} and {first.cpus:g} cores on one node, "
            f'by {field} "{strategy}"'
        )
        fixes.append(f"lower ray_{first.role}_cpus_per_worker")
        if strategy.startswith("STRICT"):
            fixes.append(f'set {field} to "{strategy.removeprefix("STRICT_")}"')
    if config.inference_tensor_parallel_size > 1:
        fixes.append(f"lower inference_tensor_parallel_size, which is {config.inference_tensor_parallel_size}")
    raise PlacementError(
        f"The nodes do not hold {' and '.join(wanted)}. They are: {_describe_nodes(resources)}. "
        f"To fit them, {', or '.join(fixes)}"
    )


def _strategy(config: TelescopeConfig, group: Sequence[Bundle]) -> str:
    return str(getattr(config, f"ray_{group[0].role}_placement_strategy"))


def fitting_values(config: TelescopeConfig, machine: ClusterResources, *, with_trainer: bool = True) -> dict[str, Any]:
    """Returns other values for defaults, with which the workers fit one machine. Empty if they fit, or none helps."""
    device = resolve_device(config, machine)
    values = _fitting_workers(config, machine.gpus) if device == "cuda" and with_trainer else {}
    try:
        fitted = config.adjusted(**values)
    except ConfigError:
        fitted = config
    if any(getattr(fitted, name) != value for name, value in values.items()):  # rules of other fields exclude them
        values, fitted = {}, config
    config = fitted
    workers = {"ray_inference_cpus_per_worker": config.inference_num_workers}
    if with_trainer:
        workers["ray_trainer_cpus_per_worker"] = config.trainer_num_workers
    free = (
        machine.cpus
        - _rollout_cores(config, machine.cpus)
        - sum(getattr(config, name) * workers[name] for name in workers.keys() & config.user_set)
    )
    defaults = workers.keys() - config.user_set
    share = _usual_share(free / max(1, sum(workers[name] for name in defaults)))
    return values | {name: share for name in workers if name in defaults and 0 < share < getattr(config, name)}


def _fitting_workers(config: TelescopeConfig, gpus: int) -> dict[str, Any]:
    """Returns values for defaults, with which servers and ranks fit the GPUs of a machine."""
    if not gpus or gpus_needed(config) <= gpus:
        return {}
    tensor_parallel, chosen = config.inference_tensor_parallel_size, config.user_set
    shares = config.share_gpus or (gpus == 1 and "share_gpus" not in chosen)
    servers, ranks = config.inference_num_workers, config.trainer_num_workers
    if shares:
        servers = servers if "inference_num_workers" in chosen else min(servers, gpus)
        ranks = ranks if "trainer_num_workers" in chosen else servers
    else:
        if "trainer_num_workers" not in chosen:
            ranks = min(ranks, gpus - (servers if "inference_num_workers" in chosen else tensor_parallel))
        if "inference_num_workers" not in chosen:
            servers = min(servers, (gpus - ranks) // tensor_parallel * tensor_parallel)
    if min(servers, ranks) < 1 or (max(servers, ranks) if shares else servers + ranks) > gpus:
        return {}
    wanted = {"inference_num_workers": servers, "trainer_num_workers": ranks, "share_gpus": shares}
    return {name: value for name, value in wanted.items() if value != getattr(config, name)}


def gpus_needed(config: TelescopeConfig) -> int:
    """GPUs of the run when it runs on GPUs."""
    return sum(bundle.gpus for bundles in bundles_of(config, "cuda") for bundle in bundles)


def assumed_cluster(config: TelescopeConfig, *, gpu_memory_bytes: int | None = None) -> ClusterResources:
    """Returns the smallest cluster of equal nodes that fits the run.

    Nodes have at most `GPUS_PER_NODE` GPUs (more only if one server needs them), of `gpu_memory_bytes` each where that
    is to be assumed too, and as many cores as their workers ask.
    """
    on_gpu = config.device != "cpu"
    servers, ranks = bundles_of(config, "cuda" if on_gpu else "cpu")
    everything = servers + ranks
    cpus = sum(bundle.cpus for bundle in everything) + _rollout_cores(config)
    gpus = sum(bundle.gpus for bundle in everything)
    strict = [group for group in (servers, ranks) if _strategy(config, group) == "STRICT_PACK"]
    packed = [sum(bundle.gpus for bundle in group) for group in strict]
    size = max(min(gpus, GPUS_PER_NODE), servers[0].gpus, *packed)
    node = NodeResources("assumed node", cpus, size, gpu_memory_bytes=gpu_memory_bytes)
    counts = range(-(-gpus // size) if size else 1, len(everything) + 1)
    clusters = (equal_nodes(count, node) for count in counts)
    return next(cluster for cluster in clusters if _fits(config, cluster))


def least_node(config: TelescopeConfig, num_nodes: int, gpus: Sequence[int]) -> tuple[int, int]:
    """Returns the first number of `gpus`, and of cores, with which each of some equal nodes suffices.

    Raises `PlacementError` if none does.
    """
    workers = sum(bundle.cpus for bundles in bundles_of(config, "cpu") for bundle in bundles)
    total = math.ceil(workers + _rollout_cores(config))

    def nodes(cpus: int, gpus: int) -> ClusterResources:
        return equal_nodes(num_nodes, NodeResources("node", cpus, gpus))

    number = next((number for number in gpus if _fits(config, nodes(total, number))), gpus[-1])
    plan_placement(config, nodes(total, number))  # raises if it does not fit
    return number, next(n for n in range(-(-total // num_nodes), total + 1) if _fits(config, nodes(n, number)))


def _fits(config: TelescopeConfig, resources: ClusterResources) -> bool:
    try:
        plan_placement(config, resources)
    except PlacementError:
        return False
    return True


def equal_nodes(count: int, node: NodeResources) -> ClusterResources:
    return ClusterResources(tuple(replace(node, name=f"{node.name} {i + 1}") for i in range(count)))


def _check_totals(
    config: TelescopeConfig, resources: ClusterResources, bundles: Sequence[Bundle], device: Literal["cpu", "cuda"]
) -> None:
    if device == "cuda" and not resources.gpus:
        raise PlacementError(
            'device is "cuda", but no GPU was found. Run it on a machine with GPUs, or set device to "cpu"; a dry run '
            "with --gpu-memory-gib 80 plans for a machine with such GPUs"
        )
    gpus, cpus = sum(bundle.gpus for bundle in bundles), sum(bundle.cpus for bundle in bundles)
    roles = list(dict.fromkeys(bundle.role for bundle in bundles))
    numbers = {f"{role}_num_workers": getattr(config, f"{role}_num_workers") for role in roles}
    cores = {f"ray_{role}_cpus_per_worker": getattr(config, f"ray_{role}_cpus_per_worker") for role in roles}
    workers = " and ".join(f"{name} is {number}" for name, number in numbers.items())
    if gpus > resources.gpus:
        raise PlacementError(
            f"{workers}, which needs {gpus} GPUs, but the cluster has {resources.gpus} ({_describe_nodes(resources)}). "
            + _fewer_gpu_workers(config, resources.gpus, with_trainer="trainer" in roles)
        )
    if cpus > resources.cpus + CPU_TOLERANCE:
        share = _usual_share(resources.cpus / sum(numbers.values()))
        no_gpu = device == "cpu" and config.device == "auto"
        raise PlacementError(
            ("No GPU was found, so that everything would run on CPUs: " if no_gpu else "")
            + f"{workers}, which with {' and '.join(f'{name} {number:g}' for name, number in cores.items())} needs "
            f"{cpus:g} CPU cores, but the cluster has {resources.cpus:g} ({_describe_nodes(resources)}). "
            + ("Run it on a machine with GPUs; or, for CPUs, lower " if no_gpu else "Lower ")
            + (f"{' and '.join(cores)} to {share:g}, or lower " if share else "")
            + " or ".join(numbers)
        )


def _fewer_gpu_workers(config: TelescopeConfig, available: int, *, with_trainer: bool) -> str:
    """Returns the fix for a run with too many workers on GPUs."""
    tensor_parallel = config.inference_tensor_parallel_size
    if config.share_gpus:
        return f"Lower both to {available}"
    if not with_trainer:
        return "Lower inference_num_workers"
    if available < tensor_parallel + 1:
        return (
            f"One server and one trainer worker need {tensor_parallel + 1} GPUs"
            + (": lower inference_tensor_parallel_size" if tensor_parallel > 1 else ", or one with share_gpus: true")
            + '. Set device to "cpu" to run without GPUs'
        )
    trainers = min(config.trainer_num_workers, available - tensor_parallel)
    inference = min(config.inference_num_workers, (available - trainers) // tensor_parallel * tensor_parallel)
    return f"Lower them, for example inference_num_workers to {inference} and trainer_num_workers to {trainers}"


@dataclass
class _Free:
    """What is left of a node while bundles are placed."""

    node: NodeResources
    cpus: float
    gpu_indices: list[int]
    num_bundles: int = 0

    @classmethod
    def of(cls, resources: ClusterResources) -> list[_Free]:
        return [cls(node, node.cpus, list(range(node.gpus))) for node in resources.nodes]

    def capacity(self, bundle: Bundle) -> int:
        """Returns how many of these bundles still fit."""
        by_gpus = len(self.gpu_indices) // bundle.gpus if bundle.gpus else None
        by_cpus = int((self.cpus + CPU_TOLERANCE) / bundle.cpus)
        return by_cpus if by_gpus is None else min(by_gpus, by_cpus)

    def take(self, bundle: Bundle) -> PlacedBundle:
        indices, self.gpu_indices = self.gpu_indices[: bundle.gpus], self.gpu_indices[bundle.gpus :]
        self.cpus -= bundle.cpus
        self.num_bundles += 1
        return PlacedBundle(bundle, self.node, tuple(indices))


def _place(bundles: Sequence[Bundle], strategy: str, free: list[_Free]) -> list[PlacedBundle] | None:
    """Places equal bundles by one strategy, taking from `free`. None when they do not fit."""
    placed: list[PlacedBundle] = []
    here: Counter[str] = Counter()
    packs = strategy.endswith("PACK")
    for position, bundle in enumerate(bundles):
        left = len(bundles) - position
        fitting = [n for n in free if n.capacity(bundle) >= (left if strategy == "STRICT_PACK" else 1)]
        if strategy == "STRICT_SPREAD":
            fitting = [n for n in fitting if not here[n.node.name]]
        if not fitting:
            return None

        # PACK: stay on a node already in use; else the tightest that holds all that is left, else the roomiest.
        def key(n: _Free, left: int = left, bundle: Bundle = bundle) -> tuple[int, int, int]:
            capacity = n.capacity(bundle)
            if not packs:
                return here[n.node.name], n.num_bundles, -capacity
            holds_all = capacity >= left
            return not here[n.node.name], not holds_all, capacity if holds_all else -capacity

        node = min(fitting, key=key)
        here[node.node.name] += 1
        placed.append(node.take(bundle))
    return placed


def _usual_share(share: float) -> float:
    """Rounds cores per worker down to a usual number. 0 if that leaves none."""
    step = next((step for step in (1.0, 0.5, 0.1, 0.01) if share >= step), None)
    return round(int(share / step + CPU_TOLERANCE) * step, 2) if step else 0.0


def _describe_nodes(resources: ClusterResources) -> str:
    kinds = Counter((node.cpus, node.gpus) for node in resources.nodes)
    return "; ".join(
        f"{pluralize(count, 'node')} of {cpus:g} cores and {pluralize(gpus, 'GPU')}"
        for (cpus, gpus), count in kinds.items()
    )
