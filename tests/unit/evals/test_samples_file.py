"""An interrupted evaluation keeps its finished samples."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.evals.runner import SamplesFile


def plan(*uids: str, number: int = 0) -> Any:
    items = [SimpleNamespace(index=index, prompt=SimpleNamespace(sample_uid=uid)) for index, uid in enumerate(uids)]
    return SimpleNamespace(name="math500", number=number, items=items)


def add(file: SamplesFile, of: Any, item: int, completion: int, score: float) -> None:
    sample: Any = SimpleNamespace(sample_index=completion, sample_id=f"{file.model}-{item}-{completion}")
    file.add(of, of.items[item], sample, {"correct": score})


def reopened(path: Path, *, without: frozenset[str] = frozenset()) -> SamplesFile:
    """The file beside a record that lacks the rows of some samples in one of its two tables."""
    ids = frozenset(json.loads(line)["sample_id"] for line in path.read_bytes().splitlines() if line.endswith(b"}"))
    return SamplesFile(path, [ids, ids - without])


@pytest.fixture
def path(tmp_path):
    with SamplesFile(tmp_path / "samples.jsonl", []) as file:
        file.model = "a"
        add(file, plan("x", "y"), 0, 0, 1.0)
        add(file, plan("x", "y"), 1, 2, 0.0)
        file.model = "b"
        add(file, plan("x", "y"), 0, 0, 0.5)
    return tmp_path / "samples.jsonl"


def test_samples_are_known_by_model_eval_item_and_completion(path):
    with reopened(path) as file:
        assert file.finished(plan("x", "y")) == {}, "no model yet"
        file.model = "a"
        assert file.finished(plan("x", "y")) == {(0, 0): {"correct": 1.0}, (1, 2): {"correct": 0.0}}
        assert file.finished(plan("x", "y", number=1)) == {}
        file.model = "b"
        assert file.finished(plan("x", "y")) == {(0, 0): {"correct": 0.5}}


def test_an_item_that_has_changed_is_sampled_again(path):
    with reopened(path) as file:
        file.model = "a"
        assert file.finished(plan("x", "another")) == {(0, 0): {"correct": 1.0}}


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_next_one_is_whole(path):
    path.write_bytes(path.read_bytes()[:-5])
    with reopened(path) as file:
        file.model = "b"
        assert file.finished(plan("x", "y")) == {}
        add(file, plan("x", "y"), 1, 0, 1.0)
    with reopened(path) as file:
        file.model = "b"
        assert file.finished(plan("x", "y")) == {(1, 0): {"correct": 1.0}}


def test_a_sample_that_the_record_lacks_is_sampled_again_under_another_id(path):
    with reopened(path, without=frozenset({"a-1-2"})) as file:
        file.model = "a"
        assert file.finished(plan("x", "y")) == {(0, 0): {"correct": 1.0}}
        assert file.taken == {"a-0-0", "a-1-2", "b-0-0"}, "an id in one of the tables is not given twice"


def test_a_file_of_an_earlier_version_keeps_its_samples(path):
    rows = [{key: value for key, value in json.loads(line).items() if key != "sample_id"} for line in path.open()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with SamplesFile(path, [frozenset()]) as file:
        file.model = "a"
        assert len(file.finished(plan("x", "y"))) == 2
