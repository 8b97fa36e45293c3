"""Within a rollout, a server or the policy itself judges: never trained, measured, and masked when it fails."""

from typing import Any

from tests.fakes.judge import grades, judge_server
from tests.integration.agents.conftest import Agent

from telescope.environments.base import RewardResult, Sample

SCHEMA = {"type": "object", "properties": {"right": {"type": "boolean"}}, "required": ["right"]}


class Judged(Agent):
    async def rollout(self, sample: Sample, context: Any) -> RewardResult:
        answer = await context.generate([{"role": "user", "content": sample.prompt}])
        verdict = await context.judge(f"Is it right: {answer.text}", SCHEMA)
        return RewardResult(float(verdict["right"]))


async def test_the_policy_as_a_judge_is_asked_again_and_never_trained(bench: Any) -> None:
    made = await bench(Judged, ["4", "It is.", '{"right": true}'], judge={"url": "policy"})
    sample = await made.run()
    assert sample.reward.total_reward == 1.0
    assert [turn.trained for turn in sample.turns] == [True, False, False]
    assert (sample.reward.sample_metrics["judge/calls"], sample.reward.sample_metrics["judge/failures"]) == (1.0, 1.0)


async def test_a_server_as_a_judge_adds_its_metrics(bench: Any) -> None:
    with judge_server(lambda body: grades(body, 0)) as (url, _):
        made = await bench(Judged, ["4"], judge={"url": url, "model": "j"})
        sample = await made.run()
    assert (sample.reward.total_reward, sample.reward.sample_metrics["judge/tokens"]) == (1.0, 110.0)


async def test_a_judge_that_fails_masks_the_rollout(bench: Any) -> None:
    with judge_server(lambda _: (400, "refused", {})) as (url, _):
        made = await bench(Judged, lambda _: "4", judge={"url": url, "model": "j"})
        sample = await made.run()
    assert sample.reward is None and sample.failure_kind == "infrastructure"
    assert "refused" in sample.failure_message
