"""The FastAPI application: addresses of the API, and the pages.

Owns addresses, parameters and status codes. What an address returns is computed in the other modules of this package. A
run is named by an id that the registry knows; no address or parameter becomes a path below it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import pydantic_core
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import Field
from starlette.middleware.gzip import GZipMiddleware

from telescope import __version__
from telescope.dashboard import curves, models, rollouts, runs, timeline
from telescope.dashboard.events import run_events
from telescope.dashboard.registry import Registry
from telescope.dashboard.safety import Safety
from telescope.dashboard.store import NotFoundError
from telescope.errors import UserError

STATIC = Path(__file__).parent / "static"
"""The built pages."""

BUILD_COMMAND = "make dashboard"

COMPRESSED_BYTES = 2000
"""Smaller answers are sent as they are."""

LARGEST = 2**63 - 1
"""Largest integer of a column."""

Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Row = Annotated[int, Query(ge=0, le=LARGEST)]
OptionalRow = Annotated[int | None, Query(ge=0, le=LARGEST)]


class Reply(Response):
    """A JSON answer. NaN and infinity are null. Has an ETag, so that an unchanged answer is sent once."""

    media_type = "application/json"

    def __init__(self, request: Request, value: Any) -> None:
        body = pydantic_core.to_json(value, inf_nan_mode="null", fallback=_plain)
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            super().__init__(status_code=304, headers=headers)
        else:
            super().__init__(body, headers=headers)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def create_app(
    roots: Sequence[Path], *, token: str | None = None, hosts: Iterable[str] = (), static: Path = STATIC
) -> FastAPI:
    """Returns the application over the runs below `roots`, each of which is a run or a folder of runs."""
    app = FastAPI(
        title="Telescope", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json"
    )
    registry = Registry(roots)
    _add_runs(app, registry)
    _add_rollouts(app, registry)
    _add_timeline(app, registry)
    _add_rest(app, registry)
    _add_pages(app, static)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=1)
    app.add_middleware(Safety, token=token, hosts=tuple(hosts))

    @app.exception_handler(UserError)
    def user_error(_request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 404 if isinstance(error, NotFoundError) else 400)

    return app


def _add_runs(app: FastAPI, registry: Registry) -> None:
    @app.get("/api/runs", response_model=models.Runs, summary="Runs, newest first")
    def list_runs(request: Request) -> Reply:
        return Reply(request, runs.run_rows(registry))

    @app.get("/api/runs/{run}", response_model=models.RunInfo, summary="Config, attempts and result of a run")
    def run_info(request: Request, run: str) -> Reply:
        return Reply(request, runs.run_info(registry, run))

    @app.get("/api/runs/{run}/steps", response_model=models.Steps, summary="Steps from a row on, as columns")
    def steps(request: Request, run: str, since: Row = 0) -> Reply:
        return Reply(request, runs.steps(registry.store(run), since))

    @app.get("/api/compare", response_model=models.Comparison, summary="Differences between runs")
    def compare(request: Request, runs_: Annotated[str, Query(alias="runs")]) -> Reply:
        return Reply(request, runs.compare(registry, [run for run in runs_.split(",") if run]))

    @app.get("/api/runs/{run}/health", response_model=models.Health, summary="Verdict, health, alerts, progress")
    def health(request: Request, run: str) -> Reply:
        return Reply(request, runs.health_of(registry, run))

    @app.get("/api/runs/{run}/distribution", response_model=models.Distribution, summary="Distribution per step")
    def distribution(request: Request, run: str, metric: str = "reward", environment: str = "") -> Reply:
        return Reply(request, curves.distribution(registry.store(run), metric, environment))

    @app.get("/api/runs/{run}/evals", response_model=list[models.Eval], summary="Evals of a run")
    def evals(request: Request, run: str) -> Reply:
        return Reply(request, curves.evals(registry.store(run)))

    @app.get(
        "/api/runs/{run}/evals/{attempt}/{eval_id:path}/samples",
        response_model=list[models.EvalSample],
        summary="Answers of an eval, by item",
    )
    def eval_samples(request: Request, run: str, attempt: Integer, eval_id: str) -> Reply:
        return Reply(request, curves.eval_samples(registry.store(run), attempt, eval_id))


def _add_rollouts(app: FastAPI, registry: Registry) -> None:
    @app.get("/api/runs/{run}/groups", response_model=list[models.Group], summary="Groups of a step, or from a row on")
    def groups(request: Request, run: str, step: Integer | None = None, since: OptionalRow = None) -> Reply:
        if step is None and since is None:
            raise HTTPException(400, "Groups need step=N or since=ROW.")
        return Reply(request, rollouts.groups(registry.store(run), step, since))

    @app.get("/api/runs/{run}/samples", response_model=models.Samples, summary="Search, filter and sort samples")
    def samples(
        request: Request,
        run: str,
        search: str = "",
        status: str = "",
        environment: str = "",
        reward: str = "",
        age: str = "",
        stop_reason: str = "",
        eval_name: str = "",
        step_min: Integer | None = None,
        step_max: Integer | None = None,
        sort: str = "step",
        offset: Row = 0,
        limit: Annotated[int, Query(ge=0, le=10_000)] = 100,
    ) -> Reply:
        facets = {"status": status, "environment": environment, "reward": reward, "age": age}
        found = rollouts.samples(
            registry.store(run),
            facets={**facets, "stop_reason": stop_reason, "eval_name": eval_name},
            search=search,
            step_min=step_min,
            step_max=step_max,
            sort=sort,
            offset=offset,
            limit=limit,
        )
        return Reply(request, found)

    @app.get(
        "/api/runs/{run}/samples/{attempt}/{sample_id:path}",
        response_model=models.Sample,
        summary="Everything about a sample",
    )
    def sample(request: Request, run: str, attempt: Integer, sample_id: str) -> Reply:
        return Reply(request, rollouts.detail(registry.store(run), attempt, sample_id))


def _add_timeline(app: FastAPI, registry: Registry) -> None:
    @app.get("/api/runs/{run}/spans", response_model=models.Spans, summary="Intervals of a range of time")
    def spans(
        request: Request,
        run: str,
        start: float | None = None,
        end: float | None = None,
        limit: Annotated[int, Query(ge=1, le=500_000)] = 40_000,
        buckets: Annotated[int, Query(ge=1, le=20_000)] = 2000,
    ) -> Reply:
        return Reply(request, timeline.spans(registry.store(run), start, end, limit, buckets))

    @app.get("/api/runs/{run}/gauges", response_model=list[models.GaugeSeries], summary="Series of gauges")
    def gauges(
        request: Request,
        run: str,
        names: str,
        start: float | None = None,
        end: float | None = None,
        points: Annotated[int, Query(ge=1, le=10_000)] = 400,
    ) -> Reply:
        return Reply(request, timeline.gauges(registry.store(run), names.split(","), start, end, points))

    @app.get("/api/runs/{run}/gauges/names", response_model=list[models.GaugeName], summary="Gauges of a run")
    def gauge_names(request: Request, run: str) -> Reply:
        return Reply(request, timeline.gauge_names(registry.store(run)))

    @app.get("/api/runs/{run}/logs", response_model=models.Logs, summary="Log lines")
    def logs(
        request: Request,
        run: str,
        since: OptionalRow = None,
        before: OptionalRow = None,
        level: str = "",
        component: str = "",
        search: str = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 400,
    ) -> Reply:
        found = timeline.logs(
            registry.store(run),
            since=since,
            before=before,
            level=level,
            component=component,
            search=search,
            limit=limit,
        )
        return Reply(request, found)


def _add_rest(app: FastAPI, registry: Registry) -> None:
    @app.get("/api/events", response_class=StreamingResponse, summary="Server-sent events: tables that grew, status")
    def events(request: Request, run: str) -> StreamingResponse:
        found = registry.store(run).run
        stream = run_events(found, request.headers.get("last-event-id"), request.is_disconnected)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @app.get("/api/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(_api_page(app))

    @app.get("/api/{rest:path}", include_in_schema=False)
    def nothing(rest: str) -> Response:
        raise HTTPException(404, f"There is no address /api/{rest}. /api/docs lists them.")


def _add_pages(app: FastAPI, static: Path) -> None:
    base = static.resolve()

    @app.get("/{path:path}", include_in_schema=False)
    def page(path: str) -> Response:
        found = _file(base, path)
        if found is not None:
            hashed = path.startswith("assets/")
            cache = "public, max-age=31536000, immutable" if hashed else "no-cache"
            return FileResponse(found, headers={"Cache-Control": cache})
        if path.startswith("assets/"):
            raise HTTPException(404, "There is no such file.")
        index = base / "index.html"
        if index.is_file():
            return FileResponse(index, headers={"Cache-Control": "no-cache"})
        text = f"<p>The pages are not built. Build them with</p><pre>{BUILD_COMMAND}</pre><p>and reload this page.</p>"
        return HTMLResponse(f"<!doctype html><title>Telescope</title>{text}", 503)


def _file(base: Path, path: str) -> Path | None:
    """Returns a file of the built pages, or None for any path that is none or leads elsewhere."""
    try:
        found = (base / path.lstrip("/")).resolve()
        return found if found.is_relative_to(base) and found.is_file() else None
    except (OSError, ValueError):
        return None


def _api_page(app: FastAPI) -> str:
    """Returns the addresses of the API as a page without scripts."""
    parts = []
    for path, methods in app.openapi()["paths"].items():
        operation = methods["get"]
        names = ", ".join(parameter["name"] for parameter in operation.get("parameters", ()))
        parts.append(f"<dt><code>{escape(path)}</code></dt><dd>{escape(operation['summary'])}. {escape(names)}</dd>")
    link = '<a href="/api/openapi.json">openapi.json</a>'
    return (
        f"<!doctype html><title>Telescope API</title><h1>API</h1><p>{link} has the types.</p><dl>{''.join(parts)}</dl>"
    )
