"""Each rule fires for what it describes, and for nothing that is only near it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from tests.unit.health.series import IDLE, SECONDS, WAIT, history, ordinary

from telescope.health import rules
from telescope.health.rules import GIB, EvalPoint, History

NAN = math.nan
ENVIRONMENT, _ = rules.FAILED
BEFORE = EvalPoint("math500", 9, 0.60, 0.56, 0.64)
FALLEN = EvalPoint("math500", 59, 0.48, 0.44, 0.52)
NOISE = EvalPoint("math500", 59, 0.56, 0.52, 0.60)

FIRING = {
    "a value that is not a number": ("not_finite", {"loss/policy": [0.1, NAN, 0.1]}, (), "loss/policy is not"),
    "infinity": ("not_finite", {rules.GRAD_NORM: [math.inf]}, (), "grad_norm is not"),
    "entropy near zero": ("entropy", {rules.ENTROPY: [0.01] * 10}, (), "to 0.01 nats"),
    "no reward any more": ("reward", {rules.REWARD: [0.05] * 10}, (), "fell to 0.05"),
    "a step far from the engine": ("kl", {rules.KL: [0.5, 1e-4, 1e-4]}, (), "by 0.5 nats"),
    "an engine with another policy": (
        "mismatch",
        {rules.MISMATCH: [0.2] * 10, rules.ALLOWED_MISMATCH: [0.08] * 10},
        (),
        "differ by 0.2 nats",
    ),
    "a large gradient": ("grad_norm", {rules.GRAD_NORM: [40.0, 0.3]}, (), "reached 40"),
    "answers cut off": ("truncation", {rules.TRUNCATED: [40.0] * 10}, (), "40 % of the answers"),
    "equal rewards": ("zero_advantage", {rules.NO_SIGNAL: [90.0] * 10}, (), "90 % of the groups"),
    "a judge that is often away": ("masked", {ENVIRONMENT: [30.0] * 10, rules.KEPT: [70.0] * 10}, (), "30 % of the"),
    "no gradient": ("zero_advantage", {rules.GRAD_NORM: [0.0] * 10}, (), "gradient is zero"),
    "stale groups": ("stale", {rules.STALE: [25.0] * 10}, (), "25 % of the groups"),
    "old tokens": ("staleness", {rules.AGE: [5.0] * 10}, (), "5.0 versions"),
    "a trainer that waits": ("waiting", {WAIT: [6.2] * 10}, (), "62 % of the time"),
    "a slow environment": ("waiting", {WAIT: [9.5] * 10, IDLE: [9.0] * 10}, (), "wait for tools and rewards"),
    "engines that wait": ("idle", {IDLE: [7.0] * 10}, (), "70 % of the time"),
    "longer answers": ("reward_hacking", {rules.LENGTH: [400.0] * 10}, (BEFORE, FALLEN), "to 400 tokens"),
    "answers that repeat": ("reward_hacking", {rules.REPETITION: [5.0] * 10}, (BEFORE, FALLEN), "to 5.0)"),
    "a reward that evals do not see": ("reward_hacking", {rules.REWARD: [0.9] * 10}, (BEFORE, FALLEN), "rose from"),
    "few eval items": (
        "reward_hacking",
        {rules.LENGTH: [400.0] * 10},
        (EvalPoint("aime", 9, 0.3), EvalPoint("aime", 59, 0.2)),
        "aime fell from 0.300 (after 10 steps) to 0.200",
    ),
}

QUIET = {
    "a metric that is absent": ({rules.ENTROPY: [None] * 10}, ()),
    "a number that was lost eleven steps ago": ({"loss/policy": [NAN, *[0.1] * 10]}, ()),
    "entropy at a fifth": ({rules.ENTROPY: [0.12] * 10}, ()),
    "a reward that halves for five steps": ({rules.REWARD: [0.1] * 5}, ()),
    "a divergence below 0.01": ({rules.KL: [0.009] * 3}, ()),
    "a mismatch within the rounding of FP8": ({rules.MISMATCH: [0.2] * 10, rules.ALLOWED_MISMATCH: [0.3] * 10}, ()),
    "a gradient of five times the usual": ({rules.GRAD_NORM: [1.5]}, ()),
    "a spike eleven steps ago": ({rules.GRAD_NORM: [40.0, *[0.3] * 10]}, ()),
    "two steps of cut answers": ({rules.TRUNCATED: [80.0] * 2}, ()),
    "half of the groups without signal": ({rules.NO_SIGNAL: [60.0] * 10}, ()),
    "a twentieth of failed samples": ({ENVIRONMENT: [5.0] * 10, rules.KEPT: [95.0] * 10}, ()),
    "three steps without a gradient": ({rules.GRAD_NORM: [0.0] * 3}, ()),
    "one wait for a checkpoint": ({WAIT: [9.9]}, ()),
    "one very long step without requests": ({IDLE: [300.0], SECONDS: [310.0]}, ()),
    "answers that grow while evals rise": ({rules.LENGTH: [400.0] * 10}, (FALLEN, BEFORE)),
    "an eval within its intervals": ({rules.LENGTH: [400.0] * 10}, (BEFORE, NOISE)),
    "an eval that falls alone": ({}, (BEFORE, FALLEN)),
    "two evals of which each has one result": ({rules.LENGTH: [400.0] * 10}, (BEFORE, EvalPoint("aime", 59, 0.1))),
}


@pytest.mark.parametrize("case", FIRING)
def test_a_rule_fires_alone_and_says_numbers_and_what_to_try(case):
    kind, changes, evals, words = FIRING[case]
    (found,) = rules.findings(history(changes, evals))
    assert found.kind == kind
    assert words in found.text and found.text.endswith(".")
    assert found.advice.endswith(".") and found.words
    assert set(found.metrics) & (rules.READ | set(changes))


@pytest.mark.parametrize("case", QUIET)
def test_no_rule_fires_for(case):
    changes, evals = QUIET[case]
    assert rules.findings(history(changes, evals)) == []


def test_every_rule_has_a_case_and_its_name_is_the_kind_of_its_finding():
    assert {kind for kind, *_ in FIRING.values()} == {rule.__name__ for rule in rules.RULES}


def test_a_finding_names_the_step_of_its_moment():
    (found,) = rules.findings(history({rules.GRAD_NORM: [40.0, 0.3, 0.3]}))
    assert found.steps_ago == 2
    (found,) = rules.findings(history({"loss/policy": [NAN, 0.1]}))
    assert found.steps_ago == 1


def test_a_divergence_of_a_nat_needs_no_earlier_steps():
    (found,) = rules.findings(history({rules.KL: [4.7, 1e-3]}, num_steps=3))
    assert (found.kind, found.steps_ago) == ("kl", 1) and "by 4.7 nats" in found.text
    assert "learning_rate" in found.advice
    assert rules.findings(history({rules.KL: [0.9]}, num_steps=3)) == []


def test_synchronous_generation_is_no_slow_environment():
    (found,) = rules.findings(history({WAIT: [6.0] * 10, IDLE: [5.2] * 10}, num_steps=60))[:1]
    assert "for answers" in found.text


def test_noise_of_a_small_run_is_no_finding():
    noise = [ordinary(step) for step in range(300)]
    columns = {name: [step[name] for step in noise] for name in noise[0]}
    for end in range(1, 301, 7):
        seen = {name: values[:end] for name, values in columns.items()}
        assert rules.findings(History(seen, range(end))) == []


def test_the_slow_first_steps_of_a_run_are_no_finding():
    assert rules.findings(history({WAIT: [9.0] * 5, IDLE: [9.0] * 5}, num_steps=5)) == []
    assert rules.findings(History({}, ())) == []


def test_rewards_below_zero_are_not_compared_by_their_ratio():
    assert rules.findings(history({rules.REWARD: [-1.0] * 60})) == []


class Recording(Mapping[str, list[float | None]]):
    def __init__(self, columns: Mapping[str, list[float | None]]) -> None:
        self.columns, self.read = columns, set[str]()

    def __getitem__(self, name: str) -> list[float | None]:
        self.read.add(name)
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return len(self.columns)


def test_rules_read_only_the_metrics_that_are_kept_for_them():
    columns = Recording({**history().columns, rules.REWARD: [0.8] * 60})  # type: ignore[dict-item]
    rules.findings(History(columns, range(60), (BEFORE, FALLEN)))
    assert columns.read == rules.READ


@pytest.mark.parametrize(("silence", "usual", "fires"), [
    (900.0, 10.0, True), (310.0, 1.0, True), (290.0, 1.0, False), (900.0, 100.0, False), (900.0, None, False),
])  # fmt: skip
def test_a_run_is_stalled_after_ten_usual_steps_and_five_minutes(silence, usual, fires):
    found = rules.stalled(silence, usual)
    assert (found is not None) == fires
    assert found is None or (found.level == "error" and "No step has ended" in found.text)


@pytest.mark.parametrize(("free", "total", "level"), [
    (50 * GIB, 2000 * GIB, None), (3 * GIB, 40 * GIB, None), (15 * GIB, 1000 * GIB, "warning"),
    (1.5 * GIB, 40 * GIB, "warning"), (0.5 * GIB, 2 * GIB, "error"),
])  # fmt: skip
def test_a_disk_is_nearly_full_by_share_and_bytes(free, total, level):
    found = rules.disk(free, total, "runs/demo")
    assert (found and found.level) == level
    assert found is None or "runs/demo" in found.text


def test_a_small_disk_is_described_in_mib():
    found = rules.disk(12.5 * 2**20, 64 * 2**20, "runs/demo")
    assert found and found.text == "The disk of runs/demo has 12.5 of 64 MiB left."


@pytest.mark.parametrize(("changes", "field"), [
    ({WAIT: [6.2] * 10}, "trainer_num_workers"), ({IDLE: [6.0] * 10}, "inference_num_workers"),
])  # fmt: skip
@pytest.mark.parametrize("number", [None, 1, 2])
def test_the_only_process_of_a_kind_is_not_to_be_removed(
    changes: dict[str, list[float | None]], field: str, number: int | None
) -> None:
    seen = replace(history(changes), config={field: number} if number else {})
    (found,) = rules.findings(seen)
    assert (f"lower {field}" in found.advice) == (number != 1)
