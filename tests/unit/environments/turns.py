"""Multi-turn rollouts in tests: answers in, responses out, in the engine's order of calls."""

from telescope.environments.base import MultiTurnEnvironment, RolloutState, Sample, TrajectoryStep
from telescope.environments.local_rollout import take_turn
from telescope.environments.records import assistant_message


def step(text: str, prompt=(), **fields) -> TrajectoryStep:
    return TrajectoryStep(list(prompt), [assistant_message(text)], **fields)


def finish(steps):
    """The result of a generator that waits for nothing."""
    try:
        waits_for = next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"waits for {waits_for}")


def play(environment: MultiTurnEnvironment, sample: Sample, *answers: str) -> tuple[RolloutState, list[list]]:
    """The state after these answers, and the environment's responses up to the end of the rollout."""
    state = environment.create_initial_state(sample)
    prompt, responses = environment.get_initial_prompt(sample), []
    for answer in answers:
        state.trajectory.append(step(answer, prompt))
        reply = finish(take_turn(environment, state))
        if reply.done:
            state.is_completed, state.stop_reason = True, reply.reason
            break
        responses.append([message["content"] for message in reply.added])
        prompt = reply.conversation
    return state, responses
