"""Tasksets of the package verifiers, in a separate process with its own Python: `verifiers:NAME`."""

from pathlib import Path

from telescope.environments.process_agent import ProcessAgent

TAKES_TASK = True


class Verifiers(ProcessAgent):
    """A taskset of verifiers 0.4, named after a colon: `verifiers:my-taskset`.

    `command` starts a Python that has verifiers and the taskset. `options` are verifiers' own `[env]` block, such as
    `{taskset: {split: train}, agent: {max_turns: 5}}`, and `num_tasks`, how many tasks to take. By default the agent
    has the harness `null`, and runs beside the bridge (`uv` must be installed). The reward and the metrics are the mean
    over the episode's agents.
    """

    bridge = Path(__file__).with_name("bridge.py")
    default_command = ("uv", "run", "--no-project", "--with", "verifiers==0.4.0", "python")
