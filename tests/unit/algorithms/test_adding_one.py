"""Runs the example of docs/algorithms.md: an algorithm is one file and one line."""

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.unit.algorithms.test_advantages import Scored
from tests.unit.algorithms.test_algorithm_losses import make_tokens, settings

from telescope.algorithms import compute_advantages, get_algorithm
from telescope.algorithms.loss import loss_terms
from telescope.config.algorithms import ALGORITHM_FACTS, AlgorithmFacts
from telescope.trainer.step import RLBackend

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


@pytest.fixture
def above_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the page's first Python block as a module and its line to the registry."""
    text = PAGE.read_text()
    source = text[text.index("## Adding an algorithm") :].split("```python\n", 1)[1].split("```", 1)[0]
    module = ModuleType("telescope.algorithms.above_mean")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ALGORITHM_FACTS, "above_mean", AlgorithmFacts())


def test_the_example_of_the_page_gives_advantages_and_a_loss(above_mean: None) -> None:
    samples = [Scored(0, reward) for reward in (0.0, 1.0, 2.0)]
    np.testing.assert_allclose(compute_advantages(samples, "above_mean"), [0.0, 0.0, 1.0])
    tokens = make_tokens()
    terms = loss_terms(get_algorithm("above_mean"), tokens, settings(algorithm="above_mean"))
    np.testing.assert_allclose(terms.policy_N.detach(), (-tokens.advantage_N * tokens.logp_N).detach())


def test_the_table_of_backends_names_every_method_that_one_must_have() -> None:
    table = PAGE.read_text().partition("derives from `telescope.trainer.step.RLBackend`")[2].partition("\n\n")[2]
    named = set(re.findall(r"`(\w+)", "".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|")))
    assert not RLBackend.__abstractmethods__ - named
