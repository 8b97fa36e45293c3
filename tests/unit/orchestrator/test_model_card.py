"""The card of a model, and what is asked of the hub."""

import json
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

from telescope.errors import RunError, UserError
from telescope.orchestrator.model_card import model_card, push_to_hub
from telescope.record.charts import Point, line_chart
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run

CONFIG = {
    "algorithm": "grpo", "learning_rate": 1e-6, "top_p": None,
    "environments": [{"name": "countdown", "weight": 2.0, "kwargs": {"max_number": 9}}],
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """The checkpoint after 3 steps of a run of 5, with an eval before training and after each step."""
    with Recorder(tmp_path / "run", flush_seconds=0.01) as recorder:
        begin_run(recorder, name="first", config_hash="abc", config_json="{}")
        for step in range(5):
            recorder.write("steps", {"step": step, "reward_mean": step / 8})
        for version in range(6):
            row = {"name": "math500", "version": version, "step": version - 1, "accuracy": version / 16}
            row |= {
                "accuracy_low": 0.0, "accuracy_high": 0.5, "num_items": 40, "num_completions": 4, "num_scored": 158,
                "ended_at": 1.0,
            }  # fmt: skip
            recorder.write(
                "evals", {**row, "eval_id": f"e{version}", "status": "failed" if version == 3 else "finished"}
            )
    folder = tmp_path / "run" / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    meta = {"step": 3, "model": "Qwen/Qwen3-0.6B", "config": CONFIG, "config_hash": "abc", "telescope": "0.1.0"}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, Any]]:
    """The calls of the hub, which takes everything."""
    made: list[tuple[str, Any]] = []

    def create(api: object, name: str, **options: Any) -> Any:
        made.append(("create_repo", (name, options)))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload(api: object, **options: Any) -> Any:
        made.append(("upload_folder", options))
        return SimpleNamespace(commit_url="https://huggingface.co/me/first/commit/1")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    return made


def test_the_whole_folder_is_uploaded_with_a_card(checkpoint, calls, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert push_to_hub(folder, "first", checkpoint, private=True).endswith("/commit/1")
    assert calls == [
        ("create_repo", ("first", {"private": True, "exist_ok": True})),
        ("upload_folder", {"repo_id": "me/first", "folder_path": folder, "commit_message": "Upload step_3"}),
    ]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model: Qwen/Qwen3-0.6B\n---" in card
    assert 'AutoTokenizer.from_pretrained("me/first")' in card
    assert '| countdown | 2.0 | {"max_number": 9} |' in card
    assert "| `learning_rate` | 1e-06 |" in card
    assert "`top_p`" not in card
    assert "| 1 | 0 |\n| 2 | 0.125 |\n| 3 | 0.25 |\n" in card, "the steps of the checkpoint and no later one"
    assert (
        "| math500 | 0 | accuracy | 0.0000 | 0.0000 to 0.5000 | 40 | 4 | 2 |\n| math500 | 2 | accuracy | 0.1250 |"
        in card
    )
    assert "| math500 | 5" not in card
    xml.etree.ElementTree.parse(folder / "reward.svg")


def test_a_checkpoint_without_a_record_has_a_card_all_the_same(checkpoint, calls, tmp_path):
    alone = tmp_path / "elsewhere" / "step_3"
    alone.mkdir(parents=True)
    (alone / "meta.json").write_bytes((checkpoint / "meta.json").read_bytes())
    push_to_hub(alone, "first", alone)
    assert "## Reward" not in (alone / "README.md").read_text()


@pytest.mark.parametrize("base", ["./model", "../model", "out/model"])
def test_a_local_model_is_no_base_model_of_the_hub(checkpoint, calls, tmp_path, monkeypatch, base):
    (tmp_path / "out" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    meta = json.loads((checkpoint / "meta.json").read_text())
    assert "base_model" not in model_card("me/first", meta | {"model": base}, None, [])


def test_a_card_names_no_argument_that_may_hold_a_key(checkpoint):
    meta = json.loads((checkpoint / "meta.json").read_text())
    kwargs = {"provider_kwargs": {"api_key": "e2b_123"}, "environment_vars": {"KEY": "sk-1"}, "max_turns": 3}
    meta["config"]["environments"] = [{"name": "terminal_tasks", "kwargs": kwargs}]
    card = model_card("me/first", meta, None, [])
    assert '| terminal_tasks | 1 | {"max_turns": 3} |' in card and "e2b_123" not in card and "sk-1" not in card


@pytest.mark.parametrize(("error", "kind", "text"), [
    (LocalTokenNotFoundError("no token"), UserError, "hf auth login"),
    (HFValidationError("a//b is no name"), UserError, "a//b is no name"),
    (OSError("no route to host"), RunError, "was not uploaded: no route to host. The model is in"),
    (type("ConnectError", (Exception,), {})("no name"), RunError, "was not uploaded: no name. The model is in"),
])  # fmt: skip
def test_what_the_hub_refuses_is_an_error_with_the_fix(checkpoint, calls, monkeypatch, error, kind, text):
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
    with pytest.raises(kind, match=text):
        push_to_hub(checkpoint, "first", checkpoint)


def test_a_chart_has_a_line_per_series_and_a_bar_per_interval():
    series = {"a <b>": [Point(0, 0.5, 0.4, 0.6), Point(10, 0.7, 0.6, 0.8)], "c": [Point(5, 0.1)]}
    root = xml.etree.ElementTree.fromstring(line_chart(series, title="accuracy"))
    tags = [element.tag.rpartition("}")[2] for element in root]
    assert tags.count("polyline") == 2
    assert tags.count("circle") == 3
    assert sum("V" in element.get("d", "") for element in root) == 2
    assert "a <b>" in {element.text for element in root}
