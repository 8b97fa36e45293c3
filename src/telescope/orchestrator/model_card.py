"""Writes model cards from the record of a run, and uploads models with them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

from telescope import __version__
from telescope.config.model_source import is_local_path
from telescope.errors import RunError, UserError
from telescope.evals.statistics import metric_label
from telescope.record.charts import Point, line_chart
from telescope.record.reader import Run, eval_names, is_run
from telescope.weights.model_folder import ModelOrigin, read_origin

CARD = "README.md"
CHART = "reward.svg"
MAX_ROWS = 12
"""Number of rows in the table of rewards."""

PRIVATE_ARGUMENTS = ("provider_kwargs", "environment_vars")
"""Arguments of environments that may hold keys, which must not reach the hub."""

SHOWN_FIELDS = (
    "algorithm", "number_of_steps", "prompts_batch_size_for_trainer", "group_size", "learning_rate", "lr_scheduler",
    "warmup_steps", "temperature", "top_p", "max_tokens", "max_model_len", "max_async_rollout", "model_dtype",
    "mixed_precision_dtype", "seed", "trainer_num_workers", "inference_num_workers",
)  # fmt: skip


def push_to_hub(folder: Path, name: str, checkpoint: Path, *, private: bool = False) -> str:
    """Uploads a model folder with a model card. Returns the URL of the commit.

    Raises `UserError` for an invalid name or a missing login, `RunError` if the hub refuses the upload or cannot be
    reached.
    """
    api = huggingface_hub.HfApi(library_name="telescope", library_version=__version__)
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        write_card(folder, repository.repo_id, checkpoint)  # with the owner, whom `name` may leave out
        commit = api.upload_folder(
            repo_id=repository.repo_id, folder_path=folder, commit_message=f"Upload {checkpoint.name}"
        )
    except (LocalTokenNotFoundError, HFValidationError) as error:
        raise UserError(f"--push-to-hub {name}: {error}. Log in with `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # without a network; huggingface_hub's version decides whose
        fix = "Check the network, the name and the rights of your token (`hf auth whoami`)"
        raise RunError(f"{name} was not uploaded: {error}. The model is in {folder}. {fix}") from error
    return str(getattr(commit, "commit_url", None) or repository)


def write_card(folder: Path, name: str, checkpoint: Path) -> None:
    """Writes README.md and the chart of rewards to a model folder."""
    meta: dict[str, Any] = json.loads((checkpoint / "meta.json").read_text())
    run = next((Run(parent) for parent in checkpoint.resolve().parents[:2] if is_run(parent)), None)
    rows = run.table("steps", columns=["step", "reward_mean"]).sort_by("step").to_pylist() if run else []
    rows = [row for row in rows if row["step"] < meta["step"] and row["reward_mean"] is not None]
    rewards = [Point(row["step"] + 1, row["reward_mean"]) for row in rows]  # here, steps count from 1
    if rewards:
        chart = line_chart({"reward": rewards}, title="Mean training reward")
        (folder / CHART).write_text(chart)
    (folder / CARD).write_text(model_card(name, meta, run, rewards, read_origin(folder)))


def model_card(
    name: str, meta: Mapping[str, Any], run: Run | None, rewards: list[Point], origin: ModelOrigin | None = None
) -> str:
    """Returns the card (Markdown) with use, data, configuration, rewards and evals, as far as the record has them."""
    config: Mapping[str, Any] = meta.get("config") or {}
    base = str(meta["model"])
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- telescope"]
    head += ["- reinforcement-learning"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not is_local_path(base):
        head.append(f"base_model: {base}")
    parts = ["\n".join([*head, "---"]), f"# {name.rpartition('/')[2]}"]
    parts.append(
        f"`{base}` after {meta['step']} steps of reinforcement learning ({config.get('algorithm', 'unknown')}) with "
        f"Telescope {meta.get('telescope', '')}." + (f" Origin: {origin}." if origin else "")
    )
    parts.append(
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )
    if environments := config.get("environments"):
        rows = []
        for entry in environments:
            kwargs = {key: value for key, value in (entry.get("kwargs") or {}).items() if key not in PRIVATE_ARGUMENTS}
            rows.append((entry["name"], entry.get("weight", 1), json.dumps(kwargs) if kwargs else ""))
        parts += ["## Data", _table(("environment", "weight", "settings"), rows)]
    shown = [(f"`{field}`", config[field]) for field in SHOWN_FIELDS if config.get(field) is not None]
    if shown:
        parts += ["## Configuration", _table(("field", "value"), shown), f"Config hash `{meta.get('config_hash')}`."]
    if rewards:
        every = -(-len(rewards) // MAX_ROWS)
        chosen = [*rewards[:-1:every], rewards[-1]]
        parts += ["## Reward", f"![Mean training reward]({CHART})"]
        parts.append(_table(("step", "mean reward"), [(int(p.x), f"{p.y:.4g}") for p in chosen]))
    if evals := _evals(run, meta["step"], config):
        columns = ("eval", "step", "metric", "mean", "95 % interval", "items", "completions", "failed")
        parts += ["## Evals", _table(columns, evals)]
    return "\n\n".join(parts) + "\n"


def _evals(run: Run | None, last_step: int, config: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Returns each eval's first result and its newest result at the checkpoint."""
    if run is None:
        return []
    rows = [
        row for row in run.table("evals").to_pylist() if row["status"] == "finished" and row["version"] <= last_step
    ]
    chosen: dict[tuple[str, int, bool], Mapping[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["version"], row["ended_at"] or 0.0)):
        chosen[row["name"], row["number"] or 0, row["version"] == 0] = row
    named = eval_names(config, rows)
    return [
        (
            named(row["name"], row["number"]), row["version"], metric_label(row["metric"]), f"{row['accuracy']:.4f}",
            "" if row["accuracy_low"] is None else f"{row['accuracy_low']:.4f} to {row['accuracy_high']:.4f}",
            row["num_items"], row["num_completions"],
            row["num_items"] * row["num_completions"] - row["num_scored"],
        )
        for row in sorted(chosen.values(), key=lambda row: (row["name"], row["number"] or 0, row["version"]))
    ]  # fmt: skip


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in lines)
