"""Names of the algorithms, and their properties for rules between fields.

The algorithm `x` is `ALGORITHM` in `telescope.algorithms.x`; that package needs numpy, which this one must not import.
To add an algorithm, add that file and one line here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

AdvantageNorm = Literal["group", "batch"]
"""What advantages are normalized over: each group by itself, or the whole training batch."""


@dataclass(frozen=True)
class AlgorithmFacts:
    """What the configuration must know of an algorithm."""

    advantage_norms: tuple[AdvantageNorm, ...] = ("group", "batch")
    """The values of `advantage_norm` that make sense; others are refused."""
    holds_ratio: bool = False
    """Its loss is built on the importance ratio and bounds it: nothing may clip or correct by that ratio again."""


ALGORITHM_FACTS: dict[str, AlgorithmFacts] = {
    "grpo": AlgorithmFacts(),
    "rloo": AlgorithmFacts(advantage_norms=("group",)),
    "reinforce_pp": AlgorithmFacts(advantage_norms=("batch",)),
    "dr_grpo": AlgorithmFacts(advantage_norms=("group",)),
    "cispo": AlgorithmFacts(holds_ratio=True),
    "gspo": AlgorithmFacts(holds_ratio=True),
    "sapo": AlgorithmFacts(holds_ratio=True),
}

if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(ALGORITHM_FACTS)]


def names_where(holds: Callable[[AlgorithmFacts], bool]) -> str:
    """Lists algorithms of which `holds` is true: `cispo, gspo or sapo`."""
    names = [name for name, facts in ALGORITHM_FACTS.items() if holds(facts)]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
