"""Golds are judged by the class whose reward is used, and by none that does not know it."""

from typing import Any

import pytest

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment
from telescope.environments.golds import MAX_CHECKED, report_golds
from telescope.environments.hendrycks_math.environment import HendrycksMathEnvironment
from telescope.environments.records import GoldCheck
from telescope.errors import UserError
from telescope.evals.base import Eval

SENTENCE = "She sold half as many clips in May."


class Choice(SingleTurnEnvironment):
    """Letters, of which `bad` of 1,000 are none."""

    bad = 0

    def load_dataset(self, num_samples: int = -1, **_: Any) -> list[Sample]:
        return [Sample("?", answer="?" if n < self.bad else "A") for n in range(1000)]

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        return RewardResult(float(completion == sample.answer))

    def check_gold(self, sample: Sample) -> GoldCheck | None:
        return GoldCheck(sample.answer, None if sample.answer in "ABCD" else "it is no letter")


class Silent(Choice):
    def check_gold(self, sample: Sample) -> GoldCheck | None:
        return None


class Letters(HendrycksMathEnvironment):
    """Replaces the reward of its base, whose golds are other texts."""

    def load_dataset(self, num_samples: int = -1, **_: Any) -> list[Sample]:
        return [Sample("?", answer=SENTENCE)]

    def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        return RewardResult(0.0)


class OwnMetrics(Eval):
    def compute_eval_metrics(self, completion: str, sample: Sample, eos_token: str = "") -> Any:
        raise AssertionError


def wrapped(cls: type[Eval], environment: Any) -> Eval:
    evaluation = cls()
    evaluation.env = environment
    return evaluation


def test_the_share_of_bad_golds_decides_between_silence_a_report_and_a_refusal():
    assert report_golds("choice", Choice()) is None
    report = report_golds("choice", Choice(bad=100))
    assert report.startswith(f"choice: no completion can equal the answer of 20 of the {MAX_CHECKED} items")
    assert "such as item 0, '?' (it is no letter); item 5, " in report
    for dataset in (Choice(bad=700), wrapped(Eval, Choice(bad=700))):
        with pytest.raises(UserError, match=rf"choice: .* of 140 of the {MAX_CHECKED} items .*Give final answers"):
            report_golds("choice", dataset)


def test_an_answer_that_is_no_text_is_reported():
    class Numbers(Letters):
        def load_dataset(self, num_samples: int = -1) -> list[Sample]:
            return [Sample("?"), Sample("?", answer=None), Sample("?", answer=4)]  # type: ignore[arg-type]

    assert report_golds("numbers", Numbers()).startswith("numbers: the answer of item 2 is 4, of type int. It never")


@pytest.mark.parametrize(
    "dataset", [Silent(bad=1000), Letters(), wrapped(OwnMetrics, Choice(bad=1000)), wrapped(OwnMetrics, None)]
)
def test_an_environment_without_a_notion_of_its_golds_is_silent(dataset):
    assert report_golds("name", dataset) is None


@pytest.mark.parametrize(("gold", "problem"), [
    (SENTENCE, "sentence"), ("She sold 72 clips.", "sentence"), ("7*8=56", "calculation"),
    ("48/2 = 24\n48+24 = 72", "calculation"), (r"so $x=\frac{1}{2}$.", "around a formula"),
    ("$72$ and $73$", "around a formula"), ("{'value': 72}", "record"), ('{"value": 72}', "record"),
    ("Number of clips: 72", "label"), ("Clips: 72", None), ("Total: 72", None), ("Option B", None),
    ("answer = 72", None), ("10:30 AM", None),
    ("all real numbers except 1", None), ("June 20", None), ("3 hours 30 minutes", None), ("AB = 5", None),
    ("x = 5", None), (r"\{1, 2\}", None), ("$18.90", None), ("3:2", None), ("Monday", None), ("72 clips", None),
    ("15元", None), ("是", None), ("예", None), ("понедельник", None), ("word " * 400, "longer than 1000"),
    ("小明有十五个苹果、小红有三个苹果、所以他们一共有十八个苹果。", "sentence"),
])  # fmt: skip
def test_a_gold_is_readable_if_a_right_answer_can_equal_it(gold, problem):
    environment = HendrycksMathEnvironment(dataset="own", verify_timeout_seconds=60.0)
    check = environment.check_gold(Sample("?", answer=gold))
    assert check.problem is None if problem is None else problem in check.problem


@pytest.mark.parametrize(("gold", "read"), [("false", "false"), (r"\text{Yes}", "Yes"), ("2/4", "1/2")])
def test_a_gold_that_is_a_word_is_shown_as_a_text(gold, read):
    environment = HendrycksMathEnvironment(dataset="own", verify_timeout_seconds=60.0)
    assert environment.check_gold(Sample("?", answer=gold)) == GoldCheck(read)
