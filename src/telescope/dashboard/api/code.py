"""Addresses of the code that runs started with."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from telescope.dashboard import code, models
from telescope.dashboard.api import Integer, Reply, Runs, Store
from telescope.dashboard.code import Snapshots

router = APIRouter(prefix="/api/runs/{run}/code", tags=["Code"])


def _snapshots(request: Request) -> Snapshots:
    found: Snapshots = request.app.state.snapshots
    return found


Archives = Annotated[Snapshots, Depends(_snapshots)]


@router.get("", response_model=models.Code, summary="Git state, uncommitted changes and files of an attempt")
def overview(request: Request, store: Store, archives: Archives, attempt: Integer | None = None) -> Reply:
    return Reply(request, code.overview(archives, store.run, attempt))


@router.get("/file", response_model=models.CodeFile, summary="Text of a file of an attempt's code")
def file(request: Request, store: Store, archives: Archives, path: str, attempt: Integer | None = None) -> Reply:
    return Reply(request, code.file(archives, store.run, attempt, path))


@router.get("/diff", response_model=models.CodeDifference, summary="Files that differ from another run's code")
def diff(request: Request, store: Store, registry: Runs, archives: Archives, against: str, path: str = "") -> Reply:
    return Reply(request, code.difference(archives, registry.store(against).run, store.run, path))
