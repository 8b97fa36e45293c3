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
from starlette.middleware.gzip import GZipMiddleware

from telescope import __version__
from telescope.dashboard import models, runs
from telescope.dashboard.events import run_events
from telescope.dashboard.registry import Registry, UnknownRunError
from telescope.dashboard.safety import Safety
from telescope.errors import UserError

STATIC = Path(__file__).parent / "static"
"""The built pages."""

BUILD_COMMAND = "make dashboard"

COMPRESSED_BYTES = 2000
"""Smaller answers are sent as they are."""

Row = Annotated[int, Query(ge=0)]


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
    _add_api(app, registry)
    _add_pages(app, static)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=1)
    app.add_middleware(Safety, token=token, hosts=tuple(hosts))

    @app.exception_handler(UnknownRunError)
    def unknown_run(_request: Request, error: UnknownRunError) -> JSONResponse:
        return JSONResponse({"detail": f"There is no run {str(error)!r} here. The page of runs lists them."}, 404)

    @app.exception_handler(UserError)
    def user_error(_request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    return app


def _add_api(app: FastAPI, registry: Registry) -> None:
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

    @app.get("/api/events", response_class=StreamingResponse, summary="Server-sent events: tables that grew, status")
    async def events(request: Request, run: str) -> StreamingResponse:
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
