"""Settings of all tests: property tests without a deadline, since a busy machine is not a fault, and with the same
examples in each run; one thread for each of several processes of tests; the first and last tests of a server.
"""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from telescope.config import machine

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; tests of runs that a terminal leaves need it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("telescope", deadline=None, derandomize=True)
settings.load_profile("telescope")

PLACES = {"first_on_its_server": -1, "last_on_its_server": 1}
SHARED_SERVERS = ("tests/e2e/stack", "tests/integration/weights")
"""Folders whose files share a fixture that takes long to start."""

LONGEST = (
    "e2e/stack", "integration/weights", "e2e/test_a_whole_run.py", "e2e/test_lora.py", "e2e/test_command.py",
    "e2e/test_megatron.py", "integration/cluster/test_rollout_workers.py", "integration/trainer/test_megatron.py",
    "integration/trainer/test_two_ranks.py",
)  # fmt: skip
"""Below tests/, in the order of their starts: what starts last keeps one process busy while the others are idle."""


@pytest.fixture(scope="session", autouse=True)
def temporary_base(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes pytest's temporary folder now: in the middle of a run it would be made in the run's, and end with it."""
    tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session", autouse=True)
def own_ports() -> None:
    """Lets each process of pytest choose ports as if it were alone, so that plans do not depend on the others."""
    machine.CHOSEN_PORTS += f"/{os.getpid()}"


@pytest.hookimpl(tryfirst=True)  # pytest itself then groups them by their servers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, and marked tests before or after the others of their file.

    Tests that were imported come in the order of the imports, which is that of the alphabet: what a docstring states of
    the end of a file does not hold for them.
    """
    files = {path: (start_of(path), number) for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], sum(PLACES.get(mark.name, 0) for mark in item.iter_markers())))


def start_of(path: Path) -> int:
    """Returns the place of a file among `LONGEST`, or the one after them."""
    return next((place for place, name in enumerate(LONGEST) if f"tests/{name}" in path.as_posix()), len(LONGEST))


def pytest_collection_finish() -> None:
    """Excludes what imports have made from garbage collections, which would take a third of a second each."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a file, or a folder whose files share a server, to one of several processes (`--dist loadfile`)."""
    from xdist.scheduler import LoadFileScheduling

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in SHARED_SERVERS if file.startswith(folder + "/")), file)

        def remove_node(self, node: Any) -> str | None:
            """Does not run a test again that ended its process, such as one over its time limit: it has failed."""
            work = self.assigned_work[node]
            pending = [(unit, test) for unit in work.values() for test, is_done in unit.items() if not is_done]
            if not pending:
                return super().remove_node(node)
            unit, crashed = pending[0]
            unit[crashed] = True
            for scope in [scope for scope, unit in work.items() if all(unit.values())]:
                del work[scope]
            super().remove_node(node)  # gives the other tests to other processes
            return crashed

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport]:
    """Escapes what a process of tests could not send to the one that reports: captured text with lone surrogates."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
