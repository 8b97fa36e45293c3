"""What the user keeps: versions, limits, and that nothing else changes."""

import json

import pytest
from tests.unit.dashboard.conftest import client_of

from telescope.dashboard import documents
from telescope.dashboard.documents import Documents, user_folder
from telescope.errors import UserError


@pytest.fixture
def user(root, tmp_path):
    """Requests of a user whose documents are in `tmp_path/kept`."""
    return client_of(root, documents=tmp_path / "kept")


def put(user, address, value, version="", **headers):
    return user.put(f"/api/user/{address}", json={"value": value, "version": version}, headers=headers)


def files(tmp_path):
    return sorted(tmp_path.rglob("*.json"))


def test_a_document_is_read_as_it_was_written_and_removed_without_a_value(user, tmp_path):
    nothing = {"value": None, "version": ""}
    assert user.get("/api/user/notes?run=first").json() == nothing
    assert files(tmp_path) == []
    written = put(user, "notes?run=first", {"own": ["a", "ß"]}).json()
    assert user.get("/api/user/notes?run=first").json() == written == {**written, "value": {"own": ["a", "ß"]}}
    (file,) = files(tmp_path)
    kept = {"name": "notes", "value": written["value"]}
    assert json.loads(file.read_text()).items() >= kept.items(), "the file says what it is"
    assert put(user, "notes?run=first", None, written["version"]).json() == nothing
    assert files(tmp_path) == []


def test_notes_belong_to_a_run_wherever_its_folder_is(root, tmp_path):
    here = client_of(root, documents=tmp_path)
    put(here, "notes?run=below~second", "rose")
    there = client_of(root / "below" / "second", documents=tmp_path)
    assert there.get("/api/user/notes?run=second").json()["value"] == "rose"
    assert here.get("/api/user/notes?run=first").json()["value"] is None
    assert here.get("/api/user/notes?run=nowhere").status_code == 404


def test_a_document_that_changed_meanwhile_is_not_overwritten(user):
    first = put(user, "notes", "a").json()
    second = put(user, "notes", "b", first["version"]).json()
    answer = put(user, "notes", "c", first["version"])
    assert (answer.status_code, user.get("/api/user/notes").json()) == (409, second)


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%2fb", "..%2f..%2fsecret", "A", "a.json", "a" * 41, "a%00"])
def test_no_name_becomes_a_path(user, tmp_path, name):
    assert put(user, name, "x").status_code in (400, 404, 405)
    assert files(tmp_path) == []


def test_documents_have_a_largest_size_and_number(user, tmp_path, monkeypatch):
    assert put(user, "notes", "x" * documents.MAX_BYTES).status_code == 413
    monkeypatch.setattr(documents, "MAX_BYTES", 100)
    assert "Shorten" in put(user, "notes", "x" * 100).json()["detail"]
    assert files(tmp_path) == []
    monkeypatch.setattr(documents, "MAX_DOCUMENTS", 1)
    kept = Documents(tmp_path)
    version = kept.write("a", 1, "").version
    with pytest.raises(UserError, match="has 1 documents"):
        kept.write("b", 1, "")
    assert kept.write("a", 2, version).value == 2


VALUES = ['"\\ud800"', '{"\\udfff": 1}', "NaN", "[1e999]", "-Infinity"]  # which no answer can hold


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[1]",
        "{}",
        '{"value": 1, "version": 2}',
        "[" * 100_000,
        *(f'{{"value": {v}, "version": "V"}}' for v in VALUES),
    ],
)
def test_what_is_no_document_is_refused_in_a_sentence_and_the_document_stays(user, body):
    kept = put(user, "notes", "a").json()
    content = body.replace('"V"', f'"{kept["version"]}"')
    answer = user.put("/api/user/notes", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, user.get("/api/user/notes").json()) == (400, kept)
    message = answer.json()["detail"]
    assert message.endswith(".") and "\n" not in message and "pydantic" not in message


@pytest.mark.parametrize(("headers", "status"), [
    ({"Origin": "http://localhost"}, 200),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://localhost:3000"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Host": "evil.example"}, 403),
    ({"Content-Type": "text/plain"}, 415),
])  # fmt: skip
def test_only_pages_of_this_server_write(user, tmp_path, headers, status):
    assert put(user, "notes", "x", **headers).status_code == status
    assert len(files(tmp_path)) == (status == 200)


def test_nothing_but_documents_is_written(user):
    for address in ("/api/runs/first", "/api/runs", "/index.html", "/api/user"):
        assert user.put(address, json={}).status_code == 405


def test_a_damaged_document_and_a_folder_that_cannot_be_written_are_named(user, tmp_path):
    put(user, "notes", "a")
    (file,) = files(tmp_path)
    file.write_text("{")
    assert str(file) in user.get("/api/user/notes").json()["detail"]
    with pytest.raises(UserError, match="cannot be"):
        Documents(file / "kept").write("notes", "a", "")


def test_the_folder_is_the_user_s_config_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "telescope" / "dashboard"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".config" / "telescope" / "dashboard"
