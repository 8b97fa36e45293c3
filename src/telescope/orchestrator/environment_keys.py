"""Which environments a config needs, and what the pool calls each of them. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from telescope.config import TelescopeConfig
from telescope.environments.records import EnvironmentSpec
from telescope.evals.registry import eval_spec


@dataclass(frozen=True)
class EnvironmentKeys:
    """What the pool calls each environment of the config: one key per training entry and one per eval entry."""

    specs: list[EnvironmentSpec]
    training: list[str]
    evals: list[str]


def environment_keys(config: TelescopeConfig) -> EnvironmentKeys:
    """One environment per training entry; an eval of the same name and settings shares it.

    An eval that names a trained environment and gives no kwargs is given that environment's.
    """
    specs: list[EnvironmentSpec] = []
    training: list[str] = []
    for index, entry in enumerate(config.environments):
        twice = sum(other.name == entry.name for other in config.environments) > 1
        key = f"{entry.name}#{index}" if twice else entry.name
        specs.append(EnvironmentSpec(entry.name, dict(entry.kwargs), entry.reward_min, entry.reward_max, key=key))
        training.append(key)
    evals: list[str] = []
    for index, eval_entry in enumerate(config.evals):
        shared = next(
            (
                s
                for s in specs
                if s.name == eval_entry.name and eval_entry.kwargs in ({}, s.kwargs) and s.key in training
            ),
            None,
        )
        if shared is not None:
            evals.append(shared.key)
            continue
        key = f"eval/{eval_entry.name}#{index}"
        specs.append(eval_spec(eval_entry.name, dict(eval_entry.kwargs), key=key))
        evals.append(key)
    return EnvironmentKeys(specs, training, evals)
