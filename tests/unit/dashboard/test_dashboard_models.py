"""Every address answers with its declared type, no field more or less."""

import pytest
from pydantic import TypeAdapter

ANSWERS = {
    "/api/runs": "/api/runs",
    "/api/projects": "/api/projects",
    "/api/fields": "/api/fields",
    "/api/runs/{run}/code": "/api/runs/first/code",
    "/api/runs/{run}/code/file": "/api/runs/first/code/file?path=sources/train.py",
    "/api/runs/{run}/code/diff": "/api/runs/first/code/diff?against=below~second",
    "/api/runs/{run}/now": "/api/runs/first/now",
    "/api/runs/{run}/model": "/api/runs/first/model",
    "/api/runs/{run}": "/api/runs/first",
    "/api/runs/{run}/steps": "/api/runs/first/steps",
    "/api/compare": "/api/compare?runs=first,below~second",
    "/api/runs/{run}/health": "/api/runs/first/health",
    "/api/runs/{run}/changes": "/api/runs/first/changes?step=6",
    "/api/runs/{run}/costs": "/api/runs/first/costs",
    "/api/runs/{run}/distribution": "/api/runs/first/distribution",
    "/api/runs/{run}/in_flight": "/api/runs/first/in_flight",
    "/api/runs/{run}/tags": "/api/runs/first/tags",
    "/api/runs/{run}/evals": "/api/runs/first/evals",
    "/api/runs/{run}/evals/{attempt}/{eval_id:path}/samples": "/api/runs/first/evals/1/e/samples",
    "/api/runs/{run}/groups": "/api/runs/first/groups?step=4",
    "/api/runs/{run}/samples": "/api/runs/first/samples",
    "/api/runs/{run}/prompts": "/api/runs/first/prompts",
    "/api/runs/{run}/samples/{attempt}/{sample_id:path}": "/api/runs/first/samples/1/5-2",
    "/api/runs/{run}/spans": "/api/runs/first/spans",
    "/api/runs/{run}/paths": "/api/runs/first/paths?first=0&last=3",
    "/api/runs/{run}/sandboxes": "/api/runs/first/sandboxes",
    "/api/runs/{run}/gauges": "/api/runs/first/gauges?names=queue_depth",
    "/api/runs/{run}/gauges/names": "/api/runs/first/gauges/names",
    "/api/runs/{run}/logs": "/api/runs/first/logs",
    "/api/user/{name}": "/api/user/layouts",
}


def declared(client):
    """The type of each documented address that answers with JSON."""
    routes = [route for route in client.app.routes if getattr(route, "include_in_schema", False)]
    return {route.path: route.response_model for route in routes if getattr(route, "response_model", None)}


def test_each_documented_address_has_a_type_and_is_asked_here(client):
    documented = set(client.app.openapi()["paths"]) - {
        "/api/events",
        "/api/runs/{run}/samples.jsonl",
        "/api/runs/{run}/export",
    }
    assert {path.replace(":path", "") for path in declared(client)} == documented
    assert declared(client).keys() == ANSWERS.keys()


@pytest.mark.parametrize("path", ANSWERS)
def test_an_answer_has_exactly_the_declared_fields(client, path):
    body = client.get(ANSWERS[path]).json()
    assert body or path.endswith("/in_flight"), "an ended run has no samples in flight"
    adapter = TypeAdapter(declared(client)[path])
    assert adapter.dump_python(adapter.validate_python(body), mode="json", exclude_unset=True) == body
