"""A run's state as Prometheus reads it."""

from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telescope.config.machine import free_block
from telescope.errors import UserError
from telescope.orchestrator.prometheus import serve_status
from telescope.orchestrator.status import RunStatus, StepSummary


def test_a_run_is_served_as_it_is_at_each_question():
    status = RunStatus("demo", 60)
    address = f"127.0.0.1:{free_block('127.0.0.1', 1, 9500)}"
    end = serve_status(address, status)

    def numbers():
        text = urlopen(f"http://{address}/metrics").read().decode()
        families = list(text_string_to_metric_families(text))
        samples = [sample for family in families for sample in family.samples]
        # The rules of `promtool check metrics`.
        assert all(
            (family.type == "counter") == (s.name.endswith("_total")) for family in families for s in family.samples
        )
        assert all(family.documentation.endswith(".") for family in families)
        assert {sample.labels["run"] for sample in samples} == {"demo"}
        return {sample.name: sample.value for sample in samples}

    try:
        assert (
            numbers().items() >= {"telescope_num_steps": 60, "telescope_step": 0, "telescope_tokens_total": 0}.items()
        )
        status.step, status.num_tokens_generated = 1, 5000
        status.history.append(StepSummary(0, 0.25, 0.5, 2.0, 1.0, 900.0, 0.001, float("nan"), 0.1))
        assert numbers()["telescope_tokens_total"] == 5000
        assert numbers()["telescope_step_reward_mean"] == 0.25
        assert "telescope_step_grad_norm" not in numbers(), "not a number"
        with pytest.raises(UserError, match=f"prometheus_address is {address}, where the driver cannot listen: in use"):
            serve_status(address, status)
    finally:
        end()
