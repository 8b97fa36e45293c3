"""Defines addresses for the code that runs started with."""

from fastapi import APIRouter, Request

from telescope.dashboard import code, models
from telescope.dashboard.api import Integer, Reply, Runs, Store

router = APIRouter(prefix="/api/runs/{run}/code", tags=["Code"])


@router.get("", response_model=models.Code, summary="Git state, uncommitted changes and files of an attempt")
def overview(request: Request, store: Store, attempt: Integer | None = None) -> Reply:
    return Reply(request, code.overview(store.run, attempt))


@router.get("/file", response_model=models.CodeFile, summary="Text of a file of an attempt's code")
def file(request: Request, store: Store, path: str, attempt: Integer | None = None) -> Reply:
    return Reply(request, code.file(store.run, attempt, path))


@router.get("/diff", response_model=models.CodeDifference, summary="Files that differ from another run's code")
def diff(request: Request, store: Store, registry: Runs, against: str, path: str = "") -> Reply:
    return Reply(request, code.difference(registry.store(against).run, store.run, path))
