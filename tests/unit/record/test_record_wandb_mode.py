"""Online only with credentials, unless the user sets the mode."""

import pytest

from telescope.record.wandb_sink import wandb_mode


@pytest.mark.parametrize("asked", ["online", "offline", "disabled"])
def test_the_environment_variable_decides(asked, tmp_path):
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_MODE": asked}) == asked


def test_without_credentials_a_run_is_offline(tmp_path):
    assert wandb_mode({"HOME": str(tmp_path)}) == "offline"


def test_a_key_makes_it_online(tmp_path):
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_API_KEY": "k" * 40}) == "online"


def test_netrc_counts_for_the_server_that_is_used(tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode({"HOME": str(tmp_path)}) == "online"
    assert wandb_mode({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"


def test_a_damaged_netrc_is_no_credential(tmp_path):
    (tmp_path / "broken").write_text("machine\n")
    assert wandb_mode({"HOME": str(tmp_path), "NETRC": str(tmp_path / "broken")}) == "offline"
