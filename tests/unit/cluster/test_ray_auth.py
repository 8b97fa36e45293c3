"""A cluster that is joined is shown a token if it asks for one, and the user's own choice is left alone."""

import os
from types import SimpleNamespace

import pytest

from telescope.cluster import ray_cluster
from telescope.cluster.ray_cluster import MODE_VARIABLE, admits, forget_authentication, settle_authentication
from telescope.errors import UserError


class FakeCluster:
    """The cluster at 10.0.0.1, and what this process knows of tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wanted: str | None = None
        self.answers = True
        self.token: str | None = None
        self.num_refreshes = 0
        loader = SimpleNamespace(
            reset_cache=lambda: None,
            has_token=lambda ignore_auth_mode: self.token is not None,
            get_raw_token=lambda ignore_auth_mode: self.token,
        )
        monkeypatch.setattr(ray_cluster, "AuthenticationTokenLoader", SimpleNamespace(instance=lambda: loader))
        monkeypatch.setattr(ray_cluster, "Config", SimpleNamespace(initialize=self.refresh))
        addresses = {"auto": None, "10.0.0.1:6379": "10.0.0.1:6379"}
        services = SimpleNamespace(canonicalize_bootstrap_address=addresses.__getitem__)
        monkeypatch.setattr(ray_cluster, "services", services)
        monkeypatch.setattr(ray_cluster, "check_port_open", lambda address: None)
        monkeypatch.setattr(ray_cluster, "admits", self.admits)
        monkeypatch.setenv(MODE_VARIABLE, "")  # so that it is put back
        monkeypatch.delenv(MODE_VARIABLE)

    def refresh(self, settings: str) -> None:
        self.num_refreshes += 1

    def admits(self, address: str, token: str | None = None) -> bool | None:
        return self.wanted in (None, token) if self.answers else None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


@pytest.mark.parametrize(("wanted", "mode"), [("secret", "token"), (None, "disabled")])
def test_the_authentication_mode_follows_the_cluster(cluster, wanted, mode):
    cluster.wanted, cluster.token = wanted, "secret"
    settle_authentication("10.0.0.1:6379")
    assert os.environ[MODE_VARIABLE] == mode
    assert cluster.num_refreshes == 1
    forget_authentication()
    assert MODE_VARIABLE not in os.environ
    assert cluster.num_refreshes == 2


@pytest.mark.parametrize(("token", "words"), [(None, "none was found here"), ("old", "rejects the one found here")])
def test_a_missing_or_wrong_token_is_a_user_error(cluster, token, words):
    cluster.wanted, cluster.token = "secret", token
    with pytest.raises(UserError, match=f"ray_address: .*10.0.0.1:6379.* {words}.*auth_token.*RAY_AUTH_TOKEN"):
        settle_authentication("10.0.0.1:6379")
    assert MODE_VARIABLE not in os.environ


def test_an_unreachable_cluster_and_the_users_own_mode_change_nothing(cluster, monkeypatch):
    cluster.wanted = "secret"
    settle_authentication("auto")  # no cluster runs
    settle_authentication("ray://10.0.0.1:10001")
    cluster.answers = False
    settle_authentication("10.0.0.1:6379")
    assert MODE_VARIABLE not in os.environ
    cluster.answers = True
    monkeypatch.setenv(MODE_VARIABLE, "disabled")
    settle_authentication("10.0.0.1:6379")
    assert os.environ[MODE_VARIABLE] == "disabled"
    assert cluster.num_refreshes == 0


def test_an_address_without_a_cluster_gives_no_answer():
    assert admits("127.0.0.1:1") is None


@pytest.mark.parametrize("mode", [None, "disabled"])
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "nosuchhost.invalid:6379"])
def test_an_address_without_a_listener_is_refused_at_once(monkeypatch, address, mode):
    """`ray.init` would try for minutes."""
    monkeypatch.setenv(MODE_VARIABLE, mode or "")
    if mode is None:
        monkeypatch.delenv(MODE_VARIABLE)
    with pytest.raises(ConnectionError, match="nothing answers at"):
        settle_authentication(address)
