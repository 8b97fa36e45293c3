"""The environments in a configuration with their keys in the pool, and checks of its evals against datasets.

Imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from telescope.config import EvalEntry, TelescopeConfig
from telescope.config.environments import distinct_names
from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.errors import ConfigError
from telescope.evals.base import eval_spec
from telescope.utils.text import did_you_mean, is_misspelled


@dataclass(frozen=True)
class EnvironmentKeys:
    """The environments in the pool and their keys: one key per training entry and one per eval entry."""

    specs: list[EnvironmentSpec]
    training: list[str]
    evals: list[str]


def environment_keys(config: TelescopeConfig, *, with_training: bool = True) -> EnvironmentKeys:
    """Returns one environment per training entry. An eval of the same name with equal or no settings shares it.

    Without training, only the environments of evals remain.
    """
    specs: list[EnvironmentSpec] = []
    for key, entry in zip(distinct_names(config.environments), config.environments, strict=True):
        specs.append(EnvironmentSpec(entry.name, dict(entry.kwargs), entry.reward_min, entry.reward_max, key=key))
    trained, evals = list(specs), []
    for index, each in enumerate(config.evals):
        spec = next((s for s in trained if s.name == each.name and each.kwargs in ({}, s.kwargs)), None)
        if spec is None:
            spec = eval_spec(each.name, dict(each.kwargs), key=f"eval/{each.name}#{index}")
            specs.append(spec)
        evals.append(spec.key)
    if not with_training:
        return EnvironmentKeys([spec for spec in specs if spec.key in evals], [], evals)
    return EnvironmentKeys(specs, [spec.key for spec in trained], evals)


def num_eval_items(entry: EvalEntry, available: int) -> int:
    """Returns an eval's number of items. Raises ConfigError if there are fewer than `num_samples`."""
    if entry.num_samples > available:
        raise ConfigError(
            f"evals: num_samples of {entry.name!r} is {entry.num_samples}, and its dataset has {available} items. "
            "Lower it, or set it to -1 for all items"
        )
    return available if entry.num_samples == -1 else entry.num_samples


def check_eval_items(config: TelescopeConfig, keys: EnvironmentKeys, infos: Mapping[str, EnvironmentInfo]) -> list[str]:
    """Checks the evals against the loaded environments, by their keys. Returns warnings.

    Raises ConfigError for an eval that has too few items, leaves no items of its environment to train on, or has a
    misspelled metric in `pass_k`.
    """
    found = []
    for entry, key in zip(config.evals, keys.evals, strict=True):
        declared, size = {"reward", *infos[key].metrics_ranges}, infos[key].num_samples
        unknown = {name for spec in entry.pass_k.values() for name in spec["metrics"] if name not in declared}
        for name in sorted(unknown):
            problem = f"evals: pass_k of {entry.name!r} names the metric {name!r}, which it does not declare"
            if is_misspelled(name, declared):
                raise ConfigError(f"{problem}.{did_you_mean(name, declared)}")
            found.append(f"{problem} (declared are {', '.join(sorted(declared))}): without it, the eval fails.")
        num_items = num_eval_items(entry, size)
        if entry.separate_eval_samples and key in keys.training and num_items >= size:
            raise ConfigError(
                f"evals: num_samples of {entry.name!r} holds out all {size} items of the environment from "
                "training. Lower it, set separate_eval_samples: false, or use a larger dataset."
            )
    return found
