"""Defines addresses for runs: the list, one run, its steps, health and code, events, comparison."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from telescope.dashboard import code, models, row_models, runs
from telescope.dashboard.api import Integer, Reply, Row, Runs, Store, attachment
from telescope.dashboard.architecture import architecture_of
from telescope.dashboard.changes import changes as changes_of
from telescope.dashboard.costs import costs as costs_of
from telescope.dashboard.events import run_events
from telescope.dashboard.export import export_run
from telescope.dashboard.registry import known_fields

router = APIRouter(prefix="/api", tags=["Runs"])
code_router = APIRouter(prefix="/api/runs/{run}/code", tags=["Code"])

FIELDS = Query(description="Names of fields to add to each run, with commas between.")


@router.get("/runs", response_model=models.Runs, summary="Runs, newest first")
def list_runs(request: Request, registry: Runs, fields: Annotated[str, FIELDS] = "") -> Reply:
    return Reply(request, runs.run_rows(registry, [name for name in fields.split(",") if name]))


@router.get("/projects", response_model=models.Projects, summary="Projects on W&B whose runs are shown")
def projects(request: Request) -> Reply:
    return Reply(request, request.app.state.projects.rows())


@router.get("/fields", response_model=list[models.Field], summary="Fields that the list of runs can show")
def fields(request: Request, registry: Runs) -> Reply:
    return Reply(request, known_fields([listing.fields for _, listing in registry.listings()]))


@router.get("/runs/{run}", response_model=models.RunInfo, summary="Config, attempts and result of a run")
def run_info(request: Request, registry: Runs, run: str) -> Reply:
    return Reply(request, runs.run_info(registry, run))


@router.get("/runs/{run}/steps", response_model=models.StepColumns, summary="Steps from a row on, as columns")
def steps(request: Request, store: Store, since: Row = 0) -> Reply:
    return Reply(request, runs.steps(store, since))


@router.get("/runs/{run}/health", response_model=models.Health, summary="Verdict, health, alerts, progress")
def health(request: Request, registry: Runs, run: str) -> Reply:
    return Reply(request, runs.health_of(registry, run))


@router.get("/runs/{run}/now", response_model=models.Now, summary="What a live run does right now")
def now(request: Request, store: Store) -> Reply:
    return Reply(request, runs.now_of(store.run))


@router.get("/runs/{run}/model", response_model=models.Architecture, summary="Layers, sizes, parameters of its model")
def model(request: Request, store: Store) -> Reply:
    return Reply(request, architecture_of(store.run))


@router.get("/runs/{run}/changes", response_model=row_models.Changes, summary="What changed at a step")
def changes(
    request: Request,
    store: Store,
    step: Integer,
    window: Annotated[int, Query(ge=1, le=1000)] = 5,
    metric: str = "reward/all_groups/mean",
) -> Reply:
    return Reply(request, changes_of(store, step, window, metric))


@router.get("/runs/{run}/costs", response_model=models.Costs, summary="Where the time of engines and trainer went")
def costs(request: Request, store: Store) -> Reply:
    return Reply(request, costs_of(store))


@router.get("/runs/{run}/export", response_class=Response, summary="The run as one HTML file")
def export(request: Request, registry: Runs, run: str) -> Response:
    content = export_run(registry, run, request.app.state.static)
    return Response(content, media_type="text/html; charset=utf-8", headers=attachment(f"{run}.html"))


@router.get("/compare", response_model=models.Comparison, summary="Differences between runs")
def compare(
    request: Request, registry: Runs, runs_: Annotated[list[str], Query(alias="runs")], equal: bool = False
) -> Reply:
    # A folder may have a comma in its name, so the pages repeat the parameter.
    run_ids = runs_ if len(runs_) > 1 else [run for run in runs_[0].split(",") if run]
    return Reply(request, runs.compare(registry, run_ids, equal=equal))


@router.get("/events", response_class=StreamingResponse, summary="Server-sent events: tables that grew, status")
def events(
    request: Request, registry: Runs, run: Annotated[list[str], Query(min_length=1, max_length=100)]
) -> Response:
    stores = registry.stores()
    # A page may name a removed run beside an existing one.
    found = {run_id: stores[run_id].run for run_id in run if run_id in stores}
    if not found:
        registry.store(run[0])

    async def is_gone() -> bool:
        for copy in copies.values():
            copy.open()  # a page shows the copy, so it is kept up to date
        return await request.is_disconnected()

    copies = {name: copy for name, run in found.items() if (copy := registry.copy_in(run.files.run_dir)) is not None}
    stream = run_events(found, request.headers.get("last-event-id"), is_gone, copies)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


@code_router.get("", response_model=models.Code, summary="Git state, uncommitted changes and files of an attempt")
def overview(request: Request, store: Store, attempt: Integer | None = None) -> Reply:
    return Reply(request, code.overview(store.run, attempt))


@code_router.get("/file", response_model=models.CodeFile, summary="Text of a file of an attempt's code")
def file(request: Request, store: Store, path: str, attempt: Integer | None = None) -> Reply:
    return Reply(request, code.file(store.run, attempt, path))


@code_router.get("/diff", response_model=models.CodeDifference, summary="Files that differ from another run's code")
def diff(request: Request, store: Store, registry: Runs, against: str, path: str = "") -> Reply:
    return Reply(request, code.difference(registry.store(against).run, store.run, path))
