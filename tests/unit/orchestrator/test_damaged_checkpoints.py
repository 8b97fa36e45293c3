"""Damaged, edited and odd files of a checkpoint are errors of one line that name the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.orchestrator.test_resume import Resuming

from telescope.config.eval_config import EvalCommand
from telescope.errors import RunError, UserError
from telescope.orchestrator.checkpoints import HF_META, META, STATE, CheckpointFolder, refuse_damage
from telescope.orchestrator.conversion import convert, is_converted
from telescope.orchestrator.eval_targets import find_targets
from telescope.utils.digests import files_below

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Resuming:
    return Resuming(tmp_path_factory.mktemp("saved"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found_on_resume_and_conversion(saved, tmp_path):
    names = [name for name in files_below(saved.path) if name != META]
    assert {"__0_0.distcp", ".metadata", STATE, "hf_meta/config.json"} <= set(names)
    for name in names:
        for at in (0, -1, os.stat(saved.path / name).st_size // 2):
            copy = tmp_path / f"{names.index(name)} {at}" / "step_2"
            shutil.copytree(saved.path, copy)
            shutil.copytree(copy, copy.with_name("step_1"))
            checkpoint = CheckpointFolder(copy.parent).load(2)
            refuse_damage(checkpoint.path, checkpoint.meta)
            flip(copy / name, at)
            damaged = f"step_2 is damaged: {name} has changed since it was written.*(there is step_1)"
            with pytest.raises(UserError, match=damaged):
                refuse_damage(checkpoint.path, checkpoint.meta)
            with pytest.raises(UserError, match=damaged):
                convert(copy, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_damaged_tokenizer_is_not_that_of_another_model(tmp_path):
    resuming = Resuming(tmp_path)
    flip(resuming.path / HF_META / "tokenizer.json", -1)
    with pytest.raises(UserError, match=r"step_2 is damaged: hf_meta/tokenizer\.json has changed"):
        resuming.find()


def test_a_renamed_checkpoint_is_not_that_of_another_step(saved, tmp_path):
    for name in ("step_0002", "step_٢", "step_7"):
        shutil.copytree(saved.path, tmp_path / name)
    assert CheckpointFolder(tmp_path).steps() == [7]
    with pytest.raises(UserError, match=r"step_7 is after step 2 in its meta.json"):
        CheckpointFolder(tmp_path).load(7)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("9" * 5000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def paths_in(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(path for key, inner in items for path in paths_in(inner, (*before, key)))]


def changed(document: Any, path: tuple[Any, ...], value: Any, *, removed: bool) -> Any:
    if not path:
        return value
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if removed:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copy


def use_everything(resuming: Resuming, target: Path) -> None:
    for use in (
        lambda: (found := resuming.find(resume_force=True)) and refuse_damage(found.path, found.meta),
        lambda: is_converted(resuming.path, target),
        lambda: convert(resuming.path, target / "new"),
        lambda: find_targets(EvalCommand(), [str(resuming.path)])[0].identity(),
    ):
        check_error(use)


def check_error(use: Callable[[], object]) -> None:
    message = ""
    try:
        use()
    except (UserError, RunError) as error:
        message = str(error)
    assert "\n" not in message and len(message) < 2000


@pytest.mark.parametrize("name", [META, STATE])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JSON, removed=st.booleans())
def test_any_json_is_read_or_refused_in_one_line(saved, tmp_path, name, data, value, removed):
    kept = (saved.path / name).read_bytes()
    document = json.loads(kept)
    if name == META:
        document["files"] = {}  # so that nothing else notices the change
    chosen = data.draw(st.sampled_from([path for path in paths_in(document) if "base64" not in path]))
    try:
        (saved.path / name).write_text(json.dumps(changed(document, chosen, value, removed=removed)))
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "file").touch()
        use_everything(saved, tmp_path / "other")
    finally:
        (saved.path / name).write_bytes(kept)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "3", '"x"', "{", "\x00", "[" * 100_000, '{"layout": 2}'])
@pytest.mark.parametrize("name", [META, STATE])
def test_a_file_that_is_no_checkpoint_s_json_is_refused_by_its_name(saved, tmp_path, name, text):
    copy = tmp_path / "step_2"
    shutil.copytree(saved.path, copy)
    (copy / name).write_text(text)
    with pytest.raises(UserError, match=r"step_2|state"):
        CheckpointFolder(tmp_path).load(2)
    with pytest.raises((UserError, RunError), match=r"layout 2|cannot be read|has changed"):
        convert(copy, tmp_path / "model")
