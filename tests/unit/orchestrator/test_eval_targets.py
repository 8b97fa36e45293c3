"""What `telescope eval` measures: finding models and evals, and refusing what cannot be."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from tests.model_folder import write_model_folder
from tests.unit.orchestrator.fakes import config_of
from tests.unit.orchestrator.simulation import FakeServer

from telescope.cli.main import main
from telescope.config import EvalEntry
from telescope.config.eval_config import EvalCommand
from telescope.errors import InfrastructureError, UserError
from telescope.evals.runner import PlannedEval
from telescope.orchestrator import eval_run
from telescope.orchestrator.eval_run import EvalJob, choose_evals, eval_numbers, has_steps
from telescope.orchestrator.eval_targets import find_targets
from telescope.rollout.sample import RolloutSettings
from telescope.weights.model_folder import MARKER
from telescope.weights.plan import UpdateInfo


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with the checkpoints 2 and 10, the incomplete 4, and a final model."""
    folder = tmp_path / "run"
    for step in (2, 4, 10):
        checkpoint = folder / "checkpoints" / f"step_{step}"
        checkpoint.mkdir(parents=True)
        write_model_folder(checkpoint / "hf_meta")
        if step != 4:
            meta = {"step": step, "time": 1.0, "model": "m", "config": {"temperature": 0.5}, "config_hash": "abc"}
            meta |= {"layout": 1, "train_backend": "fsdp", "ranks": 1, "training_state": True}
            (checkpoint / "meta.json").write_text(json.dumps(meta))
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text(yaml.safe_dump({"temperature": 0.5, "checkpoint_dir": None}))
    write_model_folder(folder / "model")
    return folder


def test_a_run_and_its_folder_of_checkpoints_are_their_complete_checkpoints_in_order(run):
    for source in (run, run / "checkpoints"):
        targets = find_targets(EvalCommand(), [str(source)])
        assert [(t.label, t.step, t.is_native) for t in targets] == [("step_2", 2, True), ("step_10", 10, True)]
        assert targets[0].run_dir == run
        assert targets[0].run_config() == {"temperature": 0.5}
    assert [t.step for t in find_targets(EvalCommand(checkpoint_dir=str(run)), [], [10])] == [10]
    with pytest.raises(UserError, match=r"has no step_4\. It has step_2, step_10"):
        find_targets(EvalCommand(), [str(run)], [4])


def test_a_run_without_checkpoints_is_its_final_model(run):
    shutil.rmtree(run / "checkpoints")
    (target,) = find_targets(EvalCommand(), [str(run)])
    assert (target.path, target.is_native, target.run_dir) == (run / "model", False, run)
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_targets(EvalCommand(), [str(run)], [10])
    for file in (run / "model").glob("*.safetensors"):
        file.unlink()  # as before the end of a run
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_targets(EvalCommand(), [str(run)])


def test_a_final_model_of_a_later_step_than_all_checkpoints_is_the_newest(run):
    for step, expected in (10, run / "checkpoints" / "step_10"), (12, run / "model"):
        origin = {"checkpoint": {"step": step, "time": 1.0, "model": "m", "config_hash": "abc"}, "dtype": "as saved"}
        (run / "model" / MARKER).write_text(json.dumps(origin))
        assert find_targets(EvalCommand(), [str(run)])[-1].path == expected
        assert find_targets(EvalCommand(), [str(run)], [step])[-1].path == expected
    with pytest.raises(UserError, match=rf"has no step_11\. It has step_2, step_10, 12 \({run}/model\)"):
        find_targets(EvalCommand(), [str(run)], [11])


def test_models_and_listed_checkpoints_are_measured_too_each_once(run, tmp_path):
    plain = write_model_folder(tmp_path / "plain")
    command = EvalCommand.model_validate(
        {"checkpoints": [{"path": str(plain), "step": 7}, {"path": str(run / "checkpoints" / "step_2")}]}
    )
    targets = find_targets(command, [str(run), str(run / "model")])
    assert [(t.step, t.is_native) for t in targets] == [(None, False), (2, True), (7, False), (10, True)]
    assert targets[0].run_config() == {"temperature": 0.5, "checkpoint_dir": None}, "the run's final model"
    assert targets[2].run_config() is None


def test_a_hub_model_is_downloaded_with_its_own_code(tmp_path, monkeypatch):
    files = {"config.json", "model.safetensors", "modeling_own.py", "vocabulary.tiktoken", "tokenizer.model"}

    def download(model, allow_patterns, local_files_only):
        for name in huggingface_hub.utils.filter_repo_objects([*files, "photo.png"], allow_patterns=allow_patterns):
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (target,) = find_targets(EvalCommand(), ["some/model"])
    assert {file.name for file in target.path.iterdir()} == files


def test_a_converted_checkpoint_is_the_checkpoint_and_another_model_is_not(run, tmp_path):
    (native,) = find_targets(EvalCommand(), [str(run / "checkpoints" / "step_2")])
    converted = write_model_folder(tmp_path / "step_2")
    origin = {"step": 2, "time": 1.0, "model": "m", "config_hash": "abc"}
    (converted / MARKER).write_text(json.dumps({"checkpoint": origin, "dtype": "as saved"}))
    other = write_model_folder(tmp_path / "other")
    identities = [find_targets(EvalCommand(), [str(path)])[0].identity() for path in (converted, other)]
    assert native.identity() == identities[0] != identities[1]


@pytest.mark.parametrize(("source", "message"), [
    ("./nowhere", "does not exist. Give a run directory"), ("empty", "has no complete checkpoint and no model"),
    (None, "eval needs a model"),
])  # fmt: skip
def test_what_is_no_model_is_refused(tmp_path, monkeypatch, source, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        find_targets(EvalCommand(), [] if source is None else [source])


def test_models_of_another_shape_or_tokenizer_cannot_share_an_engine(run, tmp_path):
    write_model_folder(tmp_path / "deep", num_hidden_layers=7)
    with pytest.raises(UserError, match=r"differ in num_hidden_layers, .*Evaluate them in two commands"):
        find_targets(EvalCommand(), [str(run / "model"), str(tmp_path / "deep")])
    shutil.copytree(run / "model", tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=re.escape("differ in tokenizer.json")):
        find_targets(EvalCommand(), [str(run / "model"), str(tmp_path / "other")])
    with pytest.raises(UserError, match="hf_weights is true"):
        find_targets(EvalCommand(hf_weights=True), [str(run)])


def test_only_models_with_steps_of_their_own_are_recorded_as_versions_of_the_run(run):
    checkpoints = find_targets(EvalCommand(), [str(run)])
    assert has_steps(checkpoints)
    assert not has_steps([*checkpoints, *find_targets(EvalCommand(), [str(run / "model")])])
    assert not has_steps([*checkpoints, replace(checkpoints[0], label="the same step")])


OF_THE_RUN = [EvalEntry(name="countdown", num_samples=50), EvalEntry(name="math500", temperature=0.5)]


def test_trackers_find_the_evals_of_a_job_by_the_ids_that_are_recorded(run):
    targets = find_targets(EvalCommand(), [str(run)])
    config = config_of(evals=[{"name": "arithmetic", "num_samples": 1}, {"name": "arithmetic", "num_samples": 1}])
    job = EvalJob(config, targets, [0, 1], "digest", run, run, [])
    sampling = RolloutSettings.from_config(config).sampling
    plans = [PlannedEval("arithmetic", "a", [], sampling, False, number, session=job.session) for number in (0, 1)]
    wanted = {plan.id_at(job.version_of(each)): f"arithmetic#{plan.number}" for plan in plans for each in targets}
    assert job.eval_names() == wanted


def test_evals_are_those_asked_for_with_the_settings_of_the_run_or_else_those_of_the_run():
    assert choose_evals([], OF_THE_RUN, [], None) == OF_THE_RUN
    (chosen,) = choose_evals([], OF_THE_RUN, ["math500"], 7)
    assert (chosen.temperature, chosen.num_samples) == (0.5, 7)
    assert choose_evals([], [], ["wordle"], None) == [EvalEntry(name="wordle")]
    with pytest.raises(UserError, match="--eval math500"):
        choose_evals([], [], [], None)


def test_seeds_are_those_of_the_run_s_eval_of_the_same_name():
    new, math = EvalEntry(name="aime_2024"), EvalEntry(name="math500")
    assert eval_numbers([new, math], OF_THE_RUN) == [2, 1]
    assert eval_numbers([math, math], OF_THE_RUN) == [1, 2]
    assert eval_numbers(OF_THE_RUN, OF_THE_RUN) == [0, 1]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--eval", "math50"], "math500"),
    (["--eval", "countdown", "--step", "three"], "--step: 'three' is neither numbers of checkpoints"),
    (["--eval", "countdown", "--num-samples", "0"], "--num-samples is 0, but 0 samples evaluate nothing"),
    (["--eval", "countdown", "--json", "no/where.json"], "--json: no is not a folder"),
    (["--eval", "countdown", "--wandb-run-path", "me/run"], "wandb_run_path is 'me/run'"),
    (["--eval", "countdown", "--learning_rate", "1"], "learning_rate (command line) is a field of training"),
    (["--eval", "countdown", "--ray_inference_cpus_per_worker", "500"], "lower ray_inference_cpus_per_worker to"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_names_the_fix(run, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(run.parent)
    assert main(["eval", "run/model", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_model_that_servers_load_first_is_checked_before_anything_starts(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    shutil.copytree(run / "model", run.parent / "base")
    (run.parent / "base" / "chat_template.jinja").unlink()
    assert main(["eval", "base", "run/model", "--eval", "countdown"]) == 2
    assert "base (chat_template.jinja, tokenizer_config.json) has no chat template" in capsys.readouterr().err


async def test_a_server_that_fails_after_it_has_counted_a_version_loads_the_folder_again(run, monkeypatch):
    server, calls = FakeServer(), list[int]()

    async def load(client: FakeServer, update: UpdateInfo) -> None:
        calls.append(update.version)
        client.loaded_version = update.version
        if len(calls) == 1:
            raise InfrastructureError("POST /resume had no answer within 60 s")

    monkeypatch.setattr(eval_run, "load_folder", load)
    weights = eval_run.FolderWeights(config_of(), [server], run / "model", 2)  # type: ignore[list-item]
    opened: list[int] = []
    await weights.sync_one(0, lambda: opened.append(2), fresh=False)
    weights.version = 10
    with pytest.raises(InfrastructureError):
        await weights.sync_one(0, lambda: opened.append(10), fresh=False)
    for _ in range(2):
        await weights.sync_one(0, lambda: opened.append(10), fresh=False)
    assert (calls, opened) == ([10, 10], [2, 10, 10])
