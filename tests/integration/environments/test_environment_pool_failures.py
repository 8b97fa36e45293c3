"""The pool with user code that raises, hangs, crashes, and exhausts memory."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio

from telescope.environments.types import EnvironmentSpec
from telescope.errors import EnvironmentFailure, InfrastructureError
from telescope.rollout.rendering import RendererSpec
from telescope.rollout.worker_pool.pool import EnvironmentPool

pytestmark = pytest.mark.asyncio(loop_scope="session")
FINE = "fine"


async def do(pool, encode, deed, index=0):
    return (await pool.advance("hostile", index, encode(deed), "stop")).reward


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended before the file was opened or read
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("raise_error 5", r"item 9: compute_reward failed: ValueError: no luck with 5 \(environment.py:\d+\)"),
        ("exit", "SystemExit"),
        ("exit_later", "user code raised SystemExit"),
        ("wrong_type", "returned float 1.0, not a RewardResult"),
        ("wrong_metric", r"sample_metrics\['rank'\] is str 'first', not a number"),
        ("number nan", "total_reward is nan"),
        ("number inf", "total_reward is inf"),
        ("raise_what_cannot_be_printed", r"Unprintable: \(its __str__ raises RuntimeError\)"),
        ("say_a_lot", r"the environment's result has \d+ bytes; the limit is"),
    ],
)
async def test_a_failing_reward_fails_its_sample_and_spares_its_process(make_pool, encode, deed, words):
    pool = await make_pool("hostile")
    before = await do(pool, encode, FINE)
    with pytest.raises(EnvironmentFailure, match=words):
        await do(pool, encode, deed, index=9)
    assert (await do(pool, encode, FINE)).sample_metrics == before.sample_metrics
    assert pool.status().restarts == 0


@pytest.mark.parametrize(
    ("deed", "words"), [("end", "exit code 7"), ("crash", "SIGSEGV"), ("leave_a_child 3600", "exit code 0")]
)
async def test_a_reward_that_ends_its_process_is_the_only_one_to_fail(make_pool, encode, deed, words):
    pool = await make_pool("hostile")
    bystanders = [asyncio.ensure_future(do(pool, encode, "wait 0.3")) for _ in range(3)]
    bystanders += [asyncio.ensure_future(do(pool, encode, FINE)) for _ in range(30)]
    await asyncio.sleep(0)
    culprit = asyncio.ensure_future(do(pool, encode, deed))
    bystanders += [asyncio.ensure_future(do(pool, encode, FINE)) for _ in range(30)]
    with pytest.raises(EnvironmentFailure, match=words):
        await culprit
    assert [reward.total_reward for reward in await asyncio.gather(*bystanders)] == [1.0] * 63
    assert pool.status().restarts == 1


@pytest.mark.parametrize("deed", ["sleep 3600", "hold_the_interpreter", "block_in_a_task 3600"])
async def test_a_reward_that_never_returns_fails_alone_and_its_process_is_replaced(make_pool, encode, deed):
    pool = await make_pool("hostile", timeout_seconds=3.0)
    before = (await do(pool, encode, FINE)).sample_metrics["pid"]
    waiting = [asyncio.ensure_future(do(pool, encode, "wait 1.2")) for _ in range(3)]
    await asyncio.sleep(0.1)
    culprit = asyncio.ensure_future(do(pool, encode, deed))
    queued = [asyncio.ensure_future(do(pool, encode, FINE)) for _ in range(5)]
    with pytest.raises(EnvironmentFailure, match="did not end within 3 seconds"):
        await culprit
    rewards = await asyncio.gather(*waiting, *queued)
    assert {reward.total_reward for reward in rewards} == {1.0}
    assert all(reward.sample_metrics["pid"] != before for reward in rewards[:3])
    assert (pool.status().restarts, pool.status().deadlines_passed) == (1, 1)
    await eventually(lambda: not is_running(int(before)))


async def test_an_awaiting_reward_that_exceeds_its_deadline_is_cancelled_without_a_kill(make_pool, encode):
    pool = await make_pool("hostile", timeout_seconds=0.6)
    before = (await do(pool, encode, FINE)).sample_metrics
    with pytest.raises(EnvironmentFailure, match="did not end within"):
        await do(pool, encode, "wait 3600")
    await eventually(lambda: pool.status().calls_in_workers == 0)
    assert (await do(pool, encode, FINE)).sample_metrics == before


async def test_an_awaiting_reward_that_resists_cancellation_is_killed(make_pool, encode):
    pool = await make_pool("hostile", timeout_seconds=0.3)
    before = (await do(pool, encode, FINE)).sample_metrics
    with pytest.raises(EnvironmentFailure, match="did not end within"):
        await do(pool, encode, "wait_whatever_happens")
    await eventually(lambda: pool.status().restarts == 1)
    assert (await do(pool, encode, FINE)).sample_metrics != before


async def test_a_deadline_kills_one_process_and_no_other(make_pool, encode):
    pool = await make_pool("hostile", num_workers=2, timeout_seconds=0.8)
    pids = {(await do(pool, encode, "sleep 0.1")).sample_metrics["pid"] for _ in range(1)}
    rewards = await asyncio.gather(*(do(pool, encode, "sleep 0.1") for _ in range(6)))
    pids |= {reward.sample_metrics["pid"] for reward in rewards}
    assert len(pids) == 2
    with pytest.raises(EnvironmentFailure):
        await do(pool, encode, "sleep 3600")
    await eventually(lambda: sum(is_running(int(pid)) for pid in pids) == 1)


async def test_a_slow_reward_does_not_delay_the_others(make_pool, encode):
    """The slow call starts first and ends last, and the event loop stays free."""
    pool = await make_pool("hostile", num_workers=2)
    await asyncio.gather(*(do(pool, encode, FINE) for _ in range(200)))  # so cheap that calls are sent ahead
    order = []
    slow = asyncio.ensure_future(do(pool, encode, "sleep 1.5"))
    slow.add_done_callback(lambda _: order.append("slow"))
    fast = [asyncio.ensure_future(do(pool, encode, FINE)) for _ in range(100)]
    for task in fast:
        task.add_done_callback(lambda _: order.append("fast"))
    await asyncio.gather(slow, *fast)
    assert order == ["fast"] * 100 + ["slow"]


async def test_waiting_rewards_of_one_process_wait_together(make_pool, encode):
    pool = await make_pool("hostile", timeout_seconds=5.0)
    rewards = await asyncio.gather(*(do(pool, encode, "wait 1") for _ in range(100)))  # 100 s one after the other
    assert len(rewards) == 100


async def test_a_reward_may_run_an_event_loop_of_its_own(make_pool, encode):
    pool = await make_pool("hostile")
    assert (await do(pool, encode, "run_a_loop")).total_reward == 1.0
    assert (await do(pool, encode, "wait 0.01")).total_reward == 1.0


@pytest.mark.parametrize("deed", ["fork_and_raise", "fork_and_return", "fork_and_wait"])
async def test_a_copy_forked_by_user_code_never_answers(make_pool, encode, deed):
    """The copy has the same socket, and could read requests of the worker."""
    pool = await make_pool("hostile")
    pids = {(await do(pool, encode, what)).sample_metrics["pid"] for what in (deed, *[FINE] * 20)}
    assert pids == set(pool.status().pids)
    assert pool.status().restarts == 0


async def test_memory_is_bounded_and_the_process_continues(make_pool, encode):
    pool = await make_pool("hostile", memory_limit_bytes=256 * 2**20)
    with pytest.raises(EnvironmentFailure, match="MemoryError"):
        await do(pool, encode, "gorge")
    assert (await do(pool, encode, FINE)).total_reward == 1.0


async def test_output_of_user_code_goes_to_the_log_and_not_to_the_answers(make_pool, encode, tmp_path):
    pool = await make_pool("hostile")
    assert (await do(pool, encode, "print")).total_reward == 1.0
    assert (await do(pool, encode, FINE)).total_reward == 1.0
    log = (tmp_path / "logs-0" / "environment-0.log").read_bytes()
    assert b"no newline" in log
    assert b"from a child" in log


async def test_the_log_of_a_reward_that_prints_without_end_stays_bounded(make_pool, encode, tmp_path, monkeypatch):
    monkeypatch.setattr("telescope.rollout.worker_pool.worker_handle.MAX_LOG_BYTES", 2**20)
    monkeypatch.setattr("telescope.rollout.worker_pool.worker_handle.LOG_CHECK_SECONDS", 0.01)
    pool = await make_pool("hostile")
    await do(pool, encode, "print_without_end 50")
    log = tmp_path / "logs-0" / "environment-0.log"
    await eventually(lambda: log.stat().st_size <= 2**20)
    assert log.with_name("environment-0.log.1").stat().st_size == 2**20


async def test_the_stack_of_a_hanging_reward_is_in_the_log(make_pool, encode, tmp_path):
    pool = await make_pool("hostile", timeout_seconds=0.3)
    with pytest.raises(EnvironmentFailure, match=r"environment-0\.log"):
        await do(pool, encode, "sleep 3600")
    await eventually(lambda: b"in sleep" in (tmp_path / "logs-0" / "environment-0.log").read_bytes())


async def test_workers_are_replaced_when_the_log_folder_is_gone(make_pool, encode, tmp_path):
    pool = await make_pool("hostile")
    shutil.rmtree(tmp_path / "logs-0")
    (tmp_path / "logs-0").write_text("in the way")
    with pytest.raises(EnvironmentFailure, match="exit code 7; its log is empty"):
        await do(pool, encode, "end")
    assert (await do(pool, encode, FINE)).total_reward == 1.0


async def test_close_ends_processes_that_are_busy_and_fails_their_calls(make_pool, encode):
    pool = await make_pool("hostile", num_workers=2)
    pids = [(await do(pool, encode, FINE)).sample_metrics["pid"]]
    calls = [asyncio.ensure_future(do(pool, encode, "hold_the_interpreter")) for _ in range(3)]
    await asyncio.sleep(0.2)
    await asyncio.wait_for(pool.close(), 10)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, InfrastructureError)
    assert not is_running(int(pids[0]))
    with pytest.raises(InfrastructureError, match="closed"):
        await do(pool, encode, FINE)


PARENT = """
import asyncio, sys
from pathlib import Path
from telescope.rollout.worker_pool.pool import EnvironmentPool
from telescope.environments.types import EnvironmentSpec
from telescope.rollout.rendering import RendererSpec

async def main():
    spec = EnvironmentSpec("echo", {"hold_at": 900})
    pool = EnvironmentPool(
        [spec], renderer=None, num_workers=2, environments_path=[sys.argv[1]], log_dir=Path(sys.argv[3])
    )
    await pool.start()
    print(*pool.status().pids, flush=True)
    await pool.identities("echo", int(sys.argv[2]), int(sys.argv[2]) + 1)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("index", [0, 900], ids=["idle", "in code that holds the interpreter"])
async def test_workers_end_with_their_parent(index, tmp_path):
    parent = start_parent(index, tmp_path)
    pids = [int(pid) for pid in (await asyncio.to_thread(parent.stdout.readline)).split()]
    assert [is_running(pid) for pid in pids] == [True, True]
    await asyncio.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await eventually(lambda: not any(is_running(pid) for pid in pids))
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def start_parent(index, folder):
    """Starts a process with a pool. Its temporary files go to `folder`, beside its logs."""
    arguments = [str(Path(__file__).parent / "environments_for_tests"), str(index), str(folder / "logs")]
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )


@pytest.mark.parametrize("deed", ["wait 2", "sleep 2"])
async def test_the_call_of_a_worker_that_is_killed_from_outside_runs_again(make_pool, encode, deed):
    pool = await make_pool("hostile")
    waiting = asyncio.ensure_future(do(pool, encode, deed))
    await eventually(lambda: pool.status().calls_in_workers == 1)
    await asyncio.sleep(0.2)
    (pid,) = pool.status().pids
    os.kill(pid, 9)
    assert (await waiting).sample_metrics["pid"] != pid
    assert pool.status().restarts == 1


async def test_a_call_whose_worker_is_killed_every_time_fails(make_pool, encode):
    """The OOM killer uses the same signal."""
    pool = await make_pool("hostile")
    with pytest.raises(EnvironmentFailure, match="failed: its process ended 3 times while it ran"):
        await do(pool, encode, "kill_itself")


@pytest_asyncio.fixture(loop_scope="session")
async def make_own_pool(tmp_path):
    """Starts pools with their own fork server, which a test may kill."""
    pools = []

    async def make(spec, **options):
        folder = Path(__file__).parent / "environments_for_tests"
        pools.append(
            EnvironmentPool([spec], num_workers=2, environments_path=[folder], log_dir=tmp_path / "logs", **options)
        )
        await pools[-1].start()
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


def fork_server_of(pool) -> int:
    return parent_of(pool.status().pids[0])


async def test_a_fork_server_that_is_killed_is_replaced_and_every_call_runs_again(
    make_own_pool, tokenizer_path, encode, caplog
):
    pool = await make_own_pool(EnvironmentSpec("hostile"), renderer=RendererSpec(tokenizer_path))
    child = int((await do(pool, encode, "start_a_child 3600")).sample_metrics["child"])
    calls = [asyncio.ensure_future(do(pool, encode, deed)) for deed in ("wait 1", "sleep 1", "sleep 1", *[FINE] * 20)]
    await eventually(lambda: pool.status().calls_in_workers >= 3)
    first, pids = fork_server_of(pool), pool.status().pids
    os.kill(first, 9)
    rewards = await asyncio.gather(*calls)
    assert [reward.total_reward for reward in rewards] == [1.0] * 23
    assert not {int(reward.sample_metrics["pid"]) for reward in rewards[:3]} & set(pids)
    assert not any(is_running(pid) for pid in (first, child, *pids))
    assert "killed by SIGKILL; restarting it" in caplog.text
    assert pool.status().restarts == 2


async def test_a_call_that_kills_the_fork_server_fails(make_own_pool):
    pool = await make_own_pool(EnvironmentSpec("echo", {"kill_parent_at": 900}), renderer=None)
    with pytest.raises(EnvironmentFailure, match="its process ended 3 times while it ran"):
        await pool.identities("echo", 900, 901)
    assert len(await pool.identities("echo", 0, 10)) == 10


async def test_calls_fail_with_the_reason_when_the_fork_server_keeps_ending(make_own_pool, monkeypatch):
    pool = await make_own_pool(EnvironmentSpec("echo"), renderer=None)
    monkeypatch.setattr("telescope.rollout.worker_pool.launcher.MAX_RESTARTS", 1)
    os.kill(fork_server_of(pool), 9)
    await eventually(lambda: pool.status().restarts == 2 and pool.status().workers_ready == 2, seconds=60)
    pids = pool.status().pids
    os.kill(fork_server_of(pool), 9)
    await eventually(lambda: pool.status().workers_ready == 0)
    with pytest.raises(InfrastructureError, match="forked from was killed by SIGKILL after 1 restarts"):
        await pool.identities("echo")
    await eventually(lambda: not any(is_running(pid) for pid in pids))


async def test_a_process_that_left_its_worker_ends_with_the_pool(make_own_pool, tokenizer_path, encode, tmp_path):
    pool = await make_own_pool(EnvironmentSpec("hostile"), renderer=RendererSpec(tokenizer_path))
    await do(pool, encode, f"double_fork {tmp_path}")
    daemon = int((tmp_path / "pid").read_text())
    assert is_running(daemon)
    await pool.close()
    assert not is_running(daemon)


async def test_the_driver_never_imports_user_code(make_pool, encode):
    pool = await make_pool("hostile")
    reward = await do(pool, encode, FINE)
    assert reward.sample_metrics["pid"] != os.getpid()
    assert not any("hostile" in name for name in sys.modules)
