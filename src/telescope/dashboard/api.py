"""Turns functions that return plain data into endpoints of the API, with checked parameters and JSON responses."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, HTTPException, Path, Query, Request
from fastapi.responses import Response
from pydantic import Field

from telescope.dashboard.models import to_json
from telescope.dashboard.registry import Registry
from telescope.dashboard.store import RunStore
from telescope.record.reader import Run

LARGEST = 2**63 - 1
"""Largest integer of a column."""

MOST_PARAMETERS = 120
"""Most parameters of a request. Each range becomes a condition: DuckDB plans 100 in 1.5 s, and 1,500 in minutes."""

MOST_VALUES = 1000
"""Most values of a list parameter, for the same reason."""

Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Row = Annotated[int, Query(ge=0, le=LARGEST)]
OptionalRow = Annotated[int | None, Query(ge=0, le=LARGEST)]
RunId = Annotated[str, Path(alias="run")]


def _registry(request: Request) -> Registry:
    return request.app.state.registry


Registered = Annotated[Registry, Depends(_registry)]
"""All runs that the server shows."""


def _store(run_id: RunId, registry: Registered) -> RunStore:
    return registry.store(run_id)


Store = Annotated[RunStore, Depends(_store)]
"""The run that the address names. The response for an unknown run is 404."""


def _run(store: Store) -> Run:
    return store.run


SUPPLIED: dict[Any, Any] = {Registry: Registered, RunStore: Store, Run: Annotated[Run, Depends(_run)]}
"""Types of parameters that a request does not have, and where they come from."""


def replying(function: Callable[..., Any]) -> Callable[..., Reply]:
    """Returns an endpoint that replies with the result of a function.

    Parameters of a type in `SUPPLIED` are the addressed run or all runs. The others are parameters of the request.
    """

    def endpoint(request: Request, **given: Any) -> Reply:
        return Reply(request, function(**given))

    signature = inspect.signature(function)
    parameters = [inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)]
    for one in signature.parameters.values():
        known = SUPPLIED.get(one.annotation, one.annotation)
        parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=known))
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    endpoint.__name__ = function.__name__
    return endpoint


def check_parameters(request: Request) -> None:
    """Refuses too many parameters, and unknown parameters: if they were ignored, a wrong filter would select all."""
    given = request.query_params.multi_items()
    longest = max((value.count(",") + 1 for _, value in given), default=0)
    for count, limit, what in ((len(given), MOST_PARAMETERS, "parameters"), (longest, MOST_VALUES, "values in a list")):
        if count > limit:
            raise HTTPException(400, f"The request has {count:,} {what}. At most {limit:,} are possible.")
    address = request.app.openapi()["paths"][request.scope["route"].path_format][request.method.lower()]
    known = [parameter["name"] for parameter in address.get("parameters", ()) if parameter["in"] == "query"]
    for name in request.query_params:
        if name not in known:
            raise HTTPException(400, f"There is no parameter {name!r} here. The parameters are {', '.join(known)}.")


def attachment(name: str) -> dict[str, str]:
    """Returns the headers of a download. Headers are Latin-1, so another name is also given as in RFC 5987."""
    safe = re.sub(r"[^\w.-]+", "_", name)
    plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)
    encoded = "" if plain == safe else f"; filename*=UTF-8''{quote(safe)}"
    return {"Content-Disposition": f'attachment; filename="{plain}"{encoded}', "Cache-Control": "no-store"}


class Reply(Response):
    """A JSON response. NaN and infinity are null. Has an ETag, so that an unchanged response is sent once."""

    media_type = "application/json"

    def __init__(self, request: Request, value: Any) -> None:
        body = to_json(value)
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            super().__init__(status_code=304, headers=headers)
        else:
            super().__init__(body, headers=headers)
