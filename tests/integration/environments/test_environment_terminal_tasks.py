"""Terminal tasks and the tools of sandboxes, in real sandboxes of this machine."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from telescope.environments.base import TrajectoryStep
from telescope.environments.records import assistant_message, conversation
from telescope.environments.registry import get_environment
from telescope.environments.terminal_tasks.tasks import own_tasks, read_tasks
from telescope.errors import UserError
from telescope.sandbox import SandboxError

pytestmark = pytest.mark.slow

LENGTHS = """
from telescope.environments.base import RewardResult, Sample
from telescope.environments.tool_env import ToolEnvironment

class Lengths(ToolEnvironment):
    def load_dataset(self, num_samples=-1):
        return [Sample("Count.")]
    def compute_reward(self, state, eos_token=""):
        return RewardResult(1.0, sample_metrics=self.get_tool_metrics(state))
"""


@asynccontextmanager
async def ready(name, **kwargs):
    environment = get_environment(name, pool_size=2, **kwargs)
    await environment.prepare_resources()
    try:
        yield environment
    finally:
        await environment.close_resources()


async def say(environment, state, text):
    """Plays one answer of the model. Returns the texts of the replies."""
    state.trajectory.append(TrajectoryStep(conversation(state), [assistant_message(text)]))
    return [message["content"] for message in await environment.env_response(conversation(state), state)]


def call(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


async def attempt(environment, index, *commands):
    """Returns the score of a rollout with these commands, and the replies."""
    state = environment.create_initial_state(environment.get_sample(index))
    try:
        replies = [await say(environment, state, call("shell", command=command)) for command in commands]
        return await environment.compute_reward(state), replies
    finally:
        await environment.end_rollout(state)


def test_every_task_fails_untouched_and_is_solved_by_its_solution():
    async def run():
        async with ready("terminal_tasks") as environment:
            scores = {}
            for index, task in enumerate(own_tasks()):
                (solution,) = task.solution.values()
                attempts = (attempt(environment, index), attempt(environment, index, solution.decode()))
                untouched, solved = await asyncio.gather(*attempts)
                scores[task.name] = (untouched[0].total_reward, solved[0].total_reward)
            return scores, len(environment.sandboxes.in_use_sandboxes)

    scores, left = asyncio.run(run())
    assert {name: score for name, score in scores.items() if score != (0.0, 1.0)} == {}
    assert (len(scores), left) == (20, 0)


def test_a_folder_in_harbors_format_is_a_task(tmp_path):
    files = {
        "instruction.md": "Say hello in out.txt.",
        "task.toml": '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 5.0\nenv = {WHOM = "${UNSET:-Ada}"}\n'
        '[environment]\nworkdir = "/srv/work"\nenv = {TITLE = "it\\u0027s"}',
        "environment/Dockerfile": 'FROM debian\nARG FIRST=A\nENV NAME="${FIRST}da" PATH=/opt:$PATH\nWORKDIR /srv/work\n'
        'COPY gree* .\nRUN\t--mount=type=cache,target=/x ["mkdir", "in"]\nCOPY ["data/", "in/"]\n'
        "RUN echo $NAME \\\n  > name\n",
        "environment/greetings": "",
        "environment/data/greeting": "hello",
        "tests/test.sh": '[ "$(cat out.txt)" = "hello $WHOM" ] && echo 0.75 > /logs/verifier/reward.txt',
        "solution/solve.sh": 'echo "$(cat in/greeting) $(cat name)" > out.txt',
    }
    for name, text in files.items():
        path = tmp_path / "say-hello" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "say-hello/environment/data/greeting").chmod(0o755)

    async def run():
        async with ready("terminal_tasks", tasks=str(tmp_path), provider="local") as environment:
            look = "pwd; cat greetings in/greeting name; test -x in/greeting && echo $NAME $TITLE"
            solved, replies = await attempt(environment, 0, look, files["solution/solve.sh"])
            forge = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; false"
            forged, _ = await attempt(environment, 0, forge)
            return solved, replies, forged, environment.get_sample(0)

    solved, replies, forged, sample = asyncio.run(run())
    assert sample.prompt == "Say hello in out.txt."
    assert replies[0] == ["[shell] exit code: 0\nstdout:\n/srv/work\nhelloAda\nAda it's\n"]
    assert (solved.total_reward, solved.sample_tags) == (0.75, {"task": "say-hello", "difficulty": "easy"})
    assert forged.total_reward == 0.0
    task = tmp_path / "say-hello"
    (task / "task.toml").write_text('verifier.env.KEY = "${UNSET}"')
    with pytest.raises(UserError, match=r"broken task.toml: env has \$\{UNSET\}, but this variable is not set"):
        read_tasks(str(task))
    (task / "task.toml").write_text("metadata = 1")
    with pytest.raises(UserError, match=r"broken task.toml"):
        read_tasks(str(task))
    (task / "task.toml").write_text("")
    assert read_tasks(str(task))[0].verifier_seconds == 600
    (task / "environment/docker-compose.yaml").write_text("services: {}")
    with pytest.raises(UserError, match=r"needs the containers of docker-compose\.yaml"):
        read_tasks(str(task))


@pytest.mark.parametrize(
    "trick",
    [
        "mkdir /tests; ln -s /dev/null /tests/test.sh; chmod 555 /tests",
        "mkdir /tests; echo exit 0 > /tests/test.sh; chmod 444 /tests/test.sh; chmod 555 /tests",
        "mkdir /tmp/t; ln -s /dev/null /tmp/t/test.sh; ln -s /tmp/t /tests; chmod 555 /tmp/t /",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 555 /logs/verifier /logs",
        "(while :; do mkdir -p /logs/verifier; echo 1e9 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &",
    ],
)
def test_a_verdict_that_the_model_left_does_not_count(trick):
    async def run():
        async with ready("terminal_tasks") as environment:
            return await attempt(environment, 0, trick)

    result, _ = asyncio.run(run())
    assert result.total_reward == 0.0


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        *((f"echo {written} > /logs/verifier/reward.txt", reward)
          for written, reward in (("1e9", 1.0), ("nan", 0.0), ("-inf", 0.0), ("good", 0.0))),
        *((f"echo '{written}' > /logs/verifier/reward.json", reward)
          for written, reward in (('{"reward": 0.5, "n": 9}', 0.5), ('{"a": 1, "b": 0}', 0.5), ("{}", 0.0))),
        ("test -e solved && echo 1 > /logs/verifier/reward.txt; exit 0", 0.0),
        ("exit 0", 1.0),
    ],
)  # fmt: skip
def test_a_reward_of_a_task_is_from_0_to_1_and_0_where_the_tests_wrote_none(tmp_path, script, reward):
    (tmp_path / "tests").mkdir()
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "instruction.md").write_text("Nothing.")
    (tmp_path / "tests" / "test.sh").write_text(script)

    async def run():
        async with ready("terminal_tasks", tasks=str(tmp_path)) as environment:
            return await attempt(environment, 0)

    assert asyncio.run(run())[0].total_reward == reward


def test_an_incomplete_folder_of_tasks_is_refused(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(UserError, match=r"no folder with a task.toml"):
        len(get_environment("terminal_tasks", tasks=str(tmp_path)))
    (tmp_path / "one" / "task.toml").write_text("")
    with pytest.raises(UserError, match=r"'one' has no instruction.md"):
        len(get_environment("terminal_tasks", tasks=str(tmp_path)))


def test_containers_of_tasks_have_a_writable_image_and_options_of_their_provider():
    environment = get_environment("terminal_tasks", provider="docker", team_id="a", extra={"network": True})
    assert environment.sandbox_config.extra == {"read_only": False, "team_id": "a", "network": True}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("FROM", "index out of range"), ('ENV A="b', "No closing quotation"), ("COPY no* /app/", "has no no*"),
        ("COPY ../.. /app/", "../.. is outside environment/"),
        ("ADD ../tests /app/", "../tests is outside environment/"),
        ("RUN <<EOF", "need a build"), ("COPY --from=build /x /y", "need a build"), ("RUN [echo]", "Expecting value"),
        ("FROM alpine", "several stages"), ("WORKDIR $HOME/app", "a variable"), ("ADD a.tar.gz /app/", "unpacks"),
        ("print(1)", "is no instruction, or is of a here-document"),
    ],
)  # fmt: skip
def test_a_dockerfile_that_needs_a_build_is_refused_with_its_line(tmp_path, line, problem):
    for name, text in {"task.toml": "", "instruction.md": "Go.", "tests/test.sh": "exit 0"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text(f"FROM debian\n{line}\n")
    with pytest.raises(UserError) as raised:
        len(get_environment("terminal_tasks", tasks=str(tmp_path)))
    assert repr(line) in str(raised.value) and problem in str(raised.value)


def test_lines_of_a_dockerfile_go_on_behind_comments_and_empty_lines(tmp_path):
    for name, text in {"task.toml": "", "instruction.md": "Go.", "tests/test.sh": "exit 0"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text("FROM debian\nUSER a\nRUN a && \\ \n# why\n\n  b << 1\n")
    (step,) = read_tasks(tmp_path)[0].set_up
    assert " ".join(step.split()) == "mkdir -p / && cd / || exit 1; a && b << 1"


def test_a_link_out_of_the_folder_of_a_task_is_refused(tmp_path):
    for name, text in {
        "task.toml": "",
        "instruction.md": "Go.",
        "tests/test.sh": "exit 0",
        "environment/a": "A",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "environment" / "b").symlink_to("a")
    assert len(get_environment("terminal_tasks", tasks=str(tmp_path))) == 1
    (tmp_path / "environment" / "etc").symlink_to("/etc")
    with pytest.raises(UserError, match=r"environment/etc of the task .* is a link to /etc, outside the folder"):
        len(get_environment("terminal_tasks", tasks=str(tmp_path)))


def test_a_task_in_the_cache_of_the_hub_may_link_to_its_repository_alone(tmp_path):
    repository = tmp_path / "datasets--someone--tasks"
    task = repository / "snapshots" / "main" / "first"
    texts = {"task.toml": "", "instruction.md": "Go.", "tests/test.sh": "exit 0", "environment/a": "A"}
    texts["environment/Dockerfile"] = "FROM debian\nCOPY a /app/a\n"
    (repository / "blobs").mkdir(parents=True)
    for number, (name, text) in enumerate(texts.items()):
        (repository / "blobs" / str(number)).write_text(text)
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).symlink_to(repository / "blobs" / str(number))
    (found,) = read_tasks(str(task.parent))
    assert found.set_up == [{"/app/a": b"A"}] and found.tests == {"/tests/test.sh": b"exit 0"}
    (tmp_path / "datasets--someone--other").write_text("not theirs")
    (task / "environment" / "a").unlink()
    (task / "environment" / "a").symlink_to(tmp_path / "datasets--someone--other")
    with pytest.raises(UserError, match=r"environment/a of the task 'first' is a link to .*other, outside the folder"):
        read_tasks(str(task.parent))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lengths").mkdir()
    (tmp_path / "lengths" / "environment.py").write_text(LENGTHS)
    return tmp_path


def test_a_config_gives_any_tool_environment_the_tools_of_sandboxes(folder):
    async def run():
        options = {"environments_path": [folder], "tools": ["shell", "sandbox_python"], "command_timeout_seconds": 1.0}
        async with ready("lengths", **options) as environment:
            sample = environment.get_sample(0)
            first, second = environment.create_initial_state(sample), environment.create_initial_state(sample)
            both = call("shell", command="echo a > x; echo b >&2; exit 3")
            both += call("sandbox_python", code="print(open('x').read() * 2)")
            replies = [
                await say(environment, first, both),
                await say(environment, first, call("shell", command="sleep 60")),
                await say(environment, first, call("shell", command="head -c 100000 /dev/zero | tr '\\0' x")),
                await say(environment, second, call("shell", command="ls")),
                await say(environment, second, "Done."),
            ]
            lost = await environment.sandbox_of(first)
            assert {record["sandbox"] for record in first.tool_records} == {lost.id}
            await environment.sandboxes.provider.destroy(lost)
            with pytest.raises(SandboxError):
                await say(environment, first, call("shell", command="ls"))
            for state in (first, second):
                await environment.end_rollout(state)
            return replies, environment.get_tool_metrics(first), environment.system_prompt

    replies, metrics, prompt = asyncio.run(run())
    assert "[shell] exit code: 3\nstderr:\nb" in replies[0][0]
    assert "[sandbox_python] exit code: 0\nstdout:\na\na" in replies[0][0]
    assert replies[1] == ["[shell] Error: it was killed after 1 seconds."]
    assert "characters left out" in replies[2][0] and len(replies[2][0]) < 10_000
    assert replies[3:] == [["[shell] exit code: 0"], []]
    assert metrics["sandbox_python_calls"] == 1
    assert "Run a command in a shell" in prompt and "state" not in prompt


def test_a_time_limit_of_nothing_is_refused(folder):
    with pytest.raises(UserError, match="command_timeout_seconds is 0, but it must be above 0"):
        get_environment("lengths", environments_path=[folder], tools=["shell"], command_timeout_seconds=0)
    with pytest.raises(UserError, match="timeout_per_test is 0, but it must be above 0"):
        get_environment("i3_code", dataset="own", timeout_per_test=0)


def test_a_shell_computes_what_countdown_asks_for():
    async def run():
        options = {"dataset": "generated", "prompt_style": "short", "operations": "+-", "num_samples": 20}
        async with ready("shell_countdown", **options) as environment:
            sample = environment.get_sample(0)
            numbers = sample.metadata["numbers"]
            sample.answer, sample.metadata["target"] = str(sum(numbers)), sum(numbers)
            zeros = "+".join(f"0{number}" for number in numbers)  # no octal numbers, with which other sums can be had
            answers = (zeros, "-".join(map(str, numbers)), sample.answer, "$(echo 1)")
            results = [await environment.compute_reward(f"<answer>{answer}</answer>", sample) for answer in answers]
            return sample, results, len(environment.sandboxes.all_sandboxes)

    sample, (right, wrong, bare, command), alive = asyncio.run(run())
    assert right.info_turns[0]["info_value"] == sample.answer
    assert [result.sample_metrics["correct"] for result in (right, wrong, bare, command)] == [1.0, 0.0, 0.0, 0.0]
    assert [result.total_reward for result in (right, wrong, bare, command)] == [2.0, 1.0, 1.0, 0.0]
    assert wrong.info_turns and not bare.info_turns and alive <= 2
    with pytest.raises(UserError, match="which a shell rounds"):
        get_environment("shell_countdown", operations="+/")
