"""`telescope doctor --cluster` compares the nodes of a cluster."""

from dataclasses import replace
from pathlib import Path

import pytest
import ray
from tests.integration.cluster.conftest import GPUS_PER_NODE, TwoNodes

from telescope.cli.doctor import check_cluster
from telescope.cluster.checks import ask_probes
from telescope.errors import UserError

pytestmark = pytest.mark.slow


def test_two_nodes_are_compared(two_nodes: TwoNodes, tmp_path: Path):
    answers = ask_probes([node for node in ray.nodes() if node["Alive"]], two_nodes.cluster.driver_node, tmp_path)
    here, other = answers.gpus
    assert answers.gpus == {here: GPUS_PER_NODE, other: GPUS_PER_NODE}
    assert answers.versions[here] == answers.versions[other]
    assert isinstance(answers.collectives["gloo"], float)
    assert isinstance(answers.collectives["nccl"], str), "there is no real GPU"
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"--run-dir is '/proc/runs', which is not writable"):
        ask_probes(ray.nodes(), two_nodes.cluster.driver_node, Path("/proc/runs"))

    def status(**changes):
        checks = check_cluster(replace(answers, **changes), 2, tmp_path)
        return {check.name: check.status for check in checks if check.status != "ok"}

    assert status() == {"nccl": "bad"}
    assert status(
        gpus={here: 0},
        versions={here: {"torch": "2.11"}, other: {"torch": "2.12"}},
        clock_offsets={here: 0.0, other: -3.0},
        without_folder=(other,),
        collectives={"gloo": "timed out"},
    ) == {"nodes": "bad", "versions": "bad", "clocks": "note", "run directory": "bad", "gloo": "bad"}
