"""Builds the FastAPI application from the addresses of `telescope.dashboard.routes` and the pages.

Owns the status codes of errors, the page about the API and the built files. No address becomes a path below a run.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Scope

from telescope import __version__
from telescope.dashboard.documents import ConflictError, Documents, user_folder
from telescope.dashboard.projects import Projects
from telescope.dashboard.registry import Registry
from telescope.dashboard.remote import WandbRuns
from telescope.dashboard.routes import add_routes
from telescope.dashboard.safety import Safety
from telescope.dashboard.store import NotFoundError
from telescope.errors import UserError

STATIC = Path(__file__).parent / "static"
"""The built pages."""

ABOUT_API = (
    "What the pages of telescope ui read: runs, their steps, samples, spans and logs, as JSON. "
    "Times are Unix seconds, steps are numbered from 0, and a number that was not measured is null."
)

SUBJECTS = [
    {"name": "Runs", "description": "The list of runs; one run, its steps and its health; comparison, export, events."},
    {"name": "Code", "description": "Files, uncommitted changes and configs that a start kept."},
    {"name": "Samples", "description": "Groups, samples and their tokens, distributions, evals."},
    {"name": "Timeline", "description": "Spans, gauges and log lines."},
    {"name": "Documents", "description": "What the user keeps: layouts, columns, tags, notes. Only these are written."},
]

COMPRESSED_BYTES = 2000
"""Smaller responses are not compressed."""


def create_app(
    roots: Sequence[Path],
    *,
    remotes: Sequence[WandbRuns] = (),
    token: str | None = None,
    hosts: Iterable[str] = (),
    static: Path = STATIC,
    documents: Path | None = None,
) -> FastAPI:
    """Builds the application. `roots` are runs or folders of runs, `remotes` are runs on W&B.

    The user's documents are in the folder `documents`, by default in the user's config folder.
    """
    app = FastAPI(
        title="Telescope API", description=ABOUT_API, openapi_tags=SUBJECTS, version=__version__,
        docs_url=None, redoc_url=None, openapi_url="/api/openapi.json",
    )  # fmt: skip
    app.state.documents = Documents(documents or user_folder())
    app.state.projects = Projects(list(remotes), app.state.documents)
    app.state.registry = Registry(roots, app.state.projects.remotes)
    app.state.static = static
    app.state.is_closing = lambda: False  # of the server, whose streams must end by themselves
    add_routes(app)

    @app.get("/api/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(_api_page(app))

    @app.get("/api/{rest:path}", include_in_schema=False)
    def nothing(rest: str) -> Response:
        raise HTTPException(404, f"There is no address /api/{rest}. /api/docs lists them.")

    app.openapi()  # once, because every request checks its parameters against the schema
    app.mount("/", Pages(static))
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=1)
    app.add_middleware(Safety, token=token, hosts=tuple(hosts))

    @app.exception_handler(UserError)
    def user_error(_request: Request, error: UserError) -> JSONResponse:
        status = {NotFoundError: 404, ConflictError: 409}.get(type(error), 400)
        return JSONResponse({"detail": str(error)}, status)

    @app.exception_handler(Exception)  # which the server then logs
    def unexpected(_request: Request, error: Exception) -> JSONResponse:
        what = f"{type(error).__name__}: {error}"
        return JSONResponse({"detail": f"The dashboard failed here, and its terminal has the details. {what}"}, 500)

    return app


class Pages(StaticFiles):
    """The built pages. Files below `assets` have digests in their names, so browsers keep them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory=directory, check_dir=False)
        self.config_checked = True  # so that the server starts before the pages are built

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Returns a file, or a page that explains why the pages are missing."""
        try:
            answer = await super().get_response("index.html" if path == "." else path, scope)
        except (HTTPException, OSError, ValueError):
            title = "<!doctype html><title>Telescope</title>"
            if path != ".":  # pages are named after the #
                text = '<p>There is no page at this address.</p><p><a href="/">All runs</a></p>'
                return HTMLResponse(title + text, 404)
            text = "<p>The pages are not built. Build them with</p><pre>make dashboard</pre><p>and reload.</p>"
            return HTMLResponse(title + text, 503)
        is_hashed = path.startswith("assets/")
        answer.headers["Cache-Control"] = "public, max-age=31536000, immutable" if is_hashed else "no-cache"
        return answer


def _api_page(app: FastAPI) -> str:
    """Returns the addresses of the API as a page without scripts."""
    schema = app.openapi()
    parts: dict[str, list[str]] = {subject["name"]: [] for subject in SUBJECTS}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            term = path if method == "get" else f"{method.upper()} {path}"
            query = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
            given = [
                f"{one['name']} ({text.rstrip('.')})" if (text := one.get("description")) else one["name"]
                for one in query
            ]
            about = f"{operation['summary']}." + (f" Parameters: {', '.join(given)}." if given else "")
            (tag,) = operation["tags"]
            parts[tag].append(f"<dt><code>{escape(term)}</code></dt><dd>{escape(about)}</dd>")
    sections = "".join(
        f"<h2>{name}</h2><p>{escape(subject['description'])}</p><dl>{''.join(parts[name])}</dl>"
        for subject in SUBJECTS
        if parts[name := subject["name"]]
    )
    link = '<a href="/api/openapi.json">openapi.json</a> has the types of all answers.'
    title = escape(schema["info"]["title"])
    head = f'<!doctype html><html lang="en"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"{head}<h1>{title}</h1><p>{escape(ABOUT_API)} {link}</p>{sections}</html>"
