"""Every address answers with its declared type, no field more or less."""

import pytest
from pydantic import TypeAdapter
from tests.repository_modules import load_script

from telescope.dashboard.app import create_app

QUERIES = {
    "code/file": "path=sources/train.py", "code/diff": "against=below~second", "changes": "step=6", "groups": "step=4",
    "paths": "first=0&last=3", "gauges": "names=queue_depth", "compare": "runs=first,below~second",
}  # fmt: skip
PARTS = {"run": "first", "attempt": 1, "eval_id": "e", "sample_id": "5-2", "name": "layouts"}
OTHERS = {"/api/events", "/api/runs/{run}/samples.jsonl", "/api/runs/{run}/export"}
"""Addresses that answer with something else than JSON."""
ROUTES = [route for route in create_app([]).routes if getattr(route, "include_in_schema", False)]
DECLARED = {route.path.replace(":path", ""): model for route in ROUTES if (model := route.response_model)}


def test_each_documented_address_has_a_type(client):
    assert DECLARED.keys() == set(client.app.openapi()["paths"]) - OTHERS


@pytest.mark.parametrize("path", DECLARED)
def test_an_answer_has_exactly_the_declared_fields(client, path):
    query = QUERIES.get(path.removeprefix("/api/runs/{run}/").removeprefix("/api/"), "")
    body = client.get(f"{path.format(**PARTS)}?{query}").json()
    assert body or path.endswith("/in_flight"), "an ended run has no samples in flight"
    adapter = TypeAdapter(DECLARED[path])
    assert adapter.dump_python(adapter.validate_python(body), mode="json", exclude_unset=True) == body


def test_the_types_of_the_pages_are_those_of_the_api():
    with load_script("generate_api_types") as script:
        assert script.TYPES.read_text() == script.generate(), "run `python scripts/generate_api_types.py`"
