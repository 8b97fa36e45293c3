"""Writes the default YAML and the configuration reference from the schema.

`python -m telescope.config.generate` writes both into the checkout; a test checks that the committed files match.
The installed package generates them too: `telescope config defaults` prints the default file.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.config.describe import FieldDescription, describe_section, yaml_text
from telescope.config.environments import EnvironmentEntry, EvalEntry
from telescope.config.loader import ENVIRONMENT_VARIABLES
from telescope.config.remarks import AVAILABLE_CHOICES
from telescope.config.rules import RULES
from telescope.config.sections import SECTIONS

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

COMMENT_WIDTH = 116
GENERATED = "generated from the schema by `python -m telescope.config.generate`; edit `src/telescope/config/sections/`"


def default_yaml() -> str:
    """`default_train.yaml`: every field with its default, under its section, described in a comment."""
    lines = ["# Every field of Telescope's configuration with its default.", f"# This file is {GENERATED}.", ""]
    for section in SECTIONS:
        lines += [f"# --- {section.TITLE} ---", ""]
        for field in describe_section(section):
            lines += _comment(_described(field))
            lines += [f"{field.name}: {yaml_text(field.default)}", ""]
    return "\n".join(lines).rstrip() + "\n"


def resolved_yaml(config: TelescopeConfig) -> str:
    """A resolved configuration as YAML, section by section; fields that a person chose are marked."""
    values = config.values
    lines = [f"# config hash {config.hash}"]
    for section in SECTIONS:
        lines += ["", f"# --- {section.TITLE} ---"]
        for name in section.model_fields:
            mark = "  # set" if name in config.user_set else ""
            lines.append(f"{name}: {yaml_text(values[name])}{mark}")
    return "\n".join(lines) + "\n"


def documentation() -> str:
    """`configuration.md`: how a configuration is put together, every field, and the rules between fields."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section.TITLE}\n")
        if section.INTRO:
            parts.append(section.INTRO + "\n")
        parts.append(_table(describe_section(section)))
        if "environments" in section.model_fields:
            parts.append("Each entry of `environments`:\n")
            parts.append(_table(describe_section(EnvironmentEntry)))
            parts.append(_ENVIRONMENTS_EXAMPLE)
        if "evals" in section.model_fields:
            parts.append("Each entry of `evals`:\n")
            parts.append(_table(describe_section(EvalEntry, "evals.")))
            parts.append(_EVALS_EXAMPLE)
    parts.append("## Rules between fields\n")
    parts.append(
        "A rule marked with *adjusts* changes the field when only its default breaks the rule, and the run prints a "
        "line. When you set the field yourself, a broken rule is an error. All other rules are errors always.\n"
    )
    for rule in RULES:
        parts.append(f"- `{rule.fields[0]}` {rule.statement}{' *(adjusts)*' if rule.adjust else ''}.")
    parts.append("\n## Environment variables\n")
    parts.append("Each fills in a field that neither the YAML file nor the command line sets.\n")
    parts += [f"- `{variable}`: `{field}`" for variable, field in ENVIRONMENT_VARIABLES.items()]
    parts.append("")
    return "\n".join(parts)


def write_files(root: Path) -> list[Path]:
    """Writes both files below a checkout. Returns their paths."""
    files = generated_files()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [root / name for name in files]


def generated_files() -> dict[str, str]:
    """Path below the checkout to content."""
    return {"configs/defaults/default_train.yaml": default_yaml(), "docs/configuration.md": documentation()}


def _described(field: FieldDescription) -> str:
    choices = f" One of {field.type}." if field.type.startswith('"') else ""
    span = f" Range: {field.range}." if field.range and "Range:" not in field.text else ""
    status = f" No effect in this version (waits for {field.waits_for})." if field.waits_for else ""
    return f"{field.text}{choices}{span}{status}"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, COMMENT_WIDTH - 2, break_on_hyphens=False)]


def _table(fields: list[FieldDescription]) -> str:
    lines = ["| field | type | default | description |", "|---|---|---|---|"]
    for field in fields:
        text = field.text
        if field.range and "Range:" not in text:
            text += f" Range: {field.range}."
        if field.name in AVAILABLE_CHOICES:
            text += f" In this version only {' or '.join(f'`{choice}`' for choice in AVAILABLE_CHOICES[field.name])}."
        if field.waits_for:
            text += f" *No effect in this version (waits for {field.waits_for}).*"
        cells = (f"`{field.name}`", field.type, f"`{field.default_text}`" if not field.required else "required", text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = f"""# Configuration

*This page is {GENERATED}.*

A run is described by one flat set of fields. Each has a default, and a run states only what differs:

```yaml
model: "Qwen/Qwen2.5-3B"
environments:
  - name: "countdown"
number_of_steps: 300
learning_rate: 1.0e-6
```

```bash
telescope train --config run.yaml --learning_rate 5e-7
```

Later layers win: the defaults (`configs/defaults/default_train.yaml`, or `telescope config defaults`), the
environment variables below, the YAML file, the command line. On the command line `--learning_rate 5e-7`,
`--learning-rate 5e-7` and `--learning_rate=5e-7` are the same; values are YAML scalars, lists and mappings; a boolean
flag alone means true. A name that is not a field is an error that suggests the nearest one; so is a flag given twice.

`telescope train --config run.yaml --dry-run` prints the resolved configuration with its hash, where the workers would
go, and how much memory they would need, and starts nothing. It exits with 2 for what a run would refuse on this
machine; where the run is meant for another one (it joins a cluster, or it needs GPUs and none is here), it reports
that, and what is wrong with this one is a remark. With `--gpu-memory-gib 80` the plan is judged as on a machine with
enough GPUs of 80 GiB each, whatever this one has. `telescope config explain FIELD` explains a field. The resolved
configuration is frozen, written to the run directory, and handed to every process as it is; the hash, of all values, is
the same in each.

The upper bounds of numbers are far above anything that runs: they are there to catch a slip.

Fields whose feature is not in this version are accepted and checked, and a run that sets one prints a line. They
are marked below.
"""

_ENVIRONMENTS_EXAMPLE = """```yaml
environments:
  - name: "countdown"
    weight: 0.5
    reward_min: 0.0
    reward_max: 2.0
  - name: "my_package.my_module:MyEnvironment"
    weight: 0.5
    kwargs:
      num_samples: 1000
```
"""

_EVALS_EXAMPLE = """```yaml
evals:
  - name: "countdown"
    num_samples: 500
    separate_eval_samples: true
    temperature: 1.0
```
"""


def main() -> int:
    """Writes the files into this checkout, or into the folder in `argv`."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[3]
    for path in write_files(root):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
