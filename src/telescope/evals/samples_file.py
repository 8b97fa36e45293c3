"""Stores scores of finished samples, to continue an interrupted evaluation.

A line of JSON per sample, written when it is scored. Samples without a score are not kept; they are sampled again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from telescope.evals.runner import EvalItem, PlannedEval
from telescope.rollout.trajectory import Trajectory

Scores = dict[tuple[int, int], dict[str, float]]
"""Metrics by item and completion."""


class SamplesFile:
    """The finished samples of several models. `model` is the identity of the current one.

    Drops an incomplete last line, which a kill leaves.
    """

    def __init__(self, path: Path) -> None:
        self.model = ""
        self._finished: dict[tuple[str, int], dict[tuple[int, int], tuple[str, dict[str, float]]]] = defaultdict(dict)
        end = 0
        if path.is_file():
            for line in path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                row = json.loads(line)
                self._finished[row["model"], row["eval"]][row["item"], row["completion"]] = row["uid"], row["scores"]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(end)

    def __enter__(self) -> SamplesFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def finished(self, plan: PlannedEval) -> Scores:
        """Returns the samples of the current model that are done. An item that has changed is not."""
        uids = {item.index: item.prompt.sample_uid for item in plan.items}
        return {
            key: scores
            for key, (uid, scores) in self._finished[self.model, plan.number].items()
            if uids.get(key[0]) == uid
        }

    def has_all(self, model: str, plans: Sequence[PlannedEval]) -> bool:
        """Returns whether every sample of a model is done."""
        self.model = model
        return all(len(self.finished(plan)) == plan.num_samples for plan in plans)

    def add(self, plan: PlannedEval, item: EvalItem, sample: Trajectory, scores: Mapping[str, float]) -> None:
        """Keeps a scored sample."""
        uid = item.prompt.sample_uid
        self._finished[self.model, plan.number][item.index, sample.sample_index] = uid, dict(scores)
        row: dict[str, Any] = {
            "model": self.model, "eval": plan.number, "name": plan.name, "item": item.index,
            "completion": sample.sample_index, "uid": uid, "scores": dict(scores),
        }  # fmt: skip
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
