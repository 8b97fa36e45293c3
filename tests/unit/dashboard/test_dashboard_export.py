"""A run as one file: what it holds, its limits, and that it loads nothing."""

import base64
import gzip
import json
import re
from urllib.parse import quote

import pytest
from tests.unit.dashboard.conftest import NUM_STEPS, client_of, write_run

from telescope.cli.ui import export as export_command
from telescope.dashboard import export
from telescope.dashboard.documents import Documents, user_folder
from telescope.dashboard.registry import Registry
from telescope.errors import UserError


@pytest.fixture
def static(tmp_path):
    """Built pages of three modules, one of which nothing imports, with a style and a font."""
    assets = tmp_path / "static" / "assets"
    assets.mkdir(parents=True)
    index = '<script type="module" crossorigin src="./assets/index-a.js"></script>'
    (tmp_path / "static" / "index.html").write_text(index)
    preload = "go(()=>import(`./Page-b.js`),__vite__mapDeps([0,1]),import.meta.url)"
    (tmp_path / "static" / "loader.js").write_text("start()")
    (assets / "index-a.js").write_text(f'import"./side-c.js";{preload};let x="from ./nowhere.js"')
    (assets / "Page-b.js").write_text('import{a}from"./index-a.js"')
    (assets / "side-c.js").write_text("")
    (assets / "other-d.js").write_text("")
    (assets / "Page-b.css").write_text("@font-face{src:url(./font-e.woff2)}")
    (assets / "index-a.css").write_text("a{}")
    (assets / "font-e.woff2").write_bytes(b"font")
    return tmp_path / "static"


def payload(content):
    packed = re.search(rb'<script id="payload"[^>]*>([^<]*)</script>', content)
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


@pytest.fixture
def written(root, static):
    return export.export_run(Registry([root]), "first", static, now=1.0)


def test_the_file_has_the_color_of_its_run_and_of_no_other(client, root, static, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    keys = {run["id"]: run["key"] for run in client.get("/api/runs").json()["runs"]}
    Documents(user_folder()).write("colors", {keys["first"]: "--c4", keys["below~second"]: "--c2"}, "")
    content = export.export_run(Registry([root]), "first", static, now=1.0)
    assert payload(content)["content"]["answers"]["/api/user/colors"]["value"] == {keys["first"]: "--c4"}


def test_the_file_has_the_answers_that_the_api_gives(client, written):
    content = payload(written)["content"]
    answers = content["answers"]
    for address in ("/api/runs/first/health", "/api/runs/first/evals", "/api/runs/first/model"):
        assert answers[address] == client.get(address).json()
    steps = client.get("/api/runs/first/steps").json()
    assert answers["/api/runs/first/steps"]["started_at"] == steps["started_at"]
    for name, values in steps["metrics"].items():
        shown = answers["/api/runs/first/steps"]["metrics"][name]
        assert shown == [None if value is None else pytest.approx(value, rel=1e-5) for value in values]
    reward = client.get("/api/runs/first/distribution?metric=reward").json()
    assert answers["/api/runs/first/distribution?metric=reward"]["mean"] == pytest.approx(reward["mean"], rel=1e-5)
    items = "/api/runs/first/evals/1/e/samples"
    assert answers[items] == client.get(items).json()
    assert (content["run"], content["written_at"]) == ("first", 1.0)


def test_the_file_has_whole_answers_of_some_steps(client, written):
    examples = payload(written)["content"]["examples"]
    steps = [row["step"] for row in examples["steps"]]
    assert (len(steps), steps[0], steps[-1]) == (export.ANSWER_STEPS, 0, NUM_STEPS - 1)
    group = examples["steps"][4]["groups"][0]
    key = f"{group['attempt']}/{group['samples'][0]['id']}"
    whole = client.get(f"/api/runs/first/samples/{key}").json()
    assert examples["samples"][key]["messages"] == whole["messages"]
    assert [turn["text"] for turn in examples["samples"][key]["turns"]] == [turn["text"] for turn in whole["turns"]]
    assert not any(isinstance(value, list) for turn in examples["samples"][key]["turns"] for value in turn.values())


def test_the_best_the_worst_and_a_discarded_group_are_chosen(monkeypatch):
    monkeypatch.setattr(export, "GROUPS", 3)
    groups = [{"status": "kept", "reward_mean": n / 10, "id": n, "samples": []} for n in range(10)]
    groups += [{"status": "discarded", "reward_mean": 0.0, "id": n, "samples": []} for n in (10, 11)]
    assert [group["id"] for group in export._few_groups(groups)] == [9, 0, 10]


def test_a_long_run_has_some_of_its_steps_and_says_so(root, monkeypatch):
    monkeypatch.setattr(export, "MAX_STEPS", 5)
    content = export.content_of(Registry([root]), "first", 0.0)
    steps = content["answers"]["/api/runs/first/steps"]
    assert (steps["step"], len(steps["metrics"]["entropy"])) == ([0, 3, 6, 8, 11], 5)
    assert content["answers"]["/api/runs/first/distribution?metric=reward"]["step"] == steps["step"]
    assert content["left_out"][0] == f"5 of {NUM_STEPS} steps"


def test_answers_have_a_limit(root, monkeypatch):
    monkeypatch.setattr(export, "MAX_BYTES", 3000)
    content = export.content_of(Registry([root]), "first", 0.0)
    assert 0 < len(content["examples"]["samples"]) < 5
    monkeypatch.setattr(export, "MAX_BYTES", 10)
    content = export.content_of(Registry([root]), "first", 0.0)
    assert content["examples"]["samples"] == {}
    assert "answers of 0 of 1 evals" in content["left_out"]


def test_a_long_text_is_cut(monkeypatch):
    monkeypatch.setattr(export, "MAX_TEXT", 4)
    assert export._cut({"a": ["123456"], "b": 1}) == {"a": ["1234… (2 more characters)"], "b": 1}


def test_modules_name_each_other_without_addresses(written):
    pages = payload(written)
    assert pages["entry"] == "telescope/index-a.js"
    assert pages["modules"] == {
        "telescope/index-a.js": 'import"telescope/side-c.js";go(()=>import(`telescope/Page-b.js`),[],import.meta.url);'
        'let x="from ./nowhere.js"',
        "telescope/side-c.js": "",
        "telescope/Page-b.js": 'import{a}from"telescope/index-a.js"',
    }
    assert pages["style"] == "a{}\n@font-face{src:url(data:font/woff2;base64,Zm9udA==)}"


def test_nothing_of_the_run_can_run(root, static, tmp_path):
    text = export.export_run(Registry([root]), "first", static).decode()
    assert "default-src 'none'" in text
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text) == []
    assert text.count("<script") == text.count("</script>") == 2


def test_the_address_of_an_answer_is_that_of_the_pages():
    assert export.address("/a", metric="b/c d~*(e)", environment="") == "/a?metric=b%2Fc+d%7E*%28e%29"
    assert export.address("/a", metric="b", environment="a") == "/a?environment=a&metric=b"


def test_the_menu_saves_the_file(root, static):
    client = client_of(root, static=static)
    answer = client.get("/api/runs/below~second/export")
    assert answer.headers["content-disposition"] == 'attachment; filename="below_second.html"'
    assert payload(answer.content)["content"]["run"] == "below~second"


def test_downloads_of_a_run_have_its_name_in_any_script(tmp_path, static):
    write_run(tmp_path / "runs" / "実験 ä", "grpo")
    client = client_of(tmp_path / "runs", static=static)
    for path, end in (("export", ".html"), ("samples.jsonl", "-samples.jsonl")):
        answer = client.get(f"/api/runs/実験 ä/{path}")
        assert answer.status_code == 200
        coded = f"filename*=UTF-8''{quote('実験_ä')}{end}"
        assert answer.headers["content-disposition"] == f'attachment; filename="_{end}"; {coded}'


def test_without_built_pages_the_file_is_refused(root, tmp_path):
    client = client_of(root, static=tmp_path)
    assert "make dashboard" in client.get("/api/runs/first/export").json()["detail"]


def test_the_command_writes_the_file(root, static, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("telescope.dashboard.app.STATIC", static)
    assert export_command(root / "first", tmp_path / "run.html") == 0
    assert payload((tmp_path / "run.html").read_bytes())["content"]["name"] == "first"
    assert "first is in" in capsys.readouterr().out
    with pytest.raises(UserError, match="is not a run directory"):
        export_command(tmp_path, tmp_path / "run.html")
    with pytest.raises(UserError, match="cannot be written"):
        export_command(root / "first", tmp_path / "nowhere" / "run.html")
