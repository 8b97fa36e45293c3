"""The evals of a run, before and after training.

Owns the plan of evals, the set of held-out items and the recording of results; `evals.runner` samples, by the same path
as training.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from dataclasses import dataclass, field

from telescope.config import TelescopeConfig
from telescope.config.environments import EnvironmentKeys
from telescope.environments.worker_pool.pool import EnvironmentPool
from telescope.errors import ConfigError
from telescope.evals.runner import EvalItem, EvalResult, PlannedEval, plan_eval, run_eval
from telescope.evals.statistics import estimate_difference
from telescope.orchestrator import record_rows
from telescope.orchestrator.prompt_sampler import request_seed
from telescope.orchestrator.request_slots import RequestSlotPool
from telescope.orchestrator.servers import ServerPool
from telescope.orchestrator.status import RunStatus
from telescope.record.recorder import Recorder
from telescope.rollout.sample import RolloutSettings
from telescope.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)


@dataclass
class Evaluation:
    """The planned evals of a run and their results, newest last."""

    plans: list[PlannedEval]
    config: TelescopeConfig
    environments: EnvironmentPool
    slots: RequestSlotPool
    recorder: Recorder
    status: RunStatus
    results: list[EvalResult] = field(default_factory=list)
    group_ids: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def held_out_uids(self) -> frozenset[str]:
        """Identities of the items that are never trained on."""
        return frozenset(item.prompt.sample_uid for plan in self.plans if plan.held_out for item in plan.items)

    def num_reserved(self, environment_key: str) -> int:
        """Returns the number of items at a dataset's head reserved for evals."""
        return max((len(p.items) for p in self.plans if p.held_out and p.environment_key == environment_key), default=0)

    async def run_all(self, version: int, settings: RolloutSettings, servers: ServerPool) -> list[EvalResult]:
        """Runs the planned evals in order, with the weights of `version`, on all servers that are up."""
        results = []
        for plan in self.plans:
            self.status.phase = (
                f"evaluating {plan.name} ({len(plan.items)} items at temperature {plan.sampling.temperature:g})"
            )
            self.status.eval_done, self.status.eval_total = 0, plan.num_samples

            used: set[int] = set()

            def on_sample(item: EvalItem, sample: Trajectory, plan: PlannedEval = plan, used: set[int] = used) -> None:
                self.status.eval_done += 1
                self.status.generated(sample.num_completion_tokens)
                self.status.progressed()
                used.add(sample.server_index)
                for table, row in record_rows.rows_of_eval_sample(plan, version, item, sample):
                    self.recorder.write(table, row)

            started_at = time.time()
            result = await run_eval(
                plan,
                version=version,
                slots=self.slots,
                engine_of=lambda server: servers.clients[server],
                environments=self.environments,
                settings=settings,
                # The same seeds at every version, so that a changed result means a changed policy.
                seed_of=lambda item, completion, turn, plan=plan: request_seed(  # type: ignore[misc]
                    self.config.seed, "eval", plan.number, item, completion, turn
                ),
                group_ids=self.group_ids,
                on_engine_failure=servers.report_failure,
                on_sample=on_sample,
            )
            baseline = next((earlier for earlier in self.results if earlier.number == plan.number), None)
            if baseline is not None and _comparable(result, baseline):
                result = dataclasses.replace(result, gain=estimate_difference(result.by_item, baseline.by_item))
            self.recorder.write("evals", record_rows.eval_row(plan, version, started_at, result, servers=used))
            self.recorder.write(
                "spans",
                {
                    "name": "eval", "component": "orchestrator", "step": version, "start": started_at,
                    "end": time.time(), "attributes": {"eval": plan.name, "accuracy": f"{result.accuracy:.4f}"},
                },
            )  # fmt: skip
            logger.info(
                "eval %s at version %d: accuracy %.4f (%d of %d scored, temperature %g, %.1f s)",
                plan.name, version, result.accuracy, result.num_scored, plan.num_samples, result.temperature,
                result.seconds,
            )  # fmt: skip
            self.status.messages.append(
                f"{plan.name} at version {version}: accuracy {result.accuracy:.3f}"
                + (f" ({result.estimate.low:.3f} to {result.estimate.high:.3f})" if result.estimate else "")
            )
            results.append(result)
        self.status.eval_total = 0
        self.results.extend(results)
        return results


def _comparable(result: EvalResult, baseline: EvalResult) -> bool:
    """Returns whether a paired difference is defined: finite accuracies, and an item that both have scored."""
    finite = result.estimate is not None and baseline.estimate is not None
    return finite and not result.by_item.keys().isdisjoint(baseline.by_item)


async def plan_evals(
    config: TelescopeConfig, keys: EnvironmentKeys, environments: EnvironmentPool, settings: RolloutSettings
) -> list[PlannedEval]:
    """Plans every eval of the config, in order.

    Raises ConfigError when an eval holds out every item of a training environment.
    """
    plans = [
        await plan_eval(entry, key, environments, settings.sampling, number)
        for number, (entry, key) in enumerate(zip(config.evals, keys.evals, strict=True))
    ]
    for plan in plans:
        if plan.held_out and plan.environment_key in keys.training:
            info = await environments.describe(plan.environment_key)
            if len(plan.items) >= info.num_samples:
                raise ConfigError(
                    f"evals: num_samples of {plan.name!r} holds out all {info.num_samples} items of the environment "
                    "from training. Lower it, set separate_eval_samples: false, or use a larger dataset."
                )
    return plans
