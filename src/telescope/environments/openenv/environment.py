"""Environments run by an OpenEnv server: `openenv:http://127.0.0.1:8000`."""

from pathlib import Path

from telescope.environments.process_agent import ProcessAgent

TAKES_TASK = True


class OpenEnv(ProcessAgent):
    """An OpenEnv server, whose URL follows a colon: `openenv:http://127.0.0.1:8000`.

    `command` starts a Python that has the package openenv. Task i is the episode that the server resets with the seed
    `seed` + i, and its reward the sum of the steps' rewards. `options`: `num_tasks` (100), `seed` (0), `reset` (further
    arguments of a reset), `max_turns` (10), `observation_field` (what the model reads; by default the whole observation
    as JSON), `action_field` (what the answer becomes; by default the action's only required field). An answer that is a
    JSON object is an action itself; one that makes no action, or does not fit the context, ends the episode.
    """

    bridge = Path(__file__).with_name("bridge.py")
    default_command = ("uv", "run", "--no-project", "--with", "openenv==0.10.0", "python")
