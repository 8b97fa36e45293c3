"""Two ranks over NCCL compute what one rank computes on a CPU. Run by hand on a machine with two GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.integration.trainer.test_two_ranks import BATCHES, CHANGES, resume_job, whole_job
from tests.integration.trainer.trainer_cases import build_model, make_config, relative_error, run_here, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_weights_and_checkpoints_equal_those_of_one_cpu_rank(tmp_path, tied):
    path = build_model(tmp_path / "model", family="starcoder2", tied=tied)
    one = run_here((whole_job, make_config(path, **CHANGES), (tmp_path / "one",)))
    config = make_config(path, device="cuda", **CHANGES)
    (two, resumed) = run_ranks(
        [(whole_job, config, (tmp_path / "two",)), (resume_job, config, (tmp_path / "two",))],
        num_ranks=2,
        folder=tmp_path / "results",
    )
    for rank in two:
        for batch in BATCHES:
            gradient = {name: tensor.cpu() for name, tensor in rank[f"gradient_{batch}"].items()}
            assert relative_error(gradient, one[f"gradient_{batch}"]) < 1e-11
            assert rank[f"metrics_{batch}"] == pytest.approx(one[f"metrics_{batch}"], rel=1e-9)
        weights = {name: tensor.cpu() for name, tensor in rank["weights_3"].items()}
        assert relative_error(weights, one["weights_3"]) < 1e-8
    assert relative_error({n: t.cpu() for n, t in resumed[0].items()}, weights) < 1e-12
