"""Which checkpoints a run may continue from, and what may change in between."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.model_folder import write_model_folder
from tests.unit.orchestrator.fakes import config_of, group

from telescope.cli.main import main
from telescope.config import TelescopeConfig
from telescope.config.loader import load_resumed_config
from telescope.config.model_source import read_meta_files
from telescope.environments.base import Sample
from telescope.environments.serialization import sample_uid
from telescope.environments.types import FINGERPRINT_DIGITS, EnvironmentInfo
from telescope.errors import UserError
from telescope.orchestrator.async_window import Ledger
from telescope.orchestrator.checkpoints import HF_META, META, STATE, Checkpoint, CheckpointFolder
from telescope.orchestrator.prompt_sampler import SamplerPosition
from telescope.orchestrator.resume import changed_fields, check_data, describe_data, find_checkpoint, finished_steps
from telescope.orchestrator.run import _TrainingRun
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.run_state import RunState
from telescope.orchestrator.status import Interrupted
from telescope.record.files import read_json, replace_json
from telescope.record.reader import Run
from telescope.utils.digests import digests_of, files_below

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def data_of(items: list[int] | range) -> dict[str, Any]:
    uids = [sample_uid(Sample(prompt=f"What is {item}?", answer="1")) for item in items]
    fingerprints = "".join(uid[:FINGERPRINT_DIGITS] for uid in uids)
    digest = hashlib.sha256(",".join(uids).encode()).hexdigest()
    info = EnvironmentInfo("arithmetic", len(uids), dataset_digest=digest, fingerprints=fingerprints)
    return describe_data(["arithmetic"], [info], [])


DATA = data_of(range(100))


class Resuming:
    """A run directory with the checkpoint after step 2 of a run of a small model."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.settings: dict[str, Any] = {"model": str(write_model_folder(folder / "model")), "number_of_steps": 9}
        config = self.config()
        self.folder = CheckpointFolder.for_run(config, self.run_dir)
        ledger = Ledger()
        for n in (4, 5):
            ledger.opened(n)
        state = RunState(2, SamplerPosition(6, (5,)), ledger.reopening({4}), groups=[group([1.0, 0.0], n=4)], data=DATA)
        partial = self.folder.begin(2)
        dcp.save({"model": {"weight": torch.zeros(64)}}, checkpoint_id=str(partial), no_dist=True)
        replace_json(partial / STATE, state.state_dict())
        (partial / HF_META).mkdir()
        for name, content in read_meta_files(config).items():
            (partial / HF_META / name).write_bytes(content)
        meta = {"layout": 1, "train_backend": "fsdp", "training_state": True, "config": config.values, "ranks": 1}
        files = digests_of(partial, files_below(partial))
        self.path = self.folder.complete(
            partial, 2, {**meta, "step": 2, "model": config.model, "time": 0.0, "files": files}
        )

    def config(self, **changes: Any) -> TelescopeConfig:
        return config_of(**{**self.settings, "run_dir": str(self.run_dir), "resume_from_checkpoint": True, **changes})

    def find(self, **changes: Any) -> Checkpoint:
        checkpoint = find_checkpoint(self.config(**changes), self.run_dir)
        assert checkpoint is not None
        return checkpoint


@pytest.fixture
def resuming(tmp_path: Path) -> Resuming:
    return Resuming(tmp_path)


def test_a_run_without_resume_from_checkpoint_is_new(resuming):
    assert find_checkpoint(resuming.config(resume_from_checkpoint=False), resuming.run_dir) is None


def test_changed_fields_are_used_and_listed(resuming):
    assert resuming.find().notes == ()
    changed = resuming.find(learning_rate=1e-3, number_of_steps=20, trainer_num_workers=2)
    note, _ = changed.notes
    assert "learning_rate 1e-06 -> 0.001" in note
    assert "number_of_steps 9 -> 20" in note
    assert "trainer_num_workers 1 -> 2" in note
    assert changed.state.sampler == SamplerPosition(6, (5,))
    assert len(changed.state.groups) == 1


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"temperature": 0.5, "top_p": 0.9}])
def test_groups_of_another_distribution_are_sampled_again(resuming, changes):
    changed = resuming.find(**changes)
    assert (changed.state.groups, changed.state.sampler) == ([], SamplerPosition(6, (4, 5)))
    assert changed.state.ledger.is_balanced() and not changed.state.ledger.open
    assert f"1 finished group will be sampled again, with the new {' and '.join(changes)}" in changed.notes


async def test_a_resumed_run_that_is_stopped_before_it_trains_has_the_steps_of_its_checkpoint(resuming, monkeypatch):
    async def is_stopped(self: _TrainingRun) -> None:
        raise Interrupted

    monkeypatch.setattr(_TrainingRun, "_start_and_train", is_stopped)
    with RunDirectory.create(resuming.config(resume_from_checkpoint=False), []).open_record(console=False):
        pass
    summary = await _TrainingRun(resuming.config(), ["A remark."], None).run()
    assert summary.sentence == "stopped after 2 steps, as requested"
    assert Run(resuming.run_dir).values("alerts", "step", message="A remark.") == {2}


COSINE = {"lr_scheduler": "cosine", "learning_rate": 1e-6}


@pytest.mark.parametrize(("before", "changes", "rates"), [
    (COSINE | {"number_of_steps": 2}, {"number_of_steps": 8}, ("5e-07", "8.54e-07")),
    (COSINE | {"lr_scheduler": "linear", "number_of_steps": 2}, {"number_of_steps": 8}, ("5e-07", "7.5e-07")),
    (COSINE, {"warmup_steps": 4}, ("9.7e-07", "7.5e-07")),
    (COSINE, {"min_lr_ratio": 0.5}, ("9.7e-07", "9.42e-07")),
    ({}, {"learning_rate": 1e-3}, ("1e-06", "0.001")),
    (COSINE, {"group_size": 3}, None),
    ({}, {"number_of_steps": 20}, None),
])  # fmt: skip
def test_a_resume_that_changes_the_learning_rate_says_both_rates(resuming, before, changes, rates):
    meta = read_json(resuming.path / META)
    replace_json(resuming.path / META, {**meta, "config": resuming.config(**before).values})
    notes = " ".join(resuming.find(**(before | changes)).notes)
    if rates is None:
        assert "The learning rate" not in notes
    else:
        assert f"The learning rate was {rates[0]} in step 1 and is {rates[1]} in step 2" in notes
        assert ("For a rate of your choice" in notes) == (before != {})


@pytest.mark.parametrize(("changes", "message"), [
    ({"seed": 7}, r"seed was 0 and is 7"),
    ({"model_dtype": "bfloat16"}, r'model_dtype was "float32" and is "bfloat16"'),
    ({"environments": [{"name": "b"}, {"name": "arithmetic"}]}, r'\(name\) was \["arithmetic"\] and is \["b", "a'),
    ({"environments": [{"name": "arithmetic", "weight": 2}]}, r"environments\[0\].weight was 1 and is 2"),
    ({"environments": [{"name": "arithmetic", "kwargs": {"a": 1}}]}, r"\[0\].kwargs.a was not set and is 1"),
    ({"number_of_steps": 1}, r"number_of_steps is 1, and .*step_2 is after step 2"),
    ({"resume_from_checkpoint": 7}, r"step_7 does not exist. There is step_2"),
])  # fmt: skip
def test_what_cannot_change_is_refused_with_both_values(resuming, changes, message):
    with pytest.raises(UserError, match=message):
        resuming.find(**changes)


def test_the_format_and_the_tensors_of_a_checkpoint_cannot_be_forced(resuming):
    for changes in ({"lora_rank": 8}, {"train_backend": "megatron"}):
        with pytest.raises(UserError, match=r"(lora_rank|train_backend) was .* and is .*run_dir$"):
            resuming.find(**changes, resume_force=True)


def test_layers_and_scale_of_adapters_cannot_change(resuming):
    before = resuming.config(lora_rank=8).values
    fixed, used = changed_fields(before, resuming.config(lora_rank=8, lora_alpha=3, lora_target_modules=["q_proj"]))
    assert (sorted(fixed), used) == (["lora_alpha", "lora_target_modules"], {})


def test_fields_of_adapters_change_freely_without_adapters(resuming):
    assert resuming.find(lora_target_modules=["q_proj"], lora_alpha=3).notes == ()


def test_adapters_continue_on_the_model_that_they_were_trained_for(resuming, tmp_path):
    moved = str(write_model_folder(tmp_path / "moved"))
    assert resuming.find(model=moved).notes, "a checkpoint of all weights needs no model"
    before = resuming.config(lora_rank=8)
    fixed, used = changed_fields(before.values, resuming.config(lora_rank=8, model=moved))
    assert (list(fixed), used) == (["model"], {})


def test_resume_force_overrides_the_refusal_and_forgets_the_prompts_in_between(resuming):
    forced = resuming.find(seed=7, resume_force=True)
    assert forced.notes == ("resume_force: continues although seed was 0 and is 7",)
    assert (forced.state.groups, forced.state.sampler) == ([], SamplerPosition(6))
    assert forced.state.ledger.is_balanced()
    assert resuming.find(model_dtype="bfloat16", resume_force=True).state.groups, "the prompts are the same"


def test_a_model_of_another_shape_is_refused_by_its_sizes(resuming, tmp_path):
    other = write_model_folder(tmp_path / "other", hidden_size=128)
    with pytest.raises(UserError, match=r"of another model than model .*other.*hidden_size was 64 and is 128"):
        resuming.find(model=str(other))


def test_the_model_may_have_moved(resuming, tmp_path):
    moved = write_model_folder(tmp_path / "moved")
    assert "model " in resuming.find(model=str(moved)).notes[0]
    (moved / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 1}, "merges": []}}))
    with pytest.raises(UserError, match=r"another tokenizer .*tokenizer.json differs"):
        resuming.find(model=str(moved))


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: (path / "__0_0.distcp").unlink(), "incomplete: __0_0.distcp does not exist"),
    (lambda path: (path / "__0_0.distcp").write_bytes(b"12"), "incomplete: __0_0.distcp has 2 of .* bytes"),
    (lambda path: (path / ".metadata").unlink(), "incomplete: .metadata, the index of the shards, does not exist"),
    (lambda path: (path / ".metadata").write_bytes(b"no"), "incomplete: .metadata.* cannot be read"),
    (lambda path: (path / STATE).unlink(), f"incomplete: it has no {STATE}"),
    (lambda path: (path / META).unlink(), "holds no complete checkpoint"),
    (lambda path: replace_json(path / META, {**read_json(path / META), "layout": 9}), "layout 9.*reads layout 1"),
])  # fmt: skip
def test_an_incomplete_checkpoint_is_refused_with_what_it_lacks(resuming, damage, message):
    damage(resuming.path)
    with pytest.raises(UserError, match=message):
        resuming.find()


@pytest.mark.parametrize(("items", "message"), [
    (range(120), r"arithmetic.items was 100 and is 120; arithmetic has other items, and item 100 .*first that"),
    (range(60), r"arithmetic.items was 100 and is 60; arithmetic has other items, and item 60 .*first that differs"),
    ([0, 2, 1, *range(3, 100)], r"data: arithmetic has the same items in another order, and item 1 .*counted from"),
    (range(99, -1, -1), r"data: arithmetic has the same items in another order, and item 0 "),
    ([*range(42), 700, *range(43, 100)], r"data: arithmetic has other items, and item 42 "),
])  # fmt: skip
def test_changed_data_is_refused_with_what_differs(resuming, items, message):
    checkpoint = resuming.find()
    assert check_data(resuming.config(), checkpoint, DATA) is checkpoint
    data = data_of(items)
    with pytest.raises(UserError, match=message):
        check_data(resuming.config(), checkpoint, data)
    forced = check_data(resuming.config(resume_force=True), checkpoint, data)
    assert forced.state.groups == []
    assert "the data changed" in forced.notes[-1]


def test_the_data_of_a_checkpoint_of_an_earlier_version_is_compared_by_its_sizes(resuming):
    checkpoint = resuming.find()
    checkpoint.state.data["arithmetic"] = {"items": 100, "held_out": 0}
    assert check_data(resuming.config(), checkpoint, DATA) is checkpoint


def test_a_difference_deep_in_a_long_value_is_shown_with_its_place(resuming):
    def environments(last: str) -> list[dict[str, Any]]:
        return [{"name": "arithmetic", "kwargs": {"paths": ["a", {"url": "x" * 300 + last}], "hash": "4e7"}}]

    meta = read_json(resuming.path / META)
    values = resuming.config(environments=environments("1/train")).values
    replace_json(resuming.path / META, {**meta, "config": values})
    with pytest.raises(
        UserError, match=r'paths\[1\].url was "\.\.\.x{20}1/train" and is "\.\.\.x{20}2/train"\. Restore'
    ):
        resuming.find(environments=environments("2/train"))


def test_a_resumed_run_has_the_config_of_the_run_and_chooses_what_differs_from_defaults(tmp_path):
    chosen = {"seed": 0, "share_gpus": True, "max_tokens": 32, "checkpoint_every": 3, "use_wandb": False}
    first = config_of(run_dir=str(tmp_path / "run"), **chosen)
    with RunDirectory.create(first, []).open_record(console=False):
        pass
    resumed = load_resumed_config(tmp_path / "run", ["--learning-rate", "2e-6"]).config
    assert resumed.values == {**first.values, "resume_from_checkpoint": True, "learning_rate": 2e-6}
    assert "max_tokens" in resumed.user_set
    assert "seed" not in resumed.user_set, "it is the default, so that a rule may adjust it"


@pytest.mark.parametrize(("flags", "message"), [
    (["--resume", "{root}/nothing"], "there is no run, because the folder does not exist"),
    (["--resume", "{root}/rum"], "Did you mean 'run'?"),
    (["--resume", "{root}/run/checkpoints/step_2"], "run --resume_from_checkpoint 2"),
    (["--resume", "{root}/run/checkpoints"], "it holds no config.yaml"),
    (["--resume", "{root}/run", "--run_dir", "x"], "name two folders"),
    (["--resume", "{root}/run", "--resume_from_checkpoint=false"], "resume_from_checkpoint is false"),
    (["--resume", "{root}/run", "--resume_from_checkpoint=7"], "step_7 does not exist. There is step_2"),
    (["--resume", "{root}/run", "--seed=7"], "seed was 0 and is 7"),
    (["--resume", "{root}/run", "--checkpoint_keep_last=0"], "checkpoint_keep_last"),
    (["--resume", "{root}/run", "--resume", "x"], "--resume is given twice"),
])  # fmt: skip
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_the_command_refuses_a_bad_resume_with_exit_code_2(resuming, flags, message, dry, tmp_path, capsys):
    config = {
        **resuming.config(environments=[{"name": "countdown", "kwargs": {"dataset": "generated"}}]).values,
        "run_dir": None,
    }
    meta = read_json(resuming.path / META)
    replace_json(resuming.path / META, {**meta, "config": config})
    saved = json.dumps(config)
    (resuming.run_dir / "config.yaml").write_text(saved)
    assert main(["train", *(flag.format(root=tmp_path) for flag in flags), *dry]) == 2
    assert message in capsys.readouterr().err
    assert (resuming.run_dir / "config.yaml").read_text() == saved
    assert sorted(path.name for path in resuming.run_dir.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_run_without_a_checkpoint_is_refused_with_the_command_that_starts_it_again(resuming, capsys):
    (resuming.run_dir / "config.yaml").write_text(json.dumps(resuming.config().values | {"run_dir": None}))
    replace_json(resuming.run_dir / "run.json", {})
    (resuming.path / META).unlink()
    assert main(["train", "--resume", str(resuming.run_dir)]) == 2
    assert f"--run_dir {resuming.run_dir}-2 --checkpoint_every 20`" in capsys.readouterr().err
    assert main(["train", "--resume", str(resuming.run_dir), "--checkpoint_every", "2"]) == 2
    error = capsys.readouterr().err
    assert f"{resuming.run_dir} has no checkpoint in {resuming.path.parent}: it ended after 0 steps" in error
    command = f"telescope train --config {resuming.run_dir}/config.yaml --run_dir {resuming.run_dir}-2"
    assert f"`{command} --checkpoint_every 2`" in error
    assert "resume_from_checkpoint" not in error


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_conversion_of_a_run_without_checkpoints_names_its_model(resuming, capsys, is_saved):
    replace_json(resuming.run_dir / "run.json", {})
    (resuming.path / META).unlink()
    if is_saved:
        write_model_folder(resuming.run_dir / "model")
    assert main(["convert", str(resuming.run_dir)]) == 2
    error = capsys.readouterr().err
    assert "has no complete checkpoint" in error
    assert (f"{resuming.run_dir}/model has the trained weights" in error) == is_saved


def test_a_run_that_was_killed_after_its_last_step_is_continued_to_its_end(resuming):
    (note,) = resuming.find(number_of_steps=2).notes[1:]
    assert note == "step_2 is after the last step: only the end of the run is left"


@pytest.mark.parametrize(("summary", "flags", "finished"), [
    ({"status": "finished", "steps": 2}, ["--number_of_steps=2"], True),
    ({"status": "finished", "steps": 2}, ["--number_of_steps=3"], False),
    ({"status": "finished", "steps": 2}, ["--number_of_steps=2", "--resume_from_checkpoint=2"], False),
    ({"status": "stopped", "steps": 2}, ["--number_of_steps=2"], False),
    ({"status": "finished", "steps": None}, ["--number_of_steps=2"], False),
    ([], ["--number_of_steps=2"], False),
])  # fmt: skip
def test_a_finished_run_is_left_alone_with_exit_code_0(resuming, summary, flags, finished):
    replace_json(resuming.run_dir / "run.json", {})
    replace_json(resuming.run_dir / "summary.json", summary)
    (resuming.run_dir / "config.yaml").write_text(json.dumps(resuming.config().values | {"run_dir": None}))
    config = load_resumed_config(resuming.run_dir, flags).config
    assert (finished_steps(config, resuming.run_dir) is not None) == finished
    if finished:
        assert main(["train", "--resume", str(resuming.run_dir), *flags]) == 0
