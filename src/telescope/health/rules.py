"""Finds problems in a run with pure functions that have limits, reasons and advice.

Owns the rules, their limits and their words. A rule reads step metrics and evals, and names the metrics that it read.
Does not own the metrics (docs/metrics.md), the repetition of alerts (`watch`) or their display (`verdict`).

The limits are wide, because people ignore alerts that are often wrong.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from telescope.utils.text import free_space, listed

Values = Sequence[float | None]
Columns = Mapping[str, Values]
"""Step metrics by name, with a value per step, or None where a step lacks it. All columns have the same length."""

Level = Literal["info", "warning", "error"]

WINDOW = 10  # steps that a rule reads; a single step has too few groups
USUAL = 50  # steps whose median is the usual value, to which a spike is compared

WAIT = "timing_waiting_for_data / timing_step_total"
IDLE = "timing_engines_idle / timing_step_total"
REWARD = "reward/all_groups/mean"
TRAINED_REWARD = "reward/total/mean"
NO_SIGNAL = "discarded/zero_advantage/pct"
STALE = "discarded/max_async/pct"
TRUNCATED = "stop_reason_length_pct"
KEPT = "kept/samples"
DISCARDED = "discarded/all/samples"
FAILED = {
    "masked/environment/samples": "in their environment",
    "masked/infrastructure/samples": "with their engine, network or sandbox",
}
"""Metrics of samples that failed, and where."""
KL = "kl_divergence_inference"
MISMATCH = "mismatch/logprob_difference_mean"
ALLOWED_MISMATCH = "mismatch/logprob_difference_allowed"
GRAD_NORM = "grad_norm"
ENTROPY = "entropy"
AGE = "staleness/token_age_mean"
LENGTH = "rollouts/tokens_completion/mean"
REPETITION = "rollouts/compression_ratio/mean"

READ = frozenset(
    name
    for metric in (
        *(WAIT, IDLE, REWARD, NO_SIGNAL, STALE, TRUNCATED, KL, GRAD_NORM, ENTROPY, AGE, LENGTH),
        *(REPETITION, MISMATCH, ALLOWED_MISMATCH, KEPT, DISCARDED, *FAILED),
    )
    for name in metric.split(" / ")
)
"""Metrics that rules read by name. `not_finite` also reads every other metric with NaN or infinity."""

MINUS = "\u2212"
LARGEST = 1e150  # the square of a larger number is not finite, and Python raises for sums and variances


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """Mean of an eval's `metric` after `step` (-1: before training), with its 95 % interval."""

    name: str
    step: int
    accuracy: float
    low: float | None = None
    high: float | None = None
    metric: str = "correct"

    @property
    def text(self) -> str:
        """Returns the mean: `58.0 %`, or `1.200` of a metric that is no share, such as `reward`."""
        return self._number(self.accuracy) + (" %" if self.metric == "correct" else "")

    @property
    def interval(self) -> str:
        """Returns the interval in the unit of `text`, such as `54.0 to 62.0`, or "" without one."""
        return "" if self.low is None or self.high is None else f"{self._number(self.low)} to {self._number(self.high)}"

    def _number(self, value: float) -> str:
        text = f"{100 * value:.1f}" if self.metric == "correct" else f"{value:.3f}"
        return text.replace("-", MINUS)


@dataclass(frozen=True, slots=True)
class History:
    """The input of the rules: steps as columns, and evals in the order of their steps."""

    columns: Columns
    steps: Sequence[int]
    evals: Sequence[EvalPoint] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the run, on which advice depends. Empty if they are not known."""

    def last(self, metric: str, window: int = WINDOW, skip: int = 0) -> list[float]:
        """Returns the finite values of `window` steps, which end `skip` steps before the last step."""
        values = self.columns.get(metric, ())
        end = max(0, len(values) - skip)
        return finite(values[max(0, end - window) : end])

    def mean(self, metric: str, window: int = WINDOW, skip: int = 0) -> float | None:
        """Returns the mean over the last steps, or None without values. For `a / b`, returns the ratio of two sums."""
        top, ratio, bottom = metric.partition(" / ")
        values = self.last(top, window, skip)
        if not ratio:
            return statistics.fmean(values) if values else None
        below = math.fsum(self.last(bottom, window, skip))
        return math.fsum(values) / below if values and below > 0 else None

    def before(self, step: int, metric: str) -> float | None:
        """Returns the mean over the `WINDOW` steps up to `step`, or over the first steps if `step` is earlier."""
        chosen = [place for place, one in enumerate(self.steps) if one <= step][-WINDOW:] or range(WINDOW)
        values = self.columns.get(metric, ())
        measured = finite([values[place] for place in chosen if place < len(values)])
        return statistics.fmean(measured) if measured else None


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a run, and what to try.

    `words` are at most three, for a cell; `text` is a sentence with numbers. The first of `metrics` is the one to look
    at; the advice may name `advised` metrics besides. `steps_ago` counts back from the last step.
    """

    kind: str
    words: str
    text: str
    advice: str
    metrics: tuple[str, ...] = ()
    level: Level = "warning"
    steps_ago: int = 0
    advised: tuple[str, ...] = ()


Rule = Callable[[History], Finding | None]


def finite(values: Values) -> list[float]:
    """Returns the finite values, limited to `LARGEST`."""
    return [max(-LARGEST, min(value, LARGEST)) for value in values if value is not None and math.isfinite(value)]


def ends_of(values: Values) -> tuple[float, float] | tuple[None, None]:
    """Returns means of the finite values over the first and last 10 steps, or over halves of fewer than 20."""
    values = finite(values)
    if not values:
        return None, None
    window = max(1, min(WINDOW, len(values) // 2))
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:])


def not_finite(history: History) -> Finding | None:
    """Finds NaN and infinity, after which the weights are usually lost."""
    for steps_ago in range(min(WINDOW, len(history.steps))):
        names = sorted(
            name
            for name, values in history.columns.items()
            if len(values) > steps_ago and (value := values[-1 - steps_ago]) is not None and not math.isfinite(value)
        )
        if names:
            verb, step = "is" if len(names) == 1 else "are", history.steps[-1 - steps_ago]
            text = f"{listed(names, 3)} {verb} not a finite number {after(step)}."
            advice = (
                "Continue from a checkpoint with a lower learning_rate; mixed_precision_dtype: float32 shows whether "
                "precision is the cause."
            )
            return Finding("not_finite", "not a number", text, advice, tuple(names[:3]), "error", steps_ago)
    return None


def entropy(history: History) -> Finding | None:
    """Finds an entropy below a tenth of the first one. The samples of a group are then nearly equal."""
    values = finite(history.columns.get(ENTROPY, ()))
    now = history.mean(ENTROPY)
    if now is None or len(values) < 2 * WINDOW:
        return None
    before = statistics.fmean(values[:WINDOW])
    if before <= 0 or now > 0.1 * before:
        return None
    return Finding(
        "entropy", f"down from {before:.2g}",
        f"Entropy fell from {before:.2g} to {now:.2g} nats: the answers to a prompt are equal.",
        "Lower learning_rate, raise temperature, or set entropy_coef.", (ENTROPY,),
    )  # fmt: skip


def reward(history: History) -> Finding | None:
    """Finds a reward below half of the best ten steps, by more than three standard errors to exclude noise."""
    now = history.last(REWARD)
    windows = [history.last(REWARD, WINDOW, skip) for skip in range(WINDOW, len(history.steps) - WINDOW + 1, WINDOW)]
    best = max((window for window in windows if window), key=statistics.fmean, default=None)
    if best is None or len(now) < WINDOW // 2 or len(best) < WINDOW // 2:
        return None
    top, mean = statistics.fmean(best), statistics.fmean(now)
    error = (statistics.variance(best) / len(best) + statistics.variance(now) / len(now)) ** 0.5
    if top <= 0 or mean > 0.5 * top or top - mean < 3 * error:
        return None
    return Finding(
        "reward", f"down from {top:.3g}", f"The reward fell to {mean:.3g} from {top:.3g}.",
        "Read the newest answers, and continue from an earlier checkpoint with a lower learning_rate.", (REWARD,),
    )  # fmt: skip


def _spike(history: History, metric: str, kind: str, text: str, advice: str, least: float = 0.0) -> Finding | None:
    """Finds the largest recent value above ten times the usual value. `text` contains `{value}` and `{usual}`."""
    found: tuple[float, float, int] | None = None
    for steps_ago in range(WINDOW):
        newest = history.last(metric, 1, steps_ago)
        before = history.last(metric, USUAL, steps_ago + 1)
        if not newest or len(before) < WINDOW:
            continue
        median = statistics.median(before)
        if newest[0] > max(10 * median, least) and (found is None or newest[0] > found[0]):
            found = newest[0], median, steps_ago
    if found is None:
        return None
    value, usual, steps_ago = found
    text = text.format(value=value, usual=usual)
    return Finding(kind, f"spiked, usually {usual:.2g}", text, advice, (metric,), steps_ago=steps_ago)


_LEAST_KL = 0.01  # Nats. With equal weights, engine and trainer differ by 0.001 to 0.01 in bfloat16.
_LARGE_KL = 1.0  # Nats. No run learns with it, whatever its usual value is.


def kl(history: History) -> Finding | None:
    """Finds a step with ten times the usual divergence, or a nat: a server has old weights, or an update was large."""
    text = "Engine and trainer differed by {value:.2g} nats (KL) in one step"
    advice = (
        "Look at mismatch and staleness of that step. If mismatch is small, an update moved the policy far: lower "
        "learning_rate. use_tis bounds the effect on the loss."
    )
    if found := _spike(history, KL, "kl", text + ", usually by {usual:.2g}.", advice, _LEAST_KL):
        return found
    recent = [(value, steps_ago) for steps_ago in range(WINDOW) for value in history.last(KL, 1, steps_ago)]
    value, steps_ago = max(recent, default=(0.0, 0))
    if value < _LARGE_KL:
        return None
    return Finding("kl", "far apart", f"{text.format(value=value)}.", advice, (KL,), steps_ago=steps_ago)


def grad_norm(history: History) -> Finding | None:
    """Finds a gradient norm of ten times the usual. Unclipped, such a step moves the weights as far as ten steps."""
    return _spike(
        history, GRAD_NORM, "grad_norm", "The gradient norm reached {value:.3g}, usually {usual:.3g}.",
        "Lower learning_rate or grad_clip if it repeats.",
    )  # fmt: skip


def _lasting(
    history: History, metric: str, limit: float, kind: str, words: str, text: str, advice: str, *also: str
) -> Finding | None:
    """Finds that most of the last steps reach `limit`, and reports their mean. A single step has too few groups."""
    values = history.last(metric)
    if len(values) < WINDOW // 2 or statistics.median(values) < limit:
        return None
    return Finding(kind, words, text.format(statistics.fmean(values)), advice, (metric, *also))


def mismatch(history: History) -> Finding | None:
    """Finds differences beyond rounding between engine and trainer. The trainer records the allowed difference."""
    values, allowed = history.last(MISMATCH), history.mean(ALLOWED_MISMATCH)
    if allowed is None or len(values) < WINDOW // 2 or statistics.median(values) <= allowed:
        return None
    return Finding(
        "mismatch", "engine samples differently",
        f"Engine and trainer differ by {statistics.fmean(values):.2g} nats per token that the same weights sampled "
        f"(rounding: up to {allowed:.2g}).",
        "Run telescope verify.", (MISMATCH, ALLOWED_MISMATCH),
    )  # fmt: skip


def truncation(history: History) -> Finding | None:
    """Finds that a fifth of the completions is cut off. The reward then depends on the limit too."""
    return _lasting(
        history, TRUNCATED, 20, "truncation", "limit too short", "{:.0f} % of the answers are cut off.",
        "Raise max_tokens (with max_model_len and seq_len), or set overlong_penalty_factor.",
    )  # fmt: skip


FAILED_SHARE = 0.1  # of the samples; leaving out fewer hardly moves a reward curve


def masked(history: History) -> Finding | None:
    """Finds that a tenth of the samples failed in one way. They are left out, and the others may be easier."""
    counts = {metric: math.fsum(history.last(metric)) for metric in (KEPT, DISCARDED, *FAILED)}
    worst = max(FAILED, key=counts.__getitem__)
    share = counts[worst] / max(math.fsum(counts.values()), 1)
    if len(history.steps) < WINDOW // 2 or share < FAILED_SHARE:
        return None
    return Finding(
        "masked", "samples fail", f"{100 * share:.0f} % of the samples failed {FAILED[worst]} and are not trained.",
        "Read failure_message in the table samples. Fix the cause, or lower environment_error_budget so that the run "
        "ends.", (worst, KEPT),
    )  # fmt: skip


def _task(history: History) -> str:
    level = history.mean(REWARD)
    return "harder" if level is not None and level > 0.5 else "easier"


def zero_advantage(history: History) -> Finding | None:
    """Finds two thirds of the groups without a signal, so that a trained group costs three, or no gradient at all."""
    task = _task(history)
    norms = history.last(GRAD_NORM)
    if len(norms) >= WINDOW // 2 and statistics.median(norms) == 0:  # with discard_group_zero_advantage: false
        return Finding(
            "zero_advantage", "equal rewards",
            "The gradient is zero: the trained groups have equal rewards, or masks of the loss leave nothing.",
            "Read the newest answers. If they are broken, continue from an earlier checkpoint with a lower "
            f"learning_rate; otherwise use {task} prompts, or raise group_size.", (GRAD_NORM, REWARD),
        )  # fmt: skip
    return _lasting(
        history, NO_SIGNAL, 67, "zero_advantage", f"needs {task} prompts",
        "{:.0f} % of the groups have equal rewards and are discarded.",
        f"Use {task} prompts, or raise group_size.", REWARD,
    )  # fmt: skip


def stale(history: History) -> Finding | None:
    """Finds that a fifth of the groups became too old."""
    return _lasting(
        history, STALE, 20, "stale", "often too old", "{:.0f} % of the groups became older than max_off_policy_steps.",
        "Lower max_async_rollout, or raise max_off_policy_steps.",
    )  # fmt: skip


def staleness(history: History) -> Finding | None:
    """Finds tokens that are four versions old. Their ratios leave the range that the losses trust."""
    return _lasting(
        history, AGE, 4, "staleness", "too far ahead", "Tokens are {:.1f} versions old.",
        "Lower max_async_rollout, or add inference servers.",
    )  # fmt: skip


def waiting(history: History) -> Finding | None:
    """Finds a trainer that waits half of the time. More servers then shorten a step more than a faster trainer.

    If many groups are discarded for equal rewards, other prompts shorten a step without more servers. If the servers
    have no request either, answers wait for their environments.
    """
    waits, idles = _lasting_share(history, WAIT), _lasting_share(history, IDLE)
    if waits + idles >= BOTH_WAIT:
        return Finding(
            "waiting", "slow environments",
            f"The trainer waits {100 * waits:.0f} % of the time, and the inference servers have no request "
            f"{100 * idles:.0f} % of it: answers wait for tools and rewards, or a batch waits for its longest answers.",
            "Look at the timeline. Make the environment faster or raise rollout_num_workers; for long answers raise "
            "max_async_rollout.",
            (*WAIT.split(" / "), IDLE.partition(" / ")[0]),
        )  # fmt: skip
    if not waits:
        return None
    found = Finding(
        "waiting", "needs more servers", f"The trainer waits {100 * waits:.0f} % of the time for answers.",
        f"Raise inference_num_workers or max_async_rollout{_or_lower(history, 'trainer_num_workers')}.",
        tuple(WAIT.split(" / ")),
    )  # fmt: skip
    share = history.mean(NO_SIGNAL) or 0.0
    if share < 40:
        return found
    prompts = f"Use {_task(history)} prompts: {share:.0f} % of the groups have equal rewards."
    return replace(found, advice=f"{prompts} {found.advice}", advised=(NO_SIGNAL,))


def idle(history: History) -> Finding | None:
    """Finds engines that have no request half of the time because they wait for the trainer."""
    waits, idles = _lasting_share(history, WAIT), _lasting_share(history, IDLE)
    if not idles or waits + idles >= BOTH_WAIT:
        return None
    return Finding(
        "idle", "trainer too slow", f"The inference servers have no request {100 * idles:.0f} % of the time.",
        f"Raise max_async_rollout or trainer_num_workers{_or_lower(history, 'inference_num_workers')}.",
        tuple(IDLE.split(" / ")),
    )  # fmt: skip


def _or_lower(history: History, name: str) -> str:
    """Returns the advice to lower a number of processes, unless there is only one."""
    return "" if history.config.get(name) == 1 else f", or lower {name}"


BOTH_WAIT = 1.25
"""Sum of the two shares from which neither the trainer nor the engines limit the speed.

In synchronous mode one waits while the other works, and the shares add up to 1 or little more.
"""


def _lasting_share(history: History, metric: str) -> float:
    """Returns the share of the time of the last steps, or 0 if it is below half."""
    share, (top, _, bottom) = history.mean(metric), metric.partition(" / ")
    pairs = zip(history.columns.get(top, ())[-WINDOW:], history.columns.get(bottom, ())[-WINDOW:], strict=False)
    shares = [part / whole for part, whole in pairs if part is not None and whole]
    # The first steps wait for engines to start and caches to fill, and a single long step says little.
    if share is None or share < 0.5 or len(shares) < WINDOW or statistics.median(shares) < 0.5:
        return 0.0
    return share


GROWN = 1.25  # smallest relevant growth; the mean length of a batch varies by a few percent
LEAST_FALL = 0.05  # smallest relevant fall of an eval without intervals: five of a hundred items


def reward_hacking(history: History) -> Finding | None:
    """Finds an eval that falls while the reward is exploited.

    It falls outside its intervals while completions become longer or more repetitive, or the reward rises.
    """
    for name in dict.fromkeys(point.name for point in history.evals):
        *earlier, newest = [point for point in history.evals if point.name == name]
        best = max(earlier, key=lambda point: point.accuracy, default=None)
        if best is None or not _has_fallen(best, newest):
            continue
        for metric, what in ((LENGTH, "answers grew from {:.0f} to {:.0f} tokens"),
                             (REPETITION, "answers repeat themselves more (compression {:.1f} to {:.1f})"),
                             (REWARD, "the training reward rose from {:.3g} to {:.3g}")):  # fmt: skip
            then, now = history.before(best.step, metric), history.before(newest.step, metric)
            if then is not None and now is not None and 0 < GROWN * then <= now:
                text = (
                    f"{name} fell from {best.accuracy:.3f} ({after(best.step)}) to {newest.accuracy:.3f} while "
                    f"{what.format(then, now)}."
                )
                advice = (
                    "Read the answers with the highest reward: they may exploit it. Fix the reward, or set "
                    "overlong_penalty_factor or filter_repetition, and continue from the better checkpoint."
                )
                ago = sum(step > newest.step for step in history.steps)
                return Finding("reward_hacking", "eval falls", text, advice, (metric,), steps_ago=ago)
    return None


def _has_fallen(best: EvalPoint, newest: EvalPoint) -> bool:
    if best.low is not None and newest.high is not None:
        return newest.high < best.low
    return best.accuracy - newest.accuracy > LEAST_FALL


def after(step: int) -> str:
    """Returns the time of a measurement in words. Steps count from 0; -1 is before training."""
    if step < 0:
        return "before training"
    return "after 1 step" if step == 0 else f"after {step + 1} steps"


RULES: tuple[Rule, ...] = (
    *(not_finite, reward, entropy, reward_hacking, mismatch, kl, grad_norm, masked, waiting, idle, zero_advantage),
    *(truncation, stale, staleness),
)
"""All rules over steps and evals. Rules about the result precede rules about time. A finding has its rule's name."""


def findings(history: History) -> list[Finding]:
    """Returns the current findings, the worst first."""
    return [found for rule in RULES if (found := rule(history)) is not None]


STALLED_FACTOR = 10.0
STALLED_SECONDS = 300.0


def stalled(silence: float | None, step_seconds: float | None) -> Finding | None:
    """Finds a run without a finished step for five minutes and ten times the usual duration. `silence` is seconds."""
    if silence is None or step_seconds is None or silence < max(STALLED_FACTOR * step_seconds, STALLED_SECONDS):
        return None
    text = f"No step has ended for {silence / 60:.0f} min; a step took {step_seconds:.0f} s."
    advice = "Look at the newest log lines of trainer and servers; py-spy dump shows where a process waits."
    return Finding("stalled", "stands still", text, advice, ("timing_step_total",), "error")


GIB = 2**30
LITTLE_BYTES, LITTLE_SHARE = 20 * GIB, 0.05
NOTHING_BYTES = GIB


def disk(free: float, total: float, folder: str) -> Finding | None:
    """Finds a disk on which a checkpoint may not fit (below 5 % and 20 GiB), or not even the record (below 1 GiB)."""
    if free >= NOTHING_BYTES and (free >= LITTLE_BYTES or free >= LITTLE_SHARE * total):
        return None
    text = f"The disk of {folder} has {free_space(free, total)} left."
    advice = "Free space, or set checkpoint_keep_last. The run continues when the disk is full, but loses checkpoints."
    return Finding("disk", "nearly full", text, advice, (), "error" if free < NOTHING_BYTES else "warning")
