"""Results of checks. Pure functions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from telescope.weights.probe import loosest_tolerance


@dataclass(frozen=True)
class Check:
    """One claim with its measurement, its bound and the result. `values` holds all numbers."""

    name: str
    measured: str
    bound: str
    ok: bool
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """All checks of one verification, in order."""

    checks: list[Check] = field(default_factory=list)
    config_hash: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Returns whether there are checks and all of them passed."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `--json`."""
        return {"ok": self.ok, **asdict(self), "seconds": round(self.seconds, 3)}


def compare_logprobs(
    name: str, one_N: np.ndarray, other_N: np.ndarray, dtypes: Sequence[str], temperature: float
) -> Check:
    """Compares two computations of the same logprobs. The tolerance is that of their dtypes.

    The mean is bounded, and in float32 the maximum. In half precision a rare token can have a large error, so the 99th
    percentile is bounded instead.
    """
    difference_N = np.abs(np.asarray(one_N, np.float64) - np.asarray(other_N, np.float64))
    if difference_N.size == 0:
        return Check(name, "no token to compare", "", ok=False)
    dtype, tolerance = loosest_tolerance(dtypes, temperature)
    maximum, mean, p99 = difference_N.max(), difference_N.mean(), np.quantile(difference_N, 0.99)
    outermost, of = (p99, "p99") if dtype != "float32" else (maximum, "max")
    return Check(
        name,
        f"mean {mean:.1e}, p99 {p99:.1e}, max {maximum:.1e} nats over {difference_N.size:,} tokens",
        f"mean {tolerance.mean:.1e}, {of} {tolerance.maximum:.1e} ({dtype})",
        # Written so that NaN fails.
        ok=bool(mean <= tolerance.mean and outermost <= tolerance.maximum),
        values={
            "tokens": int(difference_N.size), "mean": float(mean), "p99": float(p99), "max": float(maximum),
            "allowed_mean": tolerance.mean, f"allowed_{of}": tolerance.maximum, "temperature": temperature,
        },
    )  # fmt: skip
