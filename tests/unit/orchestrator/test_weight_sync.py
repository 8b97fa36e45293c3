"""The order of a weight sync, the isolation of failing servers, and the verification of weights."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.orchestrator.weight_sync_bench import BACKGROUND_STAGES, STAGES, Bench, FakeClient

from telescope.errors import InfrastructureError
from telescope.orchestrator.run_components import record_sync
from telescope.orchestrator.weight_sync import ServerSync, SyncReport, WeightMismatch, _remove_all_but
from telescope.utils.timeline import Span
from telescope.weights.plan import to_hex


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_sync_reports_the_times_of_servers_and_trainer(bench):
    bench.trainer.spans = [Span("weight_broadcast_gather", 1.0, 2.0, rank=1)]
    before = time.time()
    await bench.step()
    (report,) = bench.reports
    assert report.trainer_spans == bench.trainer.spans
    for part in report.servers:
        assert before - 1e-3 <= part.paused_at <= part.transfer_started_at
        assert part.transfer_started_at + part.transfer_seconds <= part.resumed_at + 1e-3


def test_a_sync_is_on_record_as_pauses_transfers_and_the_work_of_the_ranks():
    rows: list[dict[str, Any]] = []
    directory: Any = SimpleNamespace(recorder=SimpleNamespace(write=lambda table, row: rows.append(row)))
    part = ServerSync(1, 10.0, paused_at=13.0, resumed_at=13.5, transfer_started_at=11.0, transfer_seconds=2.0)
    failed = ServerSync(2, 10.0, failure="gone")
    gather = Span("weight_broadcast_gather", 11.0, 12.0, rank=3)
    record_sync(directory, SyncReport(8, 10.0, ended_at=14.0, servers=[part, failed], trainer_spans=[gather]))
    assert [(row["name"], row.get("server"), row.get("rank"), row["start"], row["end"]) for row in rows] == [
        ("weight_sync", 1, None, 13.0, 13.5), ("weight_transfer", 1, None, 11.0, 13.0),
        ("weight_sync", 2, None, 10.0, 14.0), ("weight_broadcast_gather", None, 3, 11.0, 12.0),
    ]  # fmt: skip
    assert {row["step"] for row in rows} == {7}
    assert rows[2]["attributes"]["failure"] == "gone"


async def test_each_server_is_paused_updated_counted_and_resumed_in_this_order(bench):
    metrics = await bench.step()
    for server in (0, 1):
        assert bench.of(server) == STAGES
    assert ("finish", 0, 1) in bench.calls, "the engine counts the version that the trainer has"
    assert not any(client.paused for client in bench.clients)
    assert bench.trainer.sent == [(1, [0, 1], True)]
    assert metrics["weight_sync/servers"] == 2
    assert metrics["weight_sync/bytes"] > 0
    for name in ("timing_weight_sync_trainer_total", "timing_weight_sync_inference_total"):
        assert metrics[name] >= 0
    assert {"weight_sync/pause_seconds/server_1", "weight_sync/transfer_seconds/server_0"} <= set(metrics)
    assert [report.updated_servers for report in bench.reports] == [[0, 1]]
    probes = bench.weights.last_probe
    assert {server: (probe.ok, probe.num_tensors) for server, probe in probes.items()} == {0: (True, 2), 1: (True, 2)}


async def test_a_connection_is_opened_once_and_again_to_ranks_that_were_replaced(bench):
    for _ in range(2):
        await bench.step()
    assert bench.of(0) == STAGES + STAGES[1:]
    assert [call for call in bench.calls if call[0] == "metadata"] == [("metadata",)]
    bench.trainer.num_replacements += 1
    await bench.step()
    assert bench.of(0).count("init") == 2


@pytest.mark.parametrize(("inflight", "drops"), [("keep", False), ("recompute", True)])
async def test_caches_are_dropped_at_a_swap_only_if_so_configured(inflight, drops):
    bench = Bench(fields={"inflight_kv": inflight})
    await bench.step()
    assert ("pause", 0, "keep", drops) in bench.calls


@pytest.mark.parametrize("stage", STAGES)
async def test_a_server_that_fails_at_any_stage_is_left_out_and_the_other_finishes(bench, stage):
    bench.clients[0].fails_at = stage
    metrics = await bench.step()
    assert bench.of(0) == STAGES[: STAGES.index(stage) + 1], "it receives no further calls"
    assert bench.of(1) == STAGES
    assert [server for server, _ in bench.failures] == [0]
    assert stage in bench.failures[0][1]
    assert ("abort", 0) in bench.calls or stage != "receive", "its sender is notified"
    assert ("abort", 1) not in bench.calls
    assert bench.reports[0].updated_servers == [1]
    assert metrics["weight_sync/servers"] == 1
    assert "weight_sync/pause_seconds/server_0" not in metrics
    await bench.step()
    assert bench.trainer.sent[-1][1] == [1]


async def test_a_server_that_receives_in_the_background_is_paused_for_the_swap_alone(bench):
    bench.clients[0].background = True
    metrics = await bench.step()
    assert bench.of(0) == BACKGROUND_STAGES
    assert bench.of(1) == STAGES, "servers are independent"
    assert [server.background for server in bench.reports[0].servers] == [True, False]
    assert metrics["weight_sync/background"] == 1
    assert metrics["weight_sync/transfer_seconds/server_0"] == 0.25, "as its sender saw it"
    assert bench.calls.index(("send", (0, 1))) < bench.calls.index(("pause", 0, "keep", False))
    await bench.step()
    assert bench.of(0) == BACKGROUND_STAGES + BACKGROUND_STAGES[1:]
    assert len([call for call in bench.calls if call == ("mode", 0)]) == 1, "called once per connection"


@pytest.mark.parametrize("stage", BACKGROUND_STAGES)
async def test_a_server_that_fails_in_a_background_sync_does_not_affect_others(bench, stage):
    for client in bench.clients:
        client.background = True
    bench.clients[0].fails_at = stage
    await bench.step()
    assert bench.of(0) == BACKGROUND_STAGES[: BACKGROUND_STAGES.index(stage) + 1]
    assert bench.of(1) == BACKGROUND_STAGES
    assert bench.reports[0].updated_servers == [1]
    assert ("abort", 0) in bench.calls or stage != "begin", "its sender is not blocked"


async def test_an_overlapped_transfer_that_failed_pauses_and_changes_nothing(bench):
    bench.clients[0].background = True
    bench.trainer.engine_errors = {0: "the process of rank 1 is gone"}
    await bench.step()
    assert bench.of(0) == ["init", "begin"]
    assert bench.reports[0].updated_servers == [1]


async def test_weight_transfer_in_place_is_never_overlapped():
    bench = Bench(fields={"weight_transfer": "in_place"})
    bench.clients[0].background = True
    await bench.step()
    assert bench.of(0) == STAGES
    assert ("mode", 0) in bench.calls, "the call ends an update that failed"


async def test_a_connecting_sender_is_notified_when_the_engine_fails(bench):
    bench.trainer.connecting = asyncio.Event()
    bench.clients[0].fails_at = "init"
    step = asyncio.create_task(bench.step())
    for _ in range(100):  # iterations of the loop, not time: the machine may be busy
        await asyncio.sleep(0)
    assert ("abort", 0) in bench.calls and ("abort", 1) not in bench.calls
    bench.trainer.connecting.set()
    await step
    assert bench.reports[0].updated_servers == [1]


async def test_versions_before_and_after_a_trainer_restart_are_distinct(bench):
    await bench.step()  # both servers have version 1
    bench.up = [0]
    bench.trainer.version, bench.trainer.num_restarts = 0, 1
    await bench.step()  # version 1 of another training, which server 1 did not get
    await bench.weights.sync_one(1, lambda: None, fresh=False)
    assert bench.trainer.sent[-1][:2] == (1, [1])


@pytest.mark.parametrize("hangs_at", [None, "receive", "begin"])
async def test_an_aborted_transfer_drops_its_server_which_is_not_waited_for(bench, hangs_at):
    bench.clients[1].background = hangs_at == "begin"
    bench.clients[1].hangs_at = hangs_at
    bench.trainer.engine_errors = {1: "no answer within 300 s"}
    await bench.step()
    assert bench.failures == [(1, "no answer within 300 s")]
    assert "finish" not in bench.of(1)
    assert bench.of(0) == STAGES


async def test_a_failed_trainer_ends_the_sync_while_engines_wait(bench):
    bench.clients[0].hangs_at = "receive"
    bench.trainer.send_error = ArithmeticError("a rank broke")
    with pytest.raises(ArithmeticError, match="a rank broke"):
        await bench.step()
    assert not bench.trainer.queue.locked()


async def test_a_sync_without_servers_does_no_harm(bench):
    bench.up = []
    metrics = await bench.step()
    assert metrics["weight_sync/servers"] == 0


async def test_the_trainer_runs_no_other_command_during_a_sync(bench):
    seen: list[int] = []

    async def rank_command() -> None:
        async with bench.trainer.queue:
            seen.append(len(bench.calls))

    sync = asyncio.create_task(bench.step())
    await asyncio.sleep(0)
    await asyncio.gather(sync, rank_command())
    assert seen == [len(bench.calls)]
    assert bench.calls[-1][0] == "engine logprobs", "the probe is part of the sync"


@pytest.mark.parametrize(("every", "probed"), [(2, [0, 2, 4]), (1, [0, 1, 2, 3, 4]), (0, [0])])
async def test_weights_are_verified_at_the_first_sync_and_at_intervals(every, probed):
    bench = Bench(fields={"weight_probe_every": every})
    seen = []
    for step in range(5):
        before = len(bench.calls)
        await bench.step()
        if any(call[0] == "fingerprints" for call in bench.calls[before:]):
            seen.append(step)
        assert bench.trainer.sent[-1][2] == (step in seen), "fingerprints are computed for a probe only"
    assert seen == probed


def hold_another_tensor(client: FakeClient) -> None:
    client.loaded["tensors"]["lm_head"][0]["fingerprint"] = to_hex(0xCC)


def hold_one_less(client: FakeClient) -> None:
    del client.loaded["tensors"]["lm_head"]


@pytest.mark.parametrize("fault", [hold_another_tensor, hold_one_less])
async def test_a_tensor_that_differs_from_the_sent_one_ends_the_run_with_its_name(bench, fault):
    fault(bench.clients[1])
    with pytest.raises(WeightMismatch, match=r"server 1 has not loaded .*version 1 .*lm_head"):
        await bench.step()


async def test_differing_logprobs_end_the_run_even_with_equal_tensors():
    bench = Bench(fields={"mixed_precision_dtype": None})
    bench.clients[0].logprobs = [-1.0, -2.1, -0.5]
    with pytest.raises(WeightMismatch, match=r"has the weights of .* tokens differ by 0\.1 .*learning_rate"):
        await bench.step()


async def test_an_engine_may_differ_by_the_rounding_of_the_trainer():
    bench = Bench(fields={"inference_dtype": "float32", "mixed_precision_dtype": "bfloat16"})
    bench.clients[0].logprobs = [-1.0, -2.1, -0.5]
    await bench.step()


async def test_the_first_weights_are_compared_on_every_server_and_not_sent(bench):
    await bench.weights.verify_initial()
    assert bench.trainer.sent == [(0, [], True)]
    read = [call for call in bench.calls if call[0] == "fingerprints"]
    assert [call[1] for call in read] == [0, 1]
    assert read[0][2].names == ["embed", "lm_head"], "the tensors that a sync would send"
    assert not bench.of(0), "no server was connected or paused"


async def test_a_server_that_loaded_other_weights_than_the_trainer_ends_the_run_before_it_starts(bench):
    bench.clients[1].loaded["tensors"]["lm_head"][0]["fingerprint"] = to_hex(7)
    with pytest.raises(WeightMismatch, match=r"server 1 has not loaded .*version 0 .*starts from: .*lm_head"):
        await bench.weights.verify_initial()


async def test_an_engine_that_keeps_more_digits_than_the_trainer_is_sent_the_first_weights():
    bench = Bench(fields={"model_dtype": "bfloat16", "inference_dtype": "float32"})
    await bench.weights.verify_initial()
    assert bench.trainer.sent == [(0, [0, 1], True)]
    assert bench.of(1) == STAGES


async def test_a_restarted_server_gets_the_trainers_version_and_is_opened_inside_the_queue(bench):
    await bench.step()
    await bench.step()
    del bench.calls[:]
    loaded = []
    await bench.weights.sync_one(0, lambda: loaded.append(bench.trainer.queue.locked()), fresh=True)
    assert loaded == [True], "no other sync can begin before the server is open"
    assert bench.of(0) == STAGES, "a new process needs a new connection"
    assert ("finish", 0, 2) in bench.calls
    assert bench.of(1) == []
    assert ("fingerprints", 0) in bench.calls, "the received weights are verified"


async def test_a_server_with_the_newest_weights_is_sent_nothing(bench):
    await bench.step()
    del bench.calls[:]
    loaded: list[bool] = []
    await bench.weights.sync_one(1, lambda: loaded.append(True), fresh=False)
    assert loaded == [True]
    assert bench.calls == []
    bench.up = [0]
    await bench.step()
    await bench.weights.sync_one(1, lambda: loaded.append(True), fresh=False)
    assert bench.of(1) == STAGES[1:], "it missed a sync"


async def test_a_server_with_the_newest_weights_is_opened_during_a_training_step(bench):
    await bench.step()
    async with bench.trainer.queue, asyncio.timeout(5):  # a step holds it
        loaded: list[bool] = []
        await bench.weights.sync_one(1, lambda: loaded.append(True), fresh=False)
        assert loaded
        restarted = asyncio.create_task(bench.weights.sync_one(0, lambda: None, fresh=True))
        await asyncio.sleep(0.01)
        assert not restarted.done(), "it has no weights"
    await restarted


async def test_servers_have_the_initial_weights_before_the_first_step(bench):
    await bench.weights.sync_one(0, lambda: None, fresh=False)
    assert bench.calls == []
    await bench.weights.sync_one(0, lambda: None, fresh=True)
    assert ("finish", 0, 0) in bench.calls


@pytest.mark.parametrize("stage", [*STAGES, "fingerprints", "engine logprobs"])
async def test_a_server_that_fails_again_is_not_opened(bench, stage):
    bench.clients[0].fails_at = stage
    loaded: list[bool] = []
    with pytest.raises(InfrastructureError, match=stage):
        await bench.weights.sync_one(0, lambda: loaded.append(True), fresh=True)
    assert not loaded
    bench.clients[0].fails_at = None
    del bench.calls[:]
    await bench.weights.sync_one(0, lambda: loaded.append(True), fresh=False)
    assert loaded
    assert "receive" in bench.of(0), "weights that may be missing are sent again"


async def test_a_server_that_exits_during_its_probe_is_verified_before_it_serves_again(bench):
    bench.clients[0].fails_at = "engine logprobs"
    await bench.step()
    assert [server for server, _ in bench.failures] == [0]
    bench.clients[0].fails_at = None
    del bench.calls[:]
    await bench.weights.sync_one(0, lambda: None, fresh=False)
    assert ("fingerprints", 0) in bench.calls


async def test_a_requested_probe_returns_its_report_and_does_not_end_the_run():
    bench = Bench(fields={"weight_probe_every": 0})
    await bench.step()
    assert all(probe.ok for probe in (await bench.weights.verify()).values())
    bench.clients[1].loaded["tensors"]["lm_head"][0]["fingerprint"] = to_hex(1)
    probes = await bench.weights.verify(corrupt="lm_head")
    assert bench.trainer.corrupted == [None, None, "lm_head"]
    assert probes[0].ok
    assert list(probes[1].mismatched) == ["lm_head"]
    assert bench.up == [0, 1]


async def test_a_server_that_fails_during_a_requested_probe_has_no_verdict(bench):
    bench.clients[0].fails_at = "receive"
    assert list(await bench.weights.verify()) == [1]
    assert bench.up == [1]


def test_an_earlier_adapter_that_cannot_be_removed_does_not_end_the_run(tmp_path):
    for name in ("2-0", "1-0"):
        (tmp_path / name).mkdir()
    (tmp_path / ".nfs0001").touch()  # stands for what NFS keeps
    _remove_all_but(tmp_path / "2-0")
    assert {path.name for path in tmp_path.iterdir()} == {"2-0", ".nfs0001"}
