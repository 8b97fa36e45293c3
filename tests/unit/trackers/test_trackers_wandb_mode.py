"""W&B is online only with credentials for the server that is used, unless the user sets the mode."""

import pytest
import wandb
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of

from telescope.errors import ConfigError
from telescope.trackers.wandb import wandb_mode

OWN = "[default]\nbase_url = http://wandb.example.org:8080\n"
KEY = {"WANDB_API_KEY": "k" * 40}
ELSEWHERE = {"WANDB_BASE_URL": "https://wandb.example.org"}


def machine(name: str) -> str:
    return f"machine {name} login user password secret\n"


@pytest.mark.parametrize(("files", "environment", "mode"), [
    *(({}, {"WANDB_MODE": mode}, mode) for mode in ("online", "offline", "disabled")),
    ({}, {**KEY, "WANDB_MODE": "dryrun"}, "offline"), ({}, {"WANDB_MODE": "run"}, "online"),  # old names
    ({}, {}, "offline"), ({}, KEY, "online"),
    *(({".netrc": machine(host)}, used, mode) for host in ("api.wandb.ai", "api.forge.coreweave.com")
      for used, mode in (({}, "online"), (ELSEWHERE, "offline"))),
    # `wandb login --host` writes the settings.
    ({"settings": OWN}, {}, "offline"), ({"settings": OWN, ".netrc": machine("wandb.example.org")}, {}, "online"),
    ({"settings": OWN, ".netrc": machine("wandb.example.org:8080")}, {}, "online"),
    ({"settings": "base_url", ".netrc": "machine\n"}, {}, "offline"),  # damaged
])  # fmt: skip
def test_a_run_is_online_with_credentials_for_the_server_that_is_used(tmp_path, files, environment, mode):
    (tmp_path / ".config" / "wandb").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / (".config/wandb/settings" if name == "settings" else name)).write_text(text)
    assert wandb_mode({"HOME": str(tmp_path), **environment}) == mode


def test_files_in_other_places_are_read(tmp_path):
    (tmp_path / "netrc").write_text(machine("wandb.example.org"))
    (tmp_path / "settings").write_text(OWN)
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    assert wandb_mode(environment) == "online"


def is_taken(make) -> bool:
    try:
        make()
    except (ConfigError, ValueError, wandb.UsageError):
        return False
    return True


names = st.text("a/\\#?%: .-é", min_size=1, max_size=4) | st.integers(126, 130).map("p".__mul__)


@given(names.filter(str.strip), st.lists(names | st.integers(62, 66).map("t".__mul__), max_size=2))
@example("fine", [""])
def test_a_run_is_refused_before_the_start_where_wandb_would_refuse_it(project, tags):
    expected = is_taken(lambda: wandb.Settings(project=project, run_tags=tags))
    assert is_taken(lambda: config_of(use_wandb=True, wandb_project=project, wandb_tags=tags)) == expected
    assert is_taken(lambda: config_of(use_wandb=False, wandb_project=project, wandb_tags=tags)), "others take it"
