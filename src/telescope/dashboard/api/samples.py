"""Defines addresses for samples: groups, search, one sample, distributions, evals."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from telescope.dashboard import curves, rollouts, row_models
from telescope.dashboard import samples as samples_of
from telescope.dashboard.api import Integer, Reply, Store, attachment

router = APIRouter(prefix="/api/runs/{run}", tags=["Samples"])


@router.get("/groups", response_model=list[row_models.Group], summary="Groups of a step")
def groups(request: Request, store: Store, step: Integer) -> Reply:
    return Reply(request, rollouts.groups(store, step))


@router.get("/samples", response_model=row_models.Samples, summary="Search, filter and sort samples")
def samples(request: Request, store: Store, query: Annotated[samples_of.SampleQuery, Query()]) -> Reply:
    return Reply(request, samples_of.samples(store, query))


@router.get("/prompts", response_model=row_models.Prompts, summary="Prompts of the samples that pass the filters")
def prompts(request: Request, store: Store, query: Annotated[samples_of.PromptQuery, Query()]) -> Reply:
    return Reply(request, samples_of.prompts(store, query))


@router.get("/samples.jsonl", response_class=StreamingResponse, summary="Whole samples as lines of JSON")
def export(run: str, store: Store, query: Annotated[samples_of.ExportQuery, Query()]) -> StreamingResponse:
    total, lines = samples_of.export(store, query)
    headers = attachment(f"{run}-samples.jsonl") | {"X-Total-Count": str(total)}
    return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)


@router.get("/in_flight", response_model=list[row_models.InFlight], summary="Samples that are being generated")
def in_flight(request: Request, store: Store) -> Reply:
    return Reply(request, rollouts.in_flight(store))


@router.get(
    "/samples/{attempt}/{sample_id:path}", response_model=row_models.Sample, summary="Everything about a sample"
)
def sample(request: Request, store: Store, attempt: Integer, sample_id: str) -> Reply:
    return Reply(request, rollouts.detail(store, attempt, sample_id))


@router.get("/distribution", response_model=row_models.Distribution, summary="Distribution per step")
def distribution(
    request: Request,
    store: Store,
    metric: str = "reward",
    environment: str = "",
    tag: str = "",
    histogram: bool = False,
) -> Reply:
    return Reply(request, curves.distribution(store, metric, environment, tag, histogram=histogram))


@router.get("/tags", response_model=dict[str, list[str]], summary="Values of each tag of the samples")
def tags(request: Request, store: Store) -> Reply:
    return Reply(request, store.tags())


@router.get("/evals", response_model=list[row_models.EvalRow], summary="Evals of a run")
def evals(request: Request, store: Store) -> Reply:
    return Reply(request, curves.evals(store))


@router.get(
    "/evals/{attempt}/{eval_id:path}/samples",
    response_model=list[row_models.EvalSample],
    summary="Answers of an eval, by item",
)
def eval_samples(request: Request, store: Store, attempt: Integer, eval_id: str) -> Reply:
    return Reply(request, curves.eval_samples(store, attempt, eval_id))
