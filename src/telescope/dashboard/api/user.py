"""Defines addresses for the user's documents. Only these change something, in the user's config folder."""

import json
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from pydantic import ValidationError

from telescope.dashboard.api import Reply, Runs
from telescope.dashboard.documents import MAX_BYTES, Document, Documents

router = APIRouter(prefix="/api/user", tags=["Documents"])

NOT_A_DOCUMENT = (
    'A document is a JSON object with two fields: value, and version, the text that GET returned ("" for a new one).'
)

OPENED = Query(description="Id of the run that the document belongs to; empty for one of the user.")


def _documents(request: Request) -> Documents:
    found: Documents = request.app.state.documents
    return found


def _run_id(registry: Runs, run: Annotated[str, OPENED] = "") -> str:
    """Returns the permanent id of a run, which stays when its folder moves."""
    if not run:
        return ""
    opened = registry.find(run).run
    return (opened.info.run_id if opened.info else "") or opened.label


Kept = Annotated[Documents, Depends(_documents)]
RunId = Annotated[str, Depends(_run_id)]


@router.get("/{name}", response_model=Document, summary="A document that the user keeps")
def read_document(request: Request, kept: Kept, run_id: RunId, name: str) -> Reply:
    return Reply(request, kept.read(name, run_id))


@router.put("/{name}", response_model=Document, summary="Replaces the version that was read")
async def write_document(request: Request, kept: Kept, run_id: RunId, name: str) -> Reply:
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
    return Reply(request, kept.write(name, given.value, given.version, run_id))
