"""Two ranks over NCCL compute what one rank computes, and reduce beside it. Run by hand on a machine with two GPUs."""

from __future__ import annotations

import pytest
import torch
from tests.integration.trainer.test_gathering import settings_job
from tests.integration.trainer.test_two_ranks import BATCHES, CHANGES, resume_job, whole_job
from tests.integration.trainer.trainer_cases import Job, build_model, make_config, relative_error, run_here, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_weights_and_checkpoints_equal_those_of_one_rank(tmp_path, tied):
    path = build_model(tmp_path / "model", family="starcoder2", tied=tied)
    on_cpu = run_here((whole_job, make_config(path, **CHANGES), (tmp_path / "cpu",)))
    config = make_config(path, device="cuda", **CHANGES)
    ((one,),) = run_ranks([(whole_job, config, (tmp_path / "one",))], num_ranks=1, folder=tmp_path / "results_one")
    (two, resumed) = run_ranks(
        [(whole_job, config, (tmp_path / "two",)), (resume_job, config, (tmp_path / "two",))],
        num_ranks=2,
        folder=tmp_path / "results_two",
    )
    for batch in BATCHES:
        for rank in two:
            assert relative_error(rank[f"gradient_{batch}"], one[f"gradient_{batch}"]) < 1e-12
            assert rank[f"metrics_{batch}"] == pytest.approx(one[f"metrics_{batch}"], rel=1e-11)
        # Rotary angles are float32, and their cosines are rounded differently on the two devices.
        assert relative_error(one[f"gradient_{batch}"], on_cpu[f"gradient_{batch}"]) < 1e-6
    assert relative_error(two[0]["weights_3"], one["weights_3"]) < 1e-10
    assert relative_error(resumed[0], two[0]["weights_3"]) < 1e-12


@pytest.mark.parametrize("tied", [True, False])
def test_when_weights_are_gathered_changes_no_gradient_and_no_weight(tmp_path, tied):
    path = build_model(tmp_path / "model", family="starcoder2", tied=tied, num_hidden_layers=4)
    settings = [(True, 0), (True, 1), (True, 3), (False, 1)]
    jobs: list[Job] = [
        (
            settings_job,
            make_config(path, device="cuda", fsdp_reshard_after_forward=reshard, fsdp_prefetch_layers=prefetch),
            (),
        )
        for reshard, prefetch in settings
    ]
    plain, *others = run_ranks(jobs, num_ranks=2, folder=tmp_path / "results")
    for ranks in others:
        for rank in ranks:
            assert relative_error(rank["gradient"], plain[0]["gradient"]) < 1e-13
            assert relative_error(rank["weights"], plain[0]["weights"]) < 1e-11
            assert rank["gathered_after"] == 0
    assert others[1][0]["ahead"]["backward"] == [3] * 6


def test_gradients_are_reduced_beside_the_backward_pass(tmp_path):
    path = build_model(tmp_path / "model", family="starcoder2")
    config = make_config(path, device="cuda")
    ((first, second),) = run_ranks([(whole_job, config, (tmp_path / "two",))], num_ranks=2, folder=tmp_path / "results")
    for rank in (first, second):
        backward = [span for span in rank["spans"] if span.name == "backward"]
        reductions = [span for span in rank["spans"] if span.name == "gradient_reduction"]
        assert len(reductions) >= len(backward)
        for reduction in reductions:
            assert any(b.start <= reduction.start and reduction.end <= b.end + 1e-4 for b in backward)
