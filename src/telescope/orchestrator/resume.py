"""Checks whether a run can continue from a checkpoint, before it starts.

Compares the checkpoint with the files on disk, the model and the config, field by field. Writes nothing.
`FIXED_FIELDS`, the environments' names, weights and kwargs, and their data determine the prompts' numbers or the
weights, so changes of them are refused unless `resume_force` is set. All other changes are applied and listed.
"""

import dataclasses
import hashlib
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from telescope.config import TelescopeConfig
from telescope.config.messages import show
from telescope.config.model_files import inspect_model
from telescope.config.model_shape import ModelShape
from telescope.config.model_source import TOKENIZER_FILES, read_meta_files
from telescope.environments.types import FINGERPRINT_DIGITS, EnvironmentInfo, digest_positions
from telescope.errors import UserError
from telescope.evals.runner import PlannedEval
from telescope.orchestrator.checkpoints import HF_META, Checkpoint, CheckpointFolder, refuse_damage
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.run_state import RunState
from telescope.record.reader import Run, is_run
from telescope.utils.text import num_equal, pluralize
from telescope.weights.model_folder import check_base, model_folder

FIXED_FIELDS = ("model_dtype", "train_backend", "seed", "lora_rank", "lora_alpha", "lora_target_modules")
"""Fields that a resumed run cannot change. It also cannot change the environments, or the model of adapters."""

FIXED_TENSORS = ("train_backend", "lora_rank", "lora_target_modules")
"""Fixed fields that determine the format or the tensors of a checkpoint. Even `resume_force` cannot change them."""

FIXED_OF_ENVIRONMENTS = ("name", "weight", "kwargs")

DISTRIBUTION = ("temperature", "top_p")
"""Fields of the sampling distribution. If one changes, finished groups are sampled again: their logprobs are those of
the old distribution.
"""

NOT_COMPARED = ("run_dir", "resume_from_checkpoint", "resume_force")  # fields that select the checkpoint to resume

MOST = 8  # number of differences that are listed

FORCE = "resume_force: true overrides this (docs/checkpoints.md names what no longer holds)"


def find_checkpoint(config: TelescopeConfig, run_dir: Path) -> Checkpoint | None:
    """Returns the checkpoint to continue from, or None for a new run. Raises `UserError` if it cannot continue."""
    if not config.resume_from_checkpoint:
        return None
    checkpoint = CheckpointFolder.for_run(config, run_dir).load(config.resume_from_checkpoint)
    if checkpoint.step > config.number_of_steps:
        raise UserError(
            f"number_of_steps is {config.number_of_steps}, and {checkpoint.path} is after step {checkpoint.step}: "
            "nothing is left to train. Raise number_of_steps, or resume from an earlier step"
        )
    from telescope.trainer.backends.fsdp.checkpoint import missing_files  # imports for a second

    if missing := missing_files(checkpoint.path, checkpoint.meta["train_backend"]):
        raise UserError(
            f"{checkpoint.path} is incomplete: {'; '.join(missing)}. Copy it again, or resume from another step with "
            "resume_from_checkpoint"
        )
    _check_model(config, checkpoint)
    fixed, used = changed_fields(checkpoint.meta["config"], config)
    is_forcible = not fixed.keys() & set(FIXED_TENSORS)
    if fixed and not (config.resume_force and is_forcible):
        raise UserError(
            f"{checkpoint.path} cannot be resumed with this config: {_listed(fixed, 'was', 'and is')}. Restore the old "
            "values, or start another run in another run_dir" + (f". {FORCE}" if is_forcible else "")
        )
    notes = [f"Changed since the checkpoint: {_listed(used, '', '->')}"] if used else []
    state = checkpoint.state
    if fixed:
        notes.append(f"resume_force: continues although {_listed(fixed, 'was', 'and is')}")
        if any(name == "seed" or name.startswith("environments") for name in fixed):
            state = without_open_prompts(state)
    if state.groups and (names := [name for name in DISTRIBUTION if name in used]):
        groups = pluralize(len(state.groups), "finished group")
        notes.append(f"{groups} will be sampled again, with the new {' and '.join(names)}")
        state = without_finished_groups(state)
    before = _with_defaults(checkpoint.meta["config"])
    if note := _change_of_rate(checkpoint.step, before, config.values):
        notes.append(note)
    if not checkpoint.meta["training_state"]:
        notes.append(f"{checkpoint.path.name} holds weights only: the optimizer starts without state")
    if checkpoint.step == config.number_of_steps:
        notes.append(f"{checkpoint.path.name} is after the last step: only the end of the run is left")
    return replace(checkpoint, state=state, notes=tuple(notes))


def finished_steps(config: TelescopeConfig, run_dir: Path) -> int | None:
    """Returns the number of steps of a run that has ended as configured and has nothing left to do, or else None."""
    asked = config.resume_from_checkpoint is True and is_run(run_dir)
    result = Run(run_dir).result if asked else {}
    steps = result.get("steps")
    is_finished = result.get("status") == "finished" and isinstance(steps, int) and steps >= config.number_of_steps
    return steps if is_finished else None


def check_has_checkpoint(config: TelescopeConfig, run_dir: Path, file: Path) -> None:
    """Raises `UserError` if the run of `--resume` has no complete checkpoint. `file` contains its config."""
    folder = CheckpointFolder.for_run(config, run_dir)
    if not folder.steps():
        steps = Run(run_dir).summary().steps if is_run(run_dir) else 0
        raise UserError(
            f"{run_dir} has no checkpoint in {folder.path}: it ended after {pluralize(steps, 'step')}, before the "
            "first one was complete, checkpoint_every was off, or checkpoint_dir is another folder than before. Set "
            f"checkpoint_dir, or start the run again in another run_dir: `telescope train --config {file} "
            f"--run_dir {run_dir}-2 --checkpoint_every {config.checkpoint_every or 20}`"
        )


def changed_fields(
    saved: Mapping[str, Any], config: TelescopeConfig
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Returns fixed and other fields that differ from a checkpoint's config.

    Values are pairs of old and new values. A field that the checkpoint's version lacks has its default.
    """
    before = _with_defaults(saved)
    changed = {
        name: (before[name], now)
        for name, now in config.values.items()
        if name not in NOT_COMPARED and before[name] != now
    }
    if not config.lora_rank and not before["lora_rank"]:
        changed = {name: pair for name, pair in changed.items() if not name.startswith("lora_")}
    # A checkpoint of adapters lacks the base weights, so it continues only with the same model.
    names = (*FIXED_FIELDS, "model") if config.lora_rank else FIXED_FIELDS
    fixed = {name: changed.pop(name) for name in names if name in changed}
    if "environments" in changed:
        then, now = changed["environments"]
        names_then, names_now = ([entry["name"] for entry in entries] for entries in (then, now))
        of_entries: dict[str, tuple[Any, Any]] = {
            f"environments[{index}].{part}": (pair[0][part], pair[1][part])
            for index, pair in enumerate(zip(then, now, strict=False))
            for part in FIXED_OF_ENVIRONMENTS
            if pair[0][part] != pair[1][part]
        }
        if names_then != names_now:
            of_entries = {"environments (name)": (names_then, names_now)}
        if of_entries:
            fixed |= of_entries
            del changed["environments"]
    return fixed, changed


def _with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    return TelescopeConfig.model_construct().model_dump(mode="json", warnings=False) | dict(saved)


def _listed(changes: Mapping[str, tuple[Any, Any]], was: str, now: str) -> str:
    """Lists the places at which values differ, with both values."""
    places = [place for name, pair in changes.items() for place in _differences(name, *pair)]
    listed = [" ".join(filter(None, (name, was, *_shown(before, now, after)))) for name, before, after in places[:MOST]]
    return "; ".join(listed) + (f"; and {len(places) - MOST} more" if len(places) > MOST else "")


def _differences(place: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields each place at which two unequal values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        inner = [(f"{place}.{key}", before.get(key, ...), after.get(key, ...)) for key in before | after]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        inner = [(f"{place}[{index}]", *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        yield place, before, after
        return
    for name, one, other in inner:
        if one != other:
            yield from _differences(name, one, other)


def _shown(before: Any, now: str, after: Any) -> tuple[str, str, str]:
    """Formats two values around `now`. Long texts begin shortly before the difference."""
    if isinstance(before, str) and isinstance(after, str):
        start = max(0, num_equal(before, after) - 20)
        before, after = (("..." if start else "") + text[start:] for text in (before, after))
    one, other = ("not set" if value is ... else show(value) for value in (before, after))
    return one, now, other


def _change_of_rate(step: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns a remark if the learning rate after the checkpoint differs from the plan of the earlier config."""
    from telescope.trainer.step import learning_rate  # imports torch

    earlier = SimpleNamespace(**before)
    planned, rate_now = learning_rate(step, earlier), learning_rate(step, SimpleNamespace(**now))
    if math.isclose(planned, rate_now, rel_tol=1e-6):
        return None
    rates = f"{learning_rate(step - 1, earlier):.3g} in step {step - 1} and is {rate_now:.3g} in step {step}"
    if now["lr_scheduler"] in ("constant", "none"):
        return f"The learning rate was {rates}"
    return (
        f'The learning rate was {rates}, by lr_scheduler "{now["lr_scheduler"]}" over {now["number_of_steps"]} steps. '
        'For a rate of your choice, set lr_scheduler to "constant" and learning_rate to it'
    )


def without_open_prompts(state: RunState) -> RunState:
    """Forgets sampled, untrained prompts, because their numbers refer to other prompts in other data."""
    return replace(without_finished_groups(state), sampler=SamplerPosition(state.sampler.next_draw))


def without_finished_groups(state: RunState) -> RunState:
    """Returns the state without its finished groups, whose prompts are sampled again."""
    ids = {group.group_id for group in state.groups}
    return replace(
        state,
        sampler=SamplerPosition(state.sampler.next_draw, tuple(sorted(ids.union(state.sampler.unfinished)))),
        ledger=state.ledger.reopening(set()),
        groups=[],
    )


def _check_model(config: TelescopeConfig, checkpoint: Checkpoint) -> None:
    """Compares sizes, tokenizer and base weights of model and checkpoint, as far as they are known."""
    # Otherwise a damaged file would be taken for another model or tokenizer.
    digests = {name: digest for name, digest in checkpoint.meta.get("files", {}).items() if name.startswith(HF_META)}
    refuse_damage(checkpoint.path, {**checkpoint.meta, "files": digests})
    if base := checkpoint.meta.get("base"):
        check_base(model_folder(config.model), base, checkpoint.path)
    saved, now = checkpoint.path / HF_META, inspect_model(config, ask_hub=False).shape
    try:
        before = ModelShape.from_config(json.loads((saved / "config.json").read_bytes()))
    except (OSError, ValueError):
        before = None
    if before is not None and now is not None:
        sizes = {
            field.name: (getattr(before, field.name), getattr(now, field.name))
            for field in dataclasses.fields(ModelShape)
            if getattr(before, field.name) != getattr(now, field.name)
        }
        if sizes:
            raise UserError(
                f"{checkpoint.path} is of another model than model {config.model!r}: {_listed(sizes, 'was', 'and is')}."
                " Set model to the one that the run began with"
            )
    files = read_meta_files(config)
    for name in (*TOKENIZER_FILES, "merges.txt"):
        path = saved / name
        if files and path.is_file() and path.read_bytes() != files.get(name) and not config.resume_force:
            raise UserError(
                f"{checkpoint.path} was written with another tokenizer than that of {config.model!r}: {name} differs. "
                f"Set model to the one that the run began with. {FORCE}"
            )


def describe_data(
    keys: Sequence[str], infos: Sequence[EnvironmentInfo], evals: Sequence[PlannedEval]
) -> dict[str, Any]:
    """Returns sizes, numbers of held-out items and identities of items per environment, for `RunState`."""
    plans = [plan for plan in evals if plan.held_out]
    uids = sorted({item.prompt.sample_uid for plan in plans for item in plan.items})
    data: dict[str, Any] = {
        key: {
            "items": info.num_samples,
            "held_out": max((len(plan.items) for plan in plans if plan.environment_key == key), default=0),
            "digest": info.dataset_digest,
            "fingerprints": info.fingerprints,
        }
        for key, info in zip(keys, infos, strict=True)
    }
    return data | {"held-out items": hashlib.sha256("\n".join(uids).encode()).hexdigest()[:16]}


def check_data(config: TelescopeConfig, checkpoint: Checkpoint, data: Mapping[str, Any]) -> Checkpoint:
    """Returns the checkpoint, without open prompts if other data is forced. Raises `UserError` for other data."""
    changes = "; ".join(_changes_of_data(checkpoint.state.data, data))
    if not changes:
        return checkpoint
    if not config.resume_force:
        raise UserError(
            f"{checkpoint.path} cannot be resumed with this data: {changes}. The sequence of prompts depends on it. "
            "Restore the datasets and the held-out items of evals, or start another run in another run_dir. "
            f"{FORCE}"
        )
    note = f"resume_force: continues although the data changed: {changes}"
    return replace(checkpoint, state=without_open_prompts(checkpoint.state), notes=(*checkpoint.notes, note))


def _changes_of_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences per environment: counts, and the first item that differs."""
    for name, data in now.items():
        if not isinstance(data, dict) or name not in before:
            if before.get(name) != data:
                yield _listed({name: (before.get(name, ...), data)}, "was", "and is")
            continue
        counts = {part: before[name].get(part) for part in ("items", "held_out")}
        if counts != {part: data[part] for part in counts}:
            yield _listed({name: (counts, {part: data[part] for part in counts})}, "was", "and is")
        if before[name].get("digest", data["digest"]) == data["digest"]:  # earlier versions stored none
            continue
        items = [textwrap.wrap(entry["fingerprints"], FINGERPRINT_DIGITS) for entry in (before[name], data)]
        first = num_equal(*items)
        position = [*digest_positions(data["items"]), data["items"]][first]
        kind = "the same items in another order" if sorted(items[0]) == sorted(items[1]) else "other items"
        yield f"{name} has {kind}, and item {position} (counted from 0) is the first that differs"
