"""Configuration of a run: one flat, validated, frozen object.

    from telescope.config import load_config
    loaded = load_config(Path("run.yaml"), ["--learning_rate", "5e-7"])
    loaded.config.learning_rate

Imports neither torch nor Ray nor vLLM. `schema` holds the object, `sections` its fields, `rules` what ties fields
together, `remarks` which settings may surprise, `loader` the merge of defaults, environment, YAML and command line,
`plan` and `memory` what a run needs of the machines.
"""

from telescope.config.environments import EnvironmentEntry, EvalEntry
from telescope.config.loader import LoadedConfig, load_config
from telescope.config.schema import TelescopeConfig

__all__ = ["EnvironmentEntry", "EvalEntry", "LoadedConfig", "TelescopeConfig", "load_config"]
