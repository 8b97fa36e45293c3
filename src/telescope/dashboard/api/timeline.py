"""Defines addresses for ranges of time: spans, gauges, log lines."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from telescope.dashboard import row_models, timeline
from telescope.dashboard.api import Reply, Store

router = APIRouter(prefix="/api/runs/{run}", tags=["Timeline"])


@router.get("/spans", response_model=row_models.Spans, summary="Intervals of a range of time")
def spans(
    request: Request,
    store: Store,
    start: float | None = None,
    end: float | None = None,
    limit: Annotated[int, Query(ge=1, le=500_000)] = 40_000,
    buckets: Annotated[int, Query(ge=1, le=20_000)] = 2000,
) -> Reply:
    return Reply(request, timeline.spans(store, start, end, limit, buckets))


@router.get("/paths", response_model=row_models.Paths, summary="What steps waited for")
def paths(
    request: Request,
    store: Store,
    first: int,
    last: int,
    most: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Reply:
    return Reply(request, timeline.paths(store, first, last, most))


@router.get("/gauges", response_model=list[row_models.GaugeSeries], summary="Series of gauges")
def gauges(
    request: Request,
    store: Store,
    names: str,
    start: float | None = None,
    end: float | None = None,
    points: Annotated[int, Query(ge=1, le=10_000)] = 400,
) -> Reply:
    return Reply(request, timeline.gauges(store, names.split(","), start, end, points))


@router.get("/sandboxes", response_model=list[row_models.SandboxTimes], summary="Times of sandbox operations")
def sandboxes(request: Request, store: Store, start: float | None = None, end: float | None = None) -> Reply:
    return Reply(request, timeline.sandboxes(store, start, end))


@router.get("/gauges/names", response_model=list[row_models.GaugeName], summary="Gauges of a run")
def gauge_names(request: Request, store: Store) -> Reply:
    return Reply(request, timeline.gauge_names(store))


@router.get("/logs", response_model=row_models.Logs, summary="Log lines")
def logs(request: Request, store: Store, query: Annotated[timeline.LogQuery, Query()]) -> Reply:
    return Reply(request, timeline.logs(store, query))
