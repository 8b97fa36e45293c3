"""`telescope ui ENTITY/PROJECT`: the runs of a W&B project, read by the real client from a stand-in of the server."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import uvicorn
from fastapi.testclient import TestClient
from tests.integration.trackers.fake_wandb import ENTITY, FakeWandb, StoredRun
from tests.processes import wait_for

from telescope.cli import ui
from telescope.cli.main import main
from telescope.dashboard import remote, wandb_runs
from telescope.dashboard.app import create_app
from telescope.dashboard.projects import Projects
from telescope.dashboard.remote import RemoteCopy, RunCopy, WandbRuns
from telescope.dashboard.wandb_runs import WandbError, WandbProject, is_record_file
from telescope.errors import UserError
from telescope.record.files import record_files
from telescope.record.reader import Run
from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run
from telescope.trackers.wandb import VERSION_KEY

CONFIG = {"model": "tiny", "algorithm": "grpo", "number_of_steps": 9, "environments": [{"name": "countdown"}]}


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[FakeWandb]:
    import wandb

    monkeypatch.setattr(remote, "LIVE_SECONDS", 0.05)
    monkeypatch.setattr(remote, "LIST_SECONDS", 0.1)
    monkeypatch.setattr(wandb_runs, "ANSWER_SECONDS", 2)
    monkeypatch.setattr(wandb_runs, "RETRIES", 0)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "client"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with FakeWandb() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        yield fake
    wandb.teardown()


@pytest.fixture
def recorder(tmp_path) -> Iterator[Recorder]:
    """The record of a run that goes on, on another machine."""
    with Recorder(tmp_path / "there" / "live", flush_seconds=0.05) as opened:
        begin_run(opened, name="live", config_hash="h", config_json=json.dumps({"values": CONFIG, "user_set": []}))
        write_steps(opened, 0, 3)
        yield opened


def write_steps(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last):
        recorder.write("steps", {"step": step, "reward_mean": step / 10, "metrics": {"entropy": 1.0}})
        recorder.write("samples", {"sample_id": f"{step}-0", "step": step, "completion_text": "x" * 1000})
    assert recorder.flush()


def upload(stored: StoredRun, run_dir: Path) -> None:
    """Puts the record of a run on the server, as the run itself does."""
    files = {name: (run_dir / name).read_bytes() for name in record_files(run_dir)}
    manifest = json.dumps({"format": 1, "files": {name: len(content) for name, content in files.items()}})
    stored.files = {f"telescope/{name}": content for name, content in files.items()}
    stored.files |= {"telescope/files.json": manifest.encode(), "output.log": b"W&B's own"}


def stored_run(name: str, **fields: object) -> StoredRun:
    summary = {"step": {"max": 7}, "reward/all_groups/mean": 0.75, "heldout_after": 0.5}
    return StoredRun(name, f"{name}-name", {VERSION_KEY: "1", **CONFIG}, summary, ["a"], **fields)


def opened(server: FakeWandb) -> closing[WandbRuns]:
    runs = WandbRuns(WandbProject(ENTITY, "p", Path(os.environ["WANDB_DIR"])))
    runs.start()
    return closing(runs)


def opening(runs: WandbRuns, name: str = "live") -> RunCopy:
    copy = runs.copy_in(runs.root / name)
    copy.open()
    return copy


def table_files(run_dir: Path) -> set[str]:
    return {name for name in record_files(run_dir) if name.startswith("tables/")}


def downloads(server: FakeWandb) -> list[str]:
    return [path.rpartition("/telescope/")[2] for method, path in server.requests if method == "GET"]


def test_runs_are_listed_from_config_and_summary_and_downloaded_when_opened(server, recorder):
    upload(server.add_run("p", stored_run("live")), recorder.files.run_dir)
    ended = server.add_run("p", stored_run("ended", state="finished", created_at=1.7e9, heartbeat_at=1.7e9 + 60))
    upload(ended, recorder.files.run_dir)
    server.add_run("p", StoredRun("other", config={"learning_rate": 1}))
    with opened(server) as runs:
        client = TestClient(create_app([], remotes=[runs]), base_url="http://localhost")
        rows = {row["id"]: row for row in client.get("/api/runs").json()["runs"]}
        assert set(rows) == {"live", "ended"}
        listed = {"name": "ended-name", "status": "finished", "duration": 60, "model": "tiny", "tags": ["a"]}
        numbers = {"steps": 8, "num_steps": 9, "reward_last": 0.75, "heldout_after": 0.5}
        assert rows["ended"].items() >= {**listed, **numbers, "environments": ["countdown"]}.items()
        assert rows["ended"]["remote"]["phase"] == rows["live"]["remote"]["phase"] == "listed"
        assert rows["live"]["status"] == "live"
        assert downloads(server) == []
        client.get("/api/runs/live")
        wait_for(lambda: client.get("/api/runs/live").json()["info"]["remote"]["phase"] == "synced")
        assert client.get("/api/runs/live/steps").json()["step"] == [0, 1, 2]
        assert client.get("/api/runs/live").json()["info"]["name"] == "live", "what the run wrote counts now"
        copy, original = Run(runs.root / "live"), Run(recorder.files.run_dir)
        assert copy.table("samples").equals(original.table("samples"))
        assert "output.log" not in os.listdir(runs.root / "live")


def test_a_live_run_follows_and_only_changed_files_are_downloaded(server, recorder, monkeypatch):
    stored = server.add_run("p", stored_run("live"))
    upload(stored, recorder.files.run_dir)
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: copy.state.phase == "synced")
        read = Run(runs.root / "live")
        server.requests.clear()
        write_steps(recorder, 3, 5)
        phases: set[str] = set()

        def note_phase(self: RunCopy, name: str, value: object) -> None:
            if name == "state":
                phases.add(value.phase)
            object.__setattr__(self, name, value)

        monkeypatch.setattr(RunCopy, "__setattr__", note_phase)
        upload(stored, recorder.files.run_dir)
        wait_for(lambda: read.table("steps").num_rows == 5 and read.table("samples").num_rows == 5)
        tables = {Path(name).parent.name for name in downloads(server) if name.startswith("tables/")}
        assert tables == {"steps", "samples"}
        wait_for(lambda: phases)
        assert phases == {"synced"}, "the page does not flicker"
        recorder.close()  # tails become blocks
        upload(stored, recorder.files.run_dir)
        wait_for(lambda: table_files(runs.root / "live") == table_files(recorder.files.run_dir))
        assert read.table("samples").equals(Run(recorder.files.run_dir).table("samples"))
        assert len(read.unreadable) == 0


def test_the_page_is_told_how_much_of_a_run_is_there(server, recorder, monkeypatch):
    upload(server.add_run("p", stored_run("live")), recorder.files.run_dir)
    gate = threading.Event()
    get = server.get
    monkeypatch.setattr(server, "get", lambda path: ("/steps/" not in path or gate.wait(30)) and get(path))
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: copy.state.phase == "syncing" and copy.state.done_bytes > 0)
        assert copy.state.done_bytes < copy.state.total_bytes
        client = TestClient(create_app([], remotes=[runs]), base_url="http://localhost")
        (row,) = client.get("/api/runs").json()["runs"]
        assert row["remote"]["total_bytes"] == copy.state.total_bytes
        assert row["steps"] == 8, "as W&B counts them"
        gate.set()
        wait_for(lambda: copy.state.phase == "synced")


def test_copies_stay_viewable_without_wandb_and_the_page_says_so(server, recorder, capfd):
    upload(server.add_run("p", stored_run("live")), recorder.files.run_dir)
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: copy.state.phase == "synced")
        server.is_down = True
        wait_for(lambda: copy.state.message)
        assert copy.state.phase == "synced"
    again = ui.open_project(ENTITY, "p")
    client = TestClient(create_app([], remotes=[again]), base_url="http://localhost")
    body = client.get("/api/runs").json()
    assert [row["steps"] for row in body["runs"]] == [3]
    (problem,) = body["problems"]
    assert problem["path"] == f"W&B {ENTITY}/p"
    assert "cannot be reached" in problem["problem"] and "earlier copies" in problem["problem"]
    assert "earlier copies" in capfd.readouterr().err
    server.is_down = False
    wait_for(lambda: again.problem is None)
    again.close()


def test_an_interrupted_download_continues(server, recorder, monkeypatch):
    upload(server.add_run("p", stored_run("live", state="finished")), recorder.files.run_dir)
    get = server.get
    monkeypatch.setattr(server, "get", lambda path: None if "/samples/" in path else get(path))
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: copy.state.phase == "failed")
    monkeypatch.setattr(server, "get", get)
    before = len(server.requests)
    with opened(server) as runs:
        copy = runs.copy_in(runs.root / "live")
        assert copy.state.phase == "listed"
        copy.open()
        wait_for(lambda: copy.state.phase == "synced")
    again = [path for method, path in server.requests[before:] if method == "GET"]
    assert {path.split("/")[6] for path in again if "/tables/" in path} == {"samples"}


def test_files_that_are_not_on_wandb_yet_are_named_and_come_later(server, recorder):
    stored = server.add_run("p", stored_run("live", state="finished"))
    upload(stored, recorder.files.run_dir)
    late = {name: stored.files.pop(name) for name in list(stored.files) if "/samples/" in name}
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: copy.state.message)
        assert "1 of its" in copy.state.message and "not on W&B yet" in copy.state.message
        stored.files |= late
        wait_for(lambda: copy.state.phase == "synced" and copy.state.message is None)
        assert Run(runs.root / "live").table("samples").num_rows == 3


def test_a_run_that_has_just_started_has_nothing_to_copy_yet(server, recorder):
    stored = server.add_run("p", stored_run("live"))
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: server.operations("RunFiles"))
        assert copy.state == RemoteCopy("listed", f"W&B {ENTITY}/p")
        upload(stored, recorder.files.run_dir)
        wait_for(lambda: copy.state.phase == "synced")


def test_a_run_without_a_record_says_why(server):
    server.add_run("p", stored_run("bare", state="finished"))
    with opened(server) as runs:
        copy = opening(runs, "bare")
        wait_for(lambda: copy.state.phase == "failed")
        assert "wandb_upload_record was false" in copy.state.message


def test_a_project_without_runs_of_telescope_says_so_and_shows_those_that_start(server):
    server.add_run("p", StoredRun("other"))
    with opened(server) as runs:
        assert "no runs of Telescope" in runs.problem and "another layout" in runs.problem
        server.add_run("p", stored_run("new"))
        wait_for(lambda: runs.copy_in(runs.root / "new"))
        wait_for(lambda: runs.problem.startswith("Runs of another layout"))


@pytest.mark.parametrize(("project", "spoil", "words"), [
    ("p", lambda server, patch: patch.delenv("WANDB_API_KEY"), "wandb login"),
    ("p", lambda server, patch: patch.setenv("WANDB_API_KEY", "x" * 40), "refuses the API key"),
    ("p", lambda server, patch: patch.setattr(server, "refuses", "permission denied"), "does not let you read"),
    ("p", lambda server, patch: patch.setattr(server, "is_down", True), "cannot be reached"),
    ("p", lambda server, patch: patch.setattr(wandb_runs, "is_installed", lambda name: False), "pip install wandb"),
    ("nothing", lambda server, patch: None, "has no project"),
])  # fmt: skip
def test_what_cannot_be_listed_is_a_message(project, spoil, words, server, monkeypatch, capfd):
    server.add_run("p", stored_run("a"))
    spoil(server, monkeypatch)
    assert main(["ui", f"{ENTITY}/{project}", "--port", "0"]) == 2
    printed = capfd.readouterr().err
    assert words in printed
    assert "Traceback" not in printed


def test_a_cache_that_cannot_be_written_is_a_message_and_ends_no_thread(server, tmp_path):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        opened(server)
    runs = WandbRuns(WandbProject(ENTITY, "p", Path(os.environ["WANDB_DIR"])))
    runs.start(must_answer=False)
    with closing(runs):
        assert f"The copy in {runs.root} cannot be written" in (runs.problem or "")
        (tmp_path / "cache").unlink()
        wait_for(lambda: "cannot be written" not in (runs.problem or ""))


def test_names_from_the_server_lead_nowhere_else(server, recorder, tmp_path):
    stored = server.add_run("p", stored_run("live", state="finished"))
    upload(stored, recorder.files.run_dir)
    hostile = "tables/../../../../escaped"
    manifest = json.loads(stored.files["telescope/files.json"])
    manifest["files"] |= {hostile: 3, "/etc/passwd": 3, "checkpoints/x": 3}
    stored.files |= {f"telescope/{hostile}": b"bad", "telescope/files.json": json.dumps(manifest).encode()}
    with opened(server) as runs:
        copy = opening(runs)
        wait_for(lambda: copy.state.phase == "synced")
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize(
    "name", ["../x", "tables/../x", "/tables/x", "tables//x", "tables/.x/y", "tables\\x", "wandb/x", "tables", 3, ""]
)
def test_a_name_that_no_record_has_is_refused(name):
    assert not is_record_file(name)


def test_a_folder_wins_over_a_project_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "runs").mkdir(parents=True)
    assert ui.choose_places(["me/runs", "me/other", "me/other"], None) == ([Path("me/runs")], [("me", "other")])
    address = "https://wandb.ai/me/other/runs/abc?nw=1"
    assert ui.choose_places([address], None) == ([], [("me", "other")])
    for place in ("gone", "./me/other", "/me/other", "a/b/c"):
        with pytest.raises(UserError, match="neither a folder nor a W&B project"):
            ui.choose_places([place], None)
    with pytest.raises(UserError, match="neither a folder"):
        ui.choose_places([], Path("me/other"))


def test_a_damaged_list_of_files_is_an_error(server, recorder):
    stored = server.add_run("p", stored_run("live", state="finished"))
    upload(stored, recorder.files.run_dir)
    stored.files["telescope/files.json"] = b"[]"
    project = WandbProject(ENTITY, "p", Path(os.environ["WANDB_DIR"]))
    with pytest.raises(WandbError, match="damaged"):
        project.read_manifest(project.files("live"), Path(os.environ["WANDB_DIR"]))


def test_projects_are_found_by_key_and_added_and_removed_on_the_page(server, recorder, tmp_path):
    """`wandb login`, train anywhere, `telescope`: no project is named."""
    upload(server.add_run("mine", stored_run("live")), recorder.files.run_dir)
    server.add_run("old", StoredRun("foreign", "the other framework", {"lr": 1}, tags=["telescope"]))
    server.add_run("unrelated", StoredRun("cats"))
    server.add_run("a name of words", StoredRun("dogs", tags=["telescope"]))
    app = create_app([], documents=tmp_path / "kept")
    client = TestClient(app, base_url="http://localhost")

    def listed() -> dict[str, dict[str, object]]:
        return {row["path"]: row for row in client.get("/api/projects").json()["projects"]}

    def choose(**value: list[str]) -> None:
        version = client.get("/api/user/projects").json()["version"]
        assert client.put("/api/user/projects", json={"value": value, "version": version}).status_code == 200

    words = "someone/a name of words"
    app.state.projects.start()
    try:
        wait_for(
            lambda: (
                {path: row["runs"] for path, row in listed().items()} == {"someone/mine": 1, "someone/old": 0, words: 0}
            )
        )
        assert client.get("/api/projects").json()["can_change"]
        wait_for(lambda: [row["id"] for row in client.get("/api/runs").json()["runs"]] == ["live"])
        problem = "Runs of another layout, without a record of Telescope: the other framework."
        wait_for(lambda: problem in str(client.get("/api/runs").json()["problems"]))
        choose(added=["someone/unrelated", "someone/gone", "no path"], removed=["someone/mine", words])
        wait_for(lambda: set(listed()) == {"someone/old", "someone/unrelated", "someone/gone"})
        wait_for(lambda: "has no project" in str(listed()["someone/gone"]["problem"]))
        assert client.get("/api/projects").json()["removed"] == ["someone/mine", words]
        wait_for(lambda: client.get("/api/runs").json()["runs"] == [])
        choose()
        wait_for(lambda: set(listed()) == {"someone/mine", "someone/old", words})
    finally:
        app.state.projects.close()


def test_a_run_that_is_here_and_on_wandb_is_listed_once(server, recorder):
    run_id = Run(recorder.files.run_dir).info.run_id
    server.add_run("p", stored_run(run_id))
    server.add_run("p", stored_run("elsewhere"))
    with opened(server) as runs:
        client = TestClient(create_app([recorder.files.run_dir.parent], remotes=[runs]), base_url="http://localhost")
        assert {row["id"] for row in client.get("/api/runs").json()["runs"]} == {"live", "elsewhere"}


@pytest.mark.parametrize(("places", "mode", "asks"), [
    ([], "online", True), ([], "offline", False), ([], "disabled", False), (["runs"], "", False),
])  # fmt: skip
def test_wandb_is_asked_for_projects_unless_off(places, mode, asks, server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("WANDB_MODE", mode)
    started = []
    monkeypatch.setattr(Projects, "start", lambda self: started.append(self))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    assert main(["ui", *places, "--port", "0"]) == 0
    assert (len(started) == 1, "your projects on W&B" in capsys.readouterr().out) == (asks, asks)
