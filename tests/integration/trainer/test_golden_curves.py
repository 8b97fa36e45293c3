"""What each algorithm does to one model over stored rollouts: losses and gradient norms as committed."""

import pytest
from tests.integration.trainer.golden.replay import CASES, NUM_STEPS, departures, load_curves, replay

from telescope.config.algorithms import ALGORITHM_FACTS


@pytest.mark.parametrize("case", CASES)
def test_replaying_stored_rollouts_gives_the_golden_curve(case: str) -> None:
    sentences = departures(case, replay(case), load_curves()[case])
    assert not sentences, "\n".join(
        [
            *sentences[:8],
            "If this change of what is learned is meant: python -m tests.integration.trainer.golden.make_curves",
        ]
    )


def test_every_algorithm_has_a_golden_curve_and_no_two_are_equal() -> None:
    curves = load_curves()
    assert set(curves) == set(CASES)
    assert set(ALGORITHM_FACTS) <= set(CASES)
    for case, curve in curves.items():
        assert len(curve) == NUM_STEPS
        for other, other_curve in curves.items():
            assert other == case or departures(case, curve, other_curve), f"{case} and {other} have the same curve"
