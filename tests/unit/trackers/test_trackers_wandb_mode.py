"""W&B is online only with credentials for the server that is used, unless the user sets the mode."""

import pytest
import wandb
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.orchestrator.fakes import config_of

from telescope.errors import ConfigError
from telescope.trackers.wandb import wandb_mode


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_environment_variable_decides(mode, tmp_path):
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_MODE": mode}) == mode


def test_an_old_mode_of_wandb_counts_like_its_new_name(tmp_path):
    environment = {"HOME": str(tmp_path), "WANDB_API_KEY": "k" * 40}
    assert wandb_mode({**environment, "WANDB_MODE": "dryrun"}) == "offline"
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_MODE": "run"}) == "online"


def test_without_credentials_a_run_is_offline(tmp_path):
    assert wandb_mode({"HOME": str(tmp_path)}) == "offline"


def test_a_key_makes_it_online(tmp_path):
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_API_KEY": "k" * 40}) == "online"


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_netrc_counts_for_the_server_that_is_used(host, tmp_path):
    (tmp_path / ".netrc").write_text(f"machine {host} login user password secret\n")
    assert wandb_mode({"HOME": str(tmp_path)}) == "online"
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"


@pytest.mark.parametrize("name", ["wandb.example.org", "wandb.example.org:8080"])
def test_the_server_of_wandb_login_host_is_used(name, tmp_path):
    settings = tmp_path / ".config" / "wandb"
    settings.mkdir(parents=True)
    (settings / "settings").write_text("[default]\nbase_url = http://wandb.example.org:8080\n")
    assert wandb_mode({"HOME": str(tmp_path)}) == "offline"
    (tmp_path / ".netrc").write_text(f"machine {name} login user password secret\n")
    assert wandb_mode({"HOME": str(tmp_path)}) == "online"


def test_damaged_files_are_no_credentials(tmp_path):
    (tmp_path / "broken").write_text("machine\n")
    (tmp_path / "settings").write_text("base_url")
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "broken"), "WANDB_CONFIG_DIR": str(tmp_path)}
    assert wandb_mode(environment) == "offline"


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
