"""A run that needs more connections than a process may have is refused before anything starts."""

import resource

import pytest

from telescope.config import TelescopeConfig
from telescope.errors import ConfigError
from telescope.orchestrator.preflight import check_open_files


def config_of(**fields: object) -> TelescopeConfig:
    return TelescopeConfig.model_validate(
        {"model": "m", "environments": [{"name": "countdown"}], "inference_num_workers": 2, "group_size": 16, **fields}
    )


def test_more_request_slots_than_open_files_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    check_open_files(config_of(max_concurrent_prompts_per_server=100))
    with pytest.raises(ConfigError, match=r"per_server is 128.* 4,096 .*ulimit -Hn.* at most 112"):
        check_open_files(config_of(max_concurrent_prompts_per_server=128))


def test_no_limit_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    check_open_files(config_of(max_concurrent_prompts_per_server=4096))


def test_a_limit_that_no_number_of_prompts_fits_is_refused_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    with pytest.raises(ConfigError, match=r"Raise that limit to 544 \([^)]*\)$"):
        check_open_files(config_of(max_concurrent_prompts_per_server=1))
