"""Small orchestrator objects, and recorders that check rows against their tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tests.unit.rollout.fakes import generation

from telescope.config import TelescopeConfig
from telescope.environments.types import PreparedPrompt, RewardRecord
from telescope.orchestrator.groups import Group
from telescope.orchestrator.prompt_sampler import SampledPrompt
from telescope.orchestrator.step_stats import mean_gini
from telescope.record.convert import Batch
from telescope.record.tables import COLUMN_NAMES
from telescope.rollout.exchange import TRAINING
from telescope.rollout.pool import Lane, RolloutPool
from telescope.rollout.request_slots import slots_per_server
from telescope.rollout.trajectory import Trajectory, Turn


def config_of(**fields: Any) -> TelescopeConfig:
    defaults: dict[str, Any] = {
        "model": "m", "environments": [{"name": "arithmetic"}], "group_size": 2, "prompts_batch_size_for_trainer": 2,
        "number_of_steps": 3, "trainer_num_workers": 1, "inference_num_workers": 1, "max_tokens": 16,
        "max_model_len": 64, "seq_len": 128, "max_concurrent_prompts_per_server": 4, "use_wandb": False,
    }  # fmt: skip
    return TelescopeConfig.model_validate({**defaults, **fields})


def prompt(uid: str = "uid", token_ids: Sequence[int] = (1, 2, 3)) -> PreparedPrompt:
    return PreparedPrompt(list(token_ids), "what is 6 x 7?", [], uid)


def sample(
    index: int = 0,
    reward: float | None = 1.0,
    *,
    group: int = 5,
    lengths: Sequence[int] = (3,),
    version: int = 0,
    finish_reason: str = "stop",
    environment: str = "arithmetic",
    **metrics: float,
) -> Trajectory:
    """A finished sample with one turn per entry of `lengths`; a reward of None is a masked one."""
    made = Trajectory(f"{group}-{index}", group, index, environment)
    for turn, length in enumerate(lengths):
        sampled = generation(list(range(100, 100 + length)), version=version, finish_reason=finish_reason)
        added, times = [1, 2] if turn == 0 else [9], (10.0 + turn, 10.5 + turn)
        made.turns.append(
            Turn(added, sampled, f"turn {turn}", *times, parent=turn - 1 if turn else None, server=0, slot=3)
        )
    made.server_index, made.slot = 0, 3
    made.started_at, made.generated_at, made.finished_at = 10.0, 12.0, 12.25
    if reward is None:
        made.failure_kind, made.failure_message = "environment", "KeyError: 'numbers'"
    else:
        made.reward = RewardRecord(reward, metrics, {"answer": "42", "other": None}, [], {"kind": "easy"})
    return made


def gini(values: Sequence[float]) -> float:
    return mean_gini(np.array(values), np.zeros(len(values)))


def group(rewards: Sequence[float | None], *, n: int = 5, environment: str = "arithmetic", **of_samples: Any) -> Group:
    made = Group(SampledPrompt(n, 0, 17, 0), environment, prompt(), len(rewards), 0, opened_at=9.0, finished_at=13.0)
    made.samples = [
        sample(index, reward, group=n, environment=environment, **of_samples) for index, reward in enumerate(rewards)
    ]
    return made


def pool_of(config: TelescopeConfig, workers: Sequence[Any], num_servers: int) -> tuple[RolloutPool, Lane]:
    rollouts = RolloutPool(workers)
    group_size = config.group_size if config.enable_individual_sample_lanes else 1
    slots = rollouts.open_lane(TRAINING, [slots_per_server(config)] * num_servers, group_size)
    for server in range(num_servers):
        slots.set_up(server, True)
    return rollouts, slots


class StrictRecorder:
    """Keeps rows; a key that is no column of its table fails the test at once."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.in_flight: list[list[dict[str, Any]]] = []

    def write(self, table: str, row: Mapping[str, Any] | Batch) -> None:
        if isinstance(row, Batch):
            for one in row.rows.to_pylist(maps_as_pydicts="strict"):
                self.write(table, one)
            return
        unknown = set(row) - COLUMN_NAMES[table]
        assert not unknown, f"{sorted(unknown)} are no columns of {table}"
        self.rows.setdefault(table, []).append(dict(row))

    def set_in_flight(self, rows: list[dict[str, Any]]) -> None:
        assert all(set(row) <= COLUMN_NAMES["samples"] for row in rows)
        self.in_flight.append(rows)

    @property
    def step_metrics(self) -> list[dict[str, float]]:
        """Metrics of the steps, which follow each other."""
        steps = self.rows.get("steps", [])
        assert [row["step"] - steps[0]["step"] for row in steps] == list(range(len(steps)))
        return [row["metrics"] for row in steps]

    def of(self, table: str, **values: Any) -> list[dict[str, Any]]:
        return [row for row in self.rows.get(table, []) if all(row.get(k) == v for k, v in values.items())]


def agent_sample() -> Trajectory:
    """A finished sample of an agent: two calls, a judge, a branch beside the second call, and a compacted history."""
    made = sample(lengths=())
    system, call = ("system", "Be brief."), {"name": "add", "arguments": "{}", "error": None, "seconds": None}
    turns: list[tuple[str, int | None, str, str | None, list[tuple[str, ...]], float, float]] = [
        ("Adding.", None, "", None, [system, ("user", "2 + 2?")], 10.0, 11.0),
        ("yes", None, "judge", None, [("user", "Is it 4?")], 11.0, 12.0),
        ("It is 4.", 0, "", None, [("tool", "4")], 12.5, 13.5),
        ("Why not 5?", 0, "", "branch", [("tool", "4"), ("user", "Sure?")], 12.5, 14.0),
        ("Done.", None, "", "compaction", [system, ("user", "It was 4.")], 14.25, 15.0),
    ]
    for index, (text, parent, chat, divergence, replies, *times) in enumerate(turns):
        own = {"parent": parent, "chat": chat, "divergence": divergence, "replies": replies, "server": 0, "slot": index}
        sampled = generation([100 + index] * (index + 1))
        made.turns.append(Turn([1, 2], sampled, text, *times, trained=chat != "judge", **own))  # type: ignore[arg-type, misc]
    made.turns[0].tool_calls = [call]
    made.started_at, made.generated_at, made.finished_at = 10.0, 15.0, 15.5
    return made
