"""Who may read the dashboard, and that no path leads out of it."""

import logging
import sys
import time
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import uvicorn
from fastapi.openapi.utils import get_openapi
from fastapi.testclient import TestClient
from tests.unit.dashboard.conftest import client_of

from telescope.cli.main import main
from telescope.dashboard import safety
from telescope.dashboard.app import create_app
from telescope.dashboard.store import RunStore

TOKEN = "secret-of-this-start"


@pytest.fixture
def static(tmp_path):
    (tmp_path / "static" / "assets").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("<title>index</title>")
    (tmp_path / "static" / "assets" / "a-1.js").write_text("1" * 3000)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "static" / "link.txt").symlink_to(tmp_path / "secret.txt")
    return tmp_path / "static"


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"Host": "127.0.0.1:8005"}, 200), ({"Host": "[::1]:8005"}, 200), ({"Host": "evil.example"}, 403),
    ({"Host": "192.0.2.7"}, 403), ({"Host": "["}, 403), ({"Host": "localhost", "Origin": "http://localhost"}, 200),
    ({"Host": "localhost:8005", "Origin": "http://localhost:5173"}, 403),
    ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://["}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
])  # fmt: skip
def test_host_and_origin_are_checked(client, headers, status):
    assert client.get("/api/runs", headers=headers).status_code == status


def test_only_reading_is_answered_and_every_answer_has_the_headers_of_safety(client):
    for address in ("/api/runs", "/", "/api/nothing", "/api/runs/nowhere"):
        headers = client.get(address).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "http" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", [
    *("//etc/passwd", "/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "/%2e%2e%2fsecret.txt"),
    *("/link.txt", "/assets/../../secret.txt", "/assets/%2e%2e%2f%2e%2e%2fsecret.txt", "/%2fetc%2fpasswd"),
    *("/..%5csecret.txt", "/a%00b", "/api/runs/..%2f..%2fetc%2fpasswd", "/api/runs/%2e%2e/steps"),
    *("/api/runs//etc/passwd", "/api/runs/%2Fetc/steps", "/" + "a" * 10_000),
])  # fmt: skip
def test_no_path_leads_out(root, static, path):
    answer = TestClient(create_app([root], static=static)).get(f"http://localhost{path}")
    assert "root:" not in answer.text and answer.text != "secret"
    assert answer.status_code == 404 or "<title>index</title>" in answer.text


def test_pages_are_served_and_hashed_files_are_kept(root, static, tmp_path):
    client = client_of(root, static=static)
    assert "immutable" in client.get("/assets/a-1.js").headers["cache-control"]
    assert client.get("/assets/gone.js").status_code == 404
    assert client.get("/").text == "<title>index</title>"
    elsewhere = client.get("/any/page")
    assert elsewhere.status_code == 404 and '<a href="/">' in elsewhere.text
    assert "make dashboard" in client_of(root, static=tmp_path).get("/").text, "without a build"


def test_beyond_loopback_every_request_needs_the_token(root, static):
    client = TestClient(create_app([root], token=TOKEN, hosts=["box"], static=static), base_url="http://192.0.2.7:8005")
    assert client.get("/").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    opened = client.get(f"/?token={TOKEN}&a=1", follow_redirects=False)
    assert (opened.status_code, opened.headers["location"]) == (303, "/?a=1")
    assert "HttpOnly" in opened.headers["set-cookie"] and "SameSite=strict" in opened.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200
    other = TestClient(client.app, base_url="http://evil.example")
    assert other.get(f"/?token={TOKEN}", follow_redirects=False).status_code == 403


def test_opening_the_printed_address_never_leads_to_another_host(root, static):
    client = client_of(root, token=TOKEN, static=static)
    answer = client.get(f"http://localhost//evil.example/?token={TOKEN}", follow_redirects=False)
    assert answer.headers["location"].startswith("/evil.example")


@pytest.mark.parametrize(("users", "shared"), [
    ([(0, "/bin/bash"), (33, "/bin/sh"), (1000, "/bin/zsh")], False),
    ([(1000, "/bin/zsh"), (1001, "/usr/sbin/nologin"), (65534, "/bin/sh")], False),
    ([(1000, "/bin/zsh"), (1001, "/bin/bash")], True),
    ([(1000, "/bin/zsh"), (1_200_345, "/bin/bash")], True),
])  # fmt: skip
def test_a_machine_with_accounts_of_other_people_is_shared(monkeypatch, users, shared):
    entries = [SimpleNamespace(pw_uid=uid, pw_shell=shell) for uid, shell in users]
    monkeypatch.setattr(safety.pwd, "getpwall", lambda: entries)
    monkeypatch.setattr(safety.os, "getuid", lambda: 1000)
    monkeypatch.setattr(safety, "SESSIONS", Path("/nowhere"))
    assert safety.is_shared() == shared


@pytest.mark.parametrize(("shared", "flags", "has_token"), [
    (False, [], False), (True, [], True), (True, ["--no-token"], False), (False, ["--token"], True),
    (False, ["--host", "0.0.0.0"], True), (False, ["--host", "0.0.0.0", "--no-token"], None),
])  # fmt: skip
def test_the_address_has_a_secret_where_others_reach_it(monkeypatch, tmp_path, capsys, shared, flags, has_token):
    monkeypatch.setattr(safety, "is_shared", lambda: shared)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    assert main(["ui", "--port", "0", *flags, str(tmp_path)]) == (2 if has_token is None else 0)
    assert ("?token=" in capsys.readouterr().out) == bool(has_token)


@pytest.mark.parametrize(("environment", "flags", "opens"), [
    ({"DISPLAY": ":0"}, [], True),
    ({"WAYLAND_DISPLAY": "wayland-0"}, [], True),
    ({}, [], False),
    ({"DISPLAY": ":10", "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, [], False),
    ({"DISPLAY": ":0"}, ["--no-browser"], False),
    ({"DISPLAY": ":0"}, ["--token"], False),
])  # fmt: skip
def test_a_browser_opens_on_a_desktop_unless_others_would_see_the_secret(
    monkeypatch, tmp_path, environment, flags, opens
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    opened: Queue[str] = Queue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    monkeypatch.setattr(safety, "is_shared", lambda: False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    assert main(["ui", "--port", "0", *flags, str(tmp_path)]) == 0
    if opens:
        assert opened.get(timeout=10).startswith("http://localhost:")
    assert opened.empty()


def test_the_server_closes_no_handler_of_other_packages(monkeypatch, tmp_path):
    """Some, such as those of absl, close the standard error with which they began."""
    other = logging.StreamHandler()
    monkeypatch.setattr(other, "close", Mock())
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)
    assert main(["ui", "--port", "0", "--no-browser", str(tmp_path)]) == 0
    other.close.assert_not_called()


def test_a_fault_of_the_server_is_answered_in_words_and_raised_for_its_log(root, tmp_path, monkeypatch):
    monkeypatch.setattr(RunStore, "steps", Mock(side_effect=IndexError("column of 257")))
    app = create_app([root], documents=tmp_path / "user")
    reply = TestClient(app, "http://localhost", raise_server_exceptions=False).get("/api/runs/first/steps")
    words = "The dashboard failed here, and its terminal has the details. IndexError: column of 257"
    assert (reply.status_code, reply.json()["detail"]) == (500, words)
    with pytest.raises(IndexError):
        TestClient(app, "http://localhost").get("/api/runs/first/steps")


def test_a_kept_file_is_compressed_only_for_those_who_read_gzip(root, static):
    client = client_of(root, static=static)
    answers = [client.get("/assets/a-1.js", headers={"Accept-Encoding": how}) for how in ("gzip", "gzip", "identity")]
    assert [answer.headers.get("content-encoding") for answer in answers] == ["gzip", "gzip", None]
    assert {answer.content for answer in answers} == {(static / "assets" / "a-1.js").read_bytes()}
    assert {answer.headers["content-type"] for answer in answers} == {"text/javascript; charset=utf-8"}


def test_first_requests_at_once_build_the_schema_once(root, monkeypatch):
    built = []

    def build(**settings):
        built.append(settings["title"])
        time.sleep(0.05)
        return get_openapi(**settings)

    monkeypatch.setattr("fastapi.applications.get_openapi", build)
    client = client_of(root)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(client.get, ["/api/runs", "/api/openapi.json", "/api/docs", "/api/runs"]))
    assert [response.status_code for response in found] == [200] * 4
    assert built == ["Telescope API"]
