"""Lists the addresses of the API, with the function that answers each.

Runs are named by ids that the registry knows, so no parameter becomes a path. Only documents are written, in the user's
config folder.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from telescope.dashboard import code, curves, models, rollouts, row_models, runs, samples, timeline
from telescope.dashboard.api import Registered, Reply, RunId, Store, attachment, check_parameters, replying
from telescope.dashboard.architecture import architecture_of
from telescope.dashboard.changes import changes
from telescope.dashboard.costs import costs
from telescope.dashboard.documents import MAX_BYTES, Document, Documents
from telescope.dashboard.events import run_events
from telescope.dashboard.export import export_run
from telescope.dashboard.registry import Registry, known_fields
from telescope.dashboard.store import RunStore

Route = tuple[str, Callable[..., Any], Any, str]
"""Address, function (see `api.replying`), type of its result, and summary."""

NOT_A_DOCUMENT = (
    'A document is a JSON object with two fields: value, and version, the text that GET returned ("" for a new one).'
)

OPENED = Query(description="Id of the run that the document belongs to; empty for one of the user.")

streams = APIRouter(prefix="/api")
"""Addresses whose responses are not JSON."""

user = APIRouter(prefix="/api/user", tags=["Documents"])


def add_routes(app: FastAPI) -> None:
    """Adds all addresses to the application, whose state has the registry, the projects and the documents."""
    routes: dict[tuple[str, str], list[Route]] = {
        ("Runs", ""): [
            ("/runs", runs.run_rows, models.Runs, "Runs, newest first"),
            ("/projects", app.state.projects.rows, models.Projects, "Projects on W&B whose runs are shown"),
            ("/fields", _fields, list[models.Field], "Fields that the list of runs can show"),
            ("/runs/{run}", runs.run_info, models.RunInfo, "Config, attempts and result of a run"),
            ("/runs/{run}/steps", runs.steps, models.StepColumns, "Steps from a row on, as columns"),
            ("/runs/{run}/health", runs.health_of, models.Health, "Verdict, health, alerts, progress"),
            ("/runs/{run}/now", runs.now_of, models.Now, "What a live run does right now"),
            ("/runs/{run}/model", architecture_of, models.Architecture, "Layers, sizes, parameters of its model"),
            ("/runs/{run}/changes", changes, row_models.Changes, "What changed at a step"),
            ("/runs/{run}/costs", costs, models.Costs, "Where the time of engines and trainer went"),
            ("/compare", runs.compare, models.Comparison, "Differences between runs"),
        ],
        ("Code", "/runs/{run}/code"): [
            ("", code.overview, models.Code, "Git state, uncommitted changes and files of an attempt"),
            ("/file", code.file, models.CodeFile, "Text of a file of an attempt's code"),
            ("/diff", _diff, models.CodeDifference, "Files that differ from another run's code"),
        ],
        ("Samples", "/runs/{run}"): [
            ("/groups", rollouts.groups, list[row_models.Group], "Groups of a step"),
            ("/samples", samples.samples, row_models.Samples, "Search, filter and sort samples"),
            ("/prompts", samples.prompts, row_models.Prompts, "Prompts of the samples that pass the filters"),
            ("/in_flight", rollouts.in_flight, list[row_models.InFlight], "Samples that are being generated"),
            ("/samples/{attempt}/{sample_id:path}", rollouts.detail, row_models.Sample, "Everything about a sample"),
            ("/distribution", curves.distribution, row_models.Distribution, "Distribution per step"),
            ("/tags", _tags, dict[str, list[str]], "Values of each tag of the samples"),
            ("/evals", curves.evals, list[row_models.EvalRow], "Evals of a run"),
            ("/evals/{attempt}/{eval_id:path}/samples", curves.eval_samples, list[row_models.EvalSample],
             "Answers of an eval, by item"),
        ],
        ("Timeline", "/runs/{run}"): [
            ("/spans", timeline.spans, row_models.Spans, "Intervals of a range of time"),
            ("/paths", timeline.paths, row_models.Paths, "What steps waited for"),
            ("/gauges", timeline.gauges, list[row_models.GaugeSeries], "Series of gauges"),
            ("/sandboxes", timeline.sandboxes, list[row_models.SandboxTimes], "Times of sandbox operations"),
            ("/gauges/names", timeline.gauge_names, list[row_models.GaugeName], "Gauges of a run"),
            ("/logs", timeline.logs, row_models.Logs, "Log lines"),
        ],
    }  # fmt: skip
    checked = [Depends(check_parameters)]
    for (tag, prefix), some in routes.items():
        for path, function, model, summary in some:
            app.add_api_route(
                f"/api{prefix}{path}", replying(function), response_model=model, summary=summary, tags=[tag],
                dependencies=checked,
            )  # fmt: skip
    for router in (streams, user):
        app.include_router(router, dependencies=checked)


def _fields(registry: Registry) -> list[dict[str, Any]]:
    return known_fields([listing.fields for _, listing in registry.listings()])


def _tags(store: RunStore) -> dict[str, list[str]]:
    return store.tags()


def _diff(store: RunStore, registry: Registry, against: str, path: str = "") -> dict[str, Any]:
    return code.difference(registry.store(against).run, store.run, path)


@streams.get("/runs/{run}/export", response_class=Response, summary="The run as one HTML file", tags=["Runs"])
def export(request: Request, registry: Registered, run_id: RunId) -> Response:
    content = export_run(registry, run_id, request.app.state.static)
    return Response(content, media_type="text/html; charset=utf-8", headers=attachment(f"{run_id}.html"))


@streams.get(
    "/runs/{run}/samples.jsonl",
    response_class=StreamingResponse,
    summary="Whole samples as lines of JSON",
    tags=["Samples"],
)
def export_samples(run_id: RunId, store: Store, query: Annotated[samples.ExportQuery, Query()]) -> StreamingResponse:
    total, lines = samples.export(store, query)
    headers = attachment(f"{run_id}-samples.jsonl") | {"X-Total-Count": str(total)}
    return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)


@streams.get(
    "/events", response_class=StreamingResponse, summary="Server-sent events: tables that grew, status", tags=["Runs"]
)
def events(
    request: Request, registry: Registered, run: Annotated[list[str], Query(min_length=1, max_length=100)]
) -> Response:
    stores = registry.stores()
    # A page may name a removed run beside an existing one.
    found = {run_id: stores[run_id].run for run_id in run if run_id in stores}
    if not found:
        registry.store(run[0])

    async def is_gone() -> bool:
        for copy in copies.values():
            copy.open()  # a page shows the copy, so it is kept up to date
        return request.app.state.is_closing() or await request.is_disconnected()

    copies = {name: copy for name, run in found.items() if (copy := registry.copy_in(run.files.run_dir)) is not None}
    stream = run_events(found, request.headers.get("last-event-id"), is_gone, copies)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _permanent_id(registry: Registered, run: Annotated[str, OPENED] = "") -> str:
    """Returns the permanent id of a run, which stays when its folder moves."""
    if not run:
        return ""
    opened = registry.find(run).run
    return (opened.info.run_id if opened.info else "") or opened.label


PermanentId = Annotated[str, Depends(_permanent_id)]


@user.get("/{name}", response_model=Document, summary="A document that the user keeps")
def read_document(request: Request, run_id: PermanentId, name: str) -> Reply:
    kept: Documents = request.app.state.documents
    return Reply(request, kept.read(name, run_id))


@user.put("/{name}", response_model=Document, summary="Replaces the version that was read")
async def write_document(request: Request, run_id: PermanentId, name: str) -> Reply:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "A document is sent as application/json.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"A document has at most {MAX_BYTES} bytes.")
    try:
        given = Document.model_validate(json.loads(bytes(body)))
        # Python reads NaN and lone surrogates, which a response cannot contain.
        json.dumps(given.value, allow_nan=False, ensure_ascii=False).encode()
    except ValidationError as error:
        raise HTTPException(400, NOT_A_DOCUMENT) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "The document is not JSON in UTF-8, which has neither NaN nor Infinity.") from error
    return Reply(request, request.app.state.documents.write(name, given.value, given.version, run_id))
