"""Measures what a rollout of many calls costs the driver, against one call with as many tokens.

    python benchmarks/long_rollouts.py                       1, 8, 50 and 200 calls
    python benchmarks/long_rollouts.py --quick               fewer repetitions
    python benchmarks/long_rollouts.py --json results.json   written at the end, with machine and commit

CPU time in microseconds for one sample of 2,000 sampled tokens: to unpickle it, to take its training sequences, and to
build its row of the record. A rollout worker folds an ended sample (`Trajectory.fold`); `turns` shows the cost of one
that is not.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from command_line import parser_of, show, write_json
from measure import provenance

from telescope.environments.types import RewardRecord
from telescope.inference.base import Generation
from telescope.orchestrator.record_rows import sample_row
from telescope.rollout.trajectory import Trajectory, Turn

NUM_TOKENS = 2_000
PARTS: dict[str, Callable[[Trajectory, bytes], object]] = {
    "unpickle": lambda sample, data: pickle.loads(data),
    "sequences": lambda sample, data: sample.sequences(),
    "row": lambda sample, data: sample_row(sample, "prompt", status="kept", reason=None, step=1),
}


def sample_of(num_calls: int) -> Trajectory:
    """Returns a scored sample whose calls extend each other."""
    made = Trajectory("5-0", 5, 0, "agent", reward=RewardRecord(1.0, {"correct": 1.0}, {}, [], {}))
    for call in range(num_calls):
        length = NUM_TOKENS // num_calls
        ids, logprobs = np.arange(length, dtype=np.int64), np.full(length, -0.5, np.float32)
        generation = Generation(ids, logprobs, "stop", [(3, 0, length)])
        made.turns.append(Turn([1] * 20, generation, parent=call - 1 if call else None))
    return made


def microseconds(work: Callable[[], object], repetitions: int) -> float:
    """Returns the median CPU time of 5 rounds, for one repetition."""
    rounds = []
    for _ in range(5):
        begin = time.process_time()
        for _ in range(repetitions):
            work()
        rounds.append((time.process_time() - begin) / repetitions * 1e6)
    return statistics.median(rounds)


def main() -> int:
    arguments = parser_of(__doc__, "fewer repetitions").parse_args()
    rows: list[dict[str, Any]] = []
    repetitions = 50 if arguments.quick else 500
    for num_calls in (1, 8, 50, 200):
        for form in ("folded", "turns"):
            sample = sample_of(num_calls)
            if form == "folded":
                sample.fold()
            data = pickle.dumps(sample, 5)
            costs = {name: microseconds(partial(part, sample, data), repetitions) for name, part in PARTS.items()}
            rows.append({"calls": num_calls, "sample": form, "bytes": len(data), **costs})
    show(
        ("sample", "calls", *(f"{name}, us" for name in PARTS), "bytes"),
        [(r["sample"], str(r["calls"]), *(f"{r[name]:.0f}" for name in PARTS), f"{r['bytes']:,}") for r in rows],
    )
    write_json(arguments.json, {"benchmark": "long_rollouts", "where": provenance(["numpy"]), "results": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
