"""The suite for machines with GPUs: who has which GPU when, what is skipped, and what becomes of a part that hangs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.repository_modules import load_script


@pytest.fixture(scope="module")
def suite() -> Iterator[ModuleType]:
    with load_script("gpu_suite") as module:
        yield module


WRITE = (
    "import json, os, time; start = time.time(); time.sleep({sleep}); json.dump(dict(start=start, end=time.time(), "
    "gpus=os.environ['CUDA_VISIBLE_DEVICES'], port={{port}}), open('{{json}}', 'w'))"
)


def part(suite: ModuleType, name: str, num_gpus: int, seconds: int = 30, sleep: float = 0.5):
    return suite.Part(name, f'{sys.executable} -c "{WRITE.format(sleep=sleep)}"', num_gpus, seconds)


def run(suite: ModuleType, folder: Path, parts, gpus=("0", "1", "2", "3"), seconds=60.0, **options):
    made = suite.Suite(parts, gpus, folder, seconds, **options)
    try:
        return {part.name: result for part, result in made.results()}
    finally:
        made.stop()


def at_once(one: dict, other: dict) -> bool:
    return one["start"] < other["end"] and other["start"] < one["end"]


def test_parts_run_side_by_side_and_never_on_one_gpu(suite: ModuleType, tmp_path: Path) -> None:
    # The first two sleep long enough to overlap also when one starts late.
    gpus_and_seconds = ((2, 2.0), (1, 2.0), (1, 0.5), (4, 0.5), (3, 0.5), (1, 0.5))
    parts = [part(suite, f"part {n}", num_gpus, sleep=sleep) for n, (num_gpus, sleep) in enumerate(gpus_and_seconds)]
    done = run(suite, tmp_path, parts)
    assert {result["outcome"] for result in done.values()} == {"passed"}
    results = [done[p.name]["results"] for p in parts]
    for n, one in enumerate(results):
        assert len(one["gpus"].split(",")) == parts[n].num_gpus
        for other in results[n + 1 :]:
            assert one["port"] != other["port"]
            if at_once(one, other):
                assert not set(one["gpus"].split(",")) & set(other["gpus"].split(","))
    assert at_once(results[0], results[1])


def test_one_at_a_time_runs_no_two_parts_together(suite: ModuleType, tmp_path: Path) -> None:
    parts = [part(suite, f"part {n}", 1, sleep=0.1) for n in range(3)]
    results = [r["results"] for r in run(suite, tmp_path, parts, one_at_a_time=True).values()]
    assert not any(at_once(one, other) for n, one in enumerate(results) for other in results[n + 1 :])


def test_a_small_part_precedes_a_waiting_large_one_only_if_it_ends_in_time(suite: ModuleType, tmp_path: Path) -> None:
    parts = [
        part(suite, "first", 2, seconds=30, sleep=1.5),
        part(suite, "large", 4, sleep=0.1),
        part(suite, "long", 1, seconds=40, sleep=0.1),
        part(suite, "short", 1, seconds=20, sleep=0.1),
    ]
    done = {name: result["results"] for name, result in run(suite, tmp_path, parts).items()}
    assert done["short"]["start"] < done["first"]["end"] <= done["large"]["start"]
    assert done["long"]["start"] >= done["large"]["end"]


def test_parts_without_enough_gpus_or_time_are_reported_as_skipped(suite: ModuleType, tmp_path: Path) -> None:
    parts = [part(suite, "wide", 8), part(suite, "long", 1, seconds=600), part(suite, "small", 1, sleep=0.0)]
    done = run(suite, tmp_path, parts)
    assert done["wide"]["outcome"] == "skipped: needs 8 GPUs, this machine has 4"
    assert done["long"]["outcome"].startswith("skipped: may take 600 s, ")
    assert done["small"]["outcome"] == "passed"


def test_a_hanging_part_is_killed_with_its_children_and_frees_its_gpu(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "ENDINGS", tuple((number, 0.3) for number, _ in suite.ENDINGS))
    pid_file = tmp_path / "pid"
    hangs = f"trap '' INT TERM; sleep 3600 & echo $! > {pid_file}; echo its last words; wait"
    parts = [suite.Part("hangs", hangs, 1, 3), part(suite, "next", 1, sleep=0.0)]
    done = run(suite, tmp_path, parts, gpus=["5"])
    assert done["hangs"]["outcome"] == "failed"
    assert done["hangs"]["ran_out_of_time"]
    assert done["hangs"]["tail"] == ["its last words"]
    assert done["next"]["results"]["gpus"] == "5"
    child = int(pid_file.read_text())
    until = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Not ended, and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def one_gpu(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the script on these parts as if this machine had one GPU. Returns its exit code."""

    def main(parts: tuple[object, ...], *arguments: str) -> int:
        monkeypatch.setattr(suite, "PARTS", parts)
        monkeypatch.setattr(suite, "gpu_names", lambda: ["a GPU"])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--minutes", "5", *arguments])
        return suite.main()

    return main


def outcomes(report: Path) -> dict[str, str]:
    return {part["name"]: part["outcome"] for part in json.loads(report.read_text())["parts"]}


def test_results_are_written_before_and_after_every_part_and_a_failure_is_the_exit_code(
    suite: ModuleType, tmp_path: Path, one_gpu: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "seen.json"
    report = tmp_path / "report.json"
    kept = tmp_path / "kept"
    parts = (suite.Part("breaks", "echo no luck; exit 3", 1, 30), suite.Part("looks", f"cp {report} {seen}", 1, 30))
    assert one_gpu(parts, "--json", str(report), "--folder", str(kept)) == 1
    assert outcomes(seen) == {"breaks": "failed", "looks": "running"}
    under_way = json.loads(seen.read_text())["parts"][1]
    assert under_way["on_gpus"] == ["0"]
    assert under_way["since"].endswith("UTC")
    assert outcomes(report) == {"breaks": "failed", "looks": "passed"}
    assert json.loads(report.read_text())["parts"][0]["exit_code"] == 3
    assert "no luck" in capsys.readouterr().out
    assert (kept / "breaks" / "output.txt").read_text() == "no luck\n"


def test_the_report_names_the_commit_that_was_measured(
    suite: ModuleType, tmp_path: Path, one_gpu: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_COMMIT", "abc1234")
    report = tmp_path / "report.json"
    assert one_gpu((suite.Part("quick", "true", 1, 30),), "--json", str(report)) == 0
    written = json.loads(report.read_text())
    assert written["commit"] == "abc1234"
    assert "uncommitted_changes" in written


def test_truncated_results_fail_only_their_own_part(suite: ModuleType, tmp_path: Path) -> None:
    parts = [
        suite.Part("killed while it wrote", "printf '[1, 2' > {json}; exit 1", 1, 30),
        part(suite, "next", 1, sleep=0),
    ]
    done = run(suite, tmp_path, parts, gpus=["0"])
    assert done["killed while it wrote"]["outcome"] == "failed"
    assert done["killed while it wrote"]["results"]["text"] == "[1, 2"
    assert done["next"]["outcome"] == "passed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite_ends_its_parts_and_reports_it(
    suite: ModuleType, tmp_path: Path, one_gpu: Callable[..., int], number: int
) -> None:
    pid_file, report = tmp_path / "pid", tmp_path / "report.json"
    ends_it = f"kill -{number} {os.getpid()}"
    parts = (
        suite.Part("quick", "true", 1, 30),
        suite.Part("long", f"echo $$ > {pid_file}; {ends_it}; exec sleep 3600", 1, 30),
        suite.Part("never", "true", 1, 30),
    )
    before = signal.getsignal(number)
    assert one_gpu(parts, "--json", str(report), "--folder", str(tmp_path / "kept")) == 128 + number
    assert signal.getsignal(number) == before
    assert outcomes(report) == {"quick": "passed", "long": "interrupted"}
    assert not is_running(int(pid_file.read_text()))


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["in front", "in the background"])
def started(request: pytest.FixtureRequest) -> Iterator[None]:
    """What runs in the background of a script ignores SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_parts_are_ended_together(suite: ModuleType, tmp_path: Path, started: None) -> None:
    notified = tmp_path / "notified"
    ready = [tmp_path / "first-ready", tmp_path / "second-ready"]
    wait = "while :; do sleep 0.05; done"
    first = f"trap 'until [ -e {notified} ]; do sleep 0.05; done; exit 7' INT; touch {ready[0]}; {wait}"
    second = f"trap 'touch {notified}; exit 8' INT; touch {ready[1]}; {wait}"
    running = []
    for name, command in (("first", first), ("second", second)):
        (tmp_path / name).mkdir()
        running.append(suite.Running(suite.Part(name, command, 1, 60), ["0"], tmp_path / name, 8200))
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in ready):
        assert time.monotonic() < deadline, "the parts did not start"
        time.sleep(0.02)
    suite.end_parts(running)
    assert [part.result()["exit_code"] for part in running] == [7, 8], "the first exits after the second was notified"


def test_named_parts_run_once_in_the_given_order(
    suite: ModuleType, tmp_path: Path, one_gpu: Callable[..., int]
) -> None:
    order, report = tmp_path / "order", tmp_path / "report.json"
    parts = tuple(suite.Part(name, f"echo {name} >> {order}", 1, 30) for name in ("one", "two", "three", "four"))
    assert one_gpu(parts, "--json", str(report), "--only", "three", "one", "three", "two") == 0
    assert order.read_text().split() == ["three", "one", "two"]
    assert list(outcomes(report)) == ["three", "one", "two"]


def test_the_gpus_are_those_that_the_caller_may_use(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    assert suite.gpu_ids(8) == ["2", "GPU-5f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert suite.gpu_ids(2) == ["0", "1"]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None


@pytest.mark.parametrize(
    ("arguments", "gpus", "words"),
    [
        (["--json", "no/such/folder/x.json"], ["a GPU"], "whose folder does not exist"),
        (["--minutes", "nan"], ["a GPU"], "--minutes is nan"),
        ([], [], "no GPU was found"),
    ],
)
def test_bad_arguments_are_refused_before_a_part_runs(
    suite: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    gpus: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(suite, "PARTS", (suite.Part("never", "exit 7", 1, 30),))
    monkeypatch.setattr(suite, "gpu_names", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_suite_that_ran_nothing_fails(suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "PARTS", (suite.Part("wide", "exit 7", 8, 30),))
    monkeypatch.setattr(suite, "gpu_names", lambda: ["a GPU"])
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--json", str(tmp_path / "report.json")])
    assert suite.main() == 1
