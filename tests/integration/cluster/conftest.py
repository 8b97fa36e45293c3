"""A Ray cluster of two nodes for all tests of this package.

Two raylets on this machine, each at its own loopback address, report GPUs. Ray relies on these reports, so placement,
isolation and addresses are those of two machines; nothing computes on a GPU.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import Config
from ray.cluster_utils import Cluster as Raylets

from telescope.cluster.ray_cluster import Cluster, connect, forget_authentication
from telescope.cluster.reaper import Reaper
from telescope.config import TelescopeConfig

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
GPUS_PER_NODE = 4
CPUS_PER_NODE = 4


def config_of(**fields: Any) -> TelescopeConfig:
    """A run whose workers ask for little; `fields` are those that the test is about."""
    small = {"ray_inference_cpus_per_worker": 0.1, "ray_trainer_cpus_per_worker": 0.1}
    return TelescopeConfig.model_validate({"model": "m", "environments": [{"name": "countdown"}], **small, **fields})


@dataclass
class TwoNodes:
    """The nodes, and what `connect` found of them."""

    raylets: Raylets
    other: Any
    run_dir: Path
    cluster: Cluster

    def lose_the_other(self) -> None:
        """The second node goes away at once, as a machine does that is switched off."""
        self.raylets.remove_node(self.other, allow_graceful=False)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    """Joined by its address. Other processes do not find it: its files are in a folder of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="two-", dir="/tmp") as folder,  # Ray's sockets want short paths
        pytest.MonkeyPatch.context() as patch,
        Reaper() as reaper,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # a process for each core otherwise
        patch.setenv("RAY_health_check_period_ms", "1000")  # how soon the loss of a node is noticed
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.setenv("NCCL_DEBUG_FILE", "/from/the/driver")
        # The cluster asks for a token, as one that is started by hand does where there is one; the run must find out.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
        Config.initialize("")  # this process starts the cluster
        node = {"num_cpus": CPUS_PER_NODE, "num_gpus": GPUS_PER_NODE, "object_store_memory": 80 << 20}
        raylets = Raylets(
            initialize_head=True, head_node_args={**node, "node_ip_address": HEAD, "include_dashboard": False}
        )
        try:
            other = raylets.add_node(**node, node_ip_address=OTHER)
            # Not known to the nodes, which were started before: it can only come with the run.
            patch.setenv("NCCL_IB_HCA", "set by the user")
            forget_authentication()
            run_dir = Path(folder, "run")
            config = config_of(
                ray_address=raylets.address,
                ray_namespace="of-the-test",
                ray_runtime_env={"env_vars": {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/from/the/field"}},
            )
            cluster = connect(config, run_dir, reaper.directory, local_cpus=1, local_gpus=0)
            yield TwoNodes(raylets, other, run_dir, cluster)
        finally:
            ray.shutdown()
            raylets.shutdown()
            forget_authentication()
