"""Implements `telescope envs`, which lists, describes, tries, checks and creates environments."""

import argparse
import inspect
import json
import keyword
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import telescope.environments
from telescope.cli.main import CommandParser, number
from telescope.config.yaml_file import parse_yaml_value
from telescope.environments.arguments import known_arguments
from telescope.environments.base import DEFAULT_TURNS, ChatMessage, Environment, MultiTurnEnvironment, is_agent
from telescope.environments.local_rollout import (
    API_KEY_VARIABLE,
    Answer,
    Answerer,
    ChatServer,
    LocalRollout,
    NoAnswerError,
    roll_out_item,
)
from telescope.environments.registry import ENVIRONMENTS, environment_class, get_environment, list_environments
from telescope.environments.tool_env import ToolEnvironment
from telescope.environments.user_code import describe_error
from telescope.errors import InfrastructureError, MalformedResultError, RunError, UserError
from telescope.utils.text import plain, pluralize, user_path

KINDS = ("single", "multi", "tools", "agent")
NUM_GOLDS = 10  # items that are listed without a source of answers
TEMPLATES = Path(telescope.environments.__path__[0], "templates")

_PLAIN = (str, int, float, bool, list, tuple, dict)
_STYLES = {"system": "dim", "user": "cyan", "tool": "magenta", "assistant": "bold"}


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope envs", description="Environments: where prompts come from and how answers are scored."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="all environments that can be found")
    describing = commands.add_parser("describe", help="print its description, file and arguments")
    trying = commands.add_parser(
        "try",
        help="roll out items with a model server, a script, or your own answers",
        description="Roll out items of an environment and print messages and reward. Answers come from --url (a "
        "server with the chat API of OpenAI, such as vLLM), from --model alone (a checkpoint, model folder or hub "
        "model, which vLLM serves here meanwhile), from --answer (given in order, one a turn), or from the terminal. "
        f"The key of --url is read from {API_KEY_VARIABLE}.",
    )
    checking = commands.add_parser(
        "check",
        help="run items with scripted answers, and look for cheats that the reward pays for",
        description="Run items of an environment through the rollouts, the tokenizer and the graders of a run, with "
        "scripted answers. Prints the calls of the reference solution, forks with their cause, and what every answer "
        "earned: the reference solution must earn the full reward; an empty answer, the prompt, the bare gold, and "
        "where answers run commands also deleted tests, a planted conftest.py, spoofed output and a grader that hangs "
        "must earn nothing. An environment names its own by `solution(self, sample)`, a list of answers, one a turn, "
        "and `cheats(self, sample)`, a dict of names and answers. The exit code is 1 if one of them fails.",
    )
    making = commands.add_parser("new", help="write a new environment and its test")
    for command in (listing, describing, trying, checking):
        where = ("--path", "--environments-path")
        command.add_argument(*where, action="append", default=[], help="another folder to search")
    for command in (describing, trying, checking, making):
        command.add_argument("name", help="name of the environment")
    for command in (listing, trying):
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (trying, checking):
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="keyword argument (YAML value)"
        )
        command.add_argument("--url", help="model server, such as http://localhost:8000")
    trying.add_argument(
        "--item", type=number(int, 0), help="first item (default: 0; without answers, ten with golds are listed)"
    )
    trying.add_argument("--items", type=number(int, 1), default=1, help="number of items (default: 1)")
    trying.add_argument("--answer", action="append", help="next answer of the model; repeatable")
    trying.add_argument("--model", help="model to serve here, or to ask --url for (default: the first that it lists)")
    trying.add_argument(
        "--max-tokens", type=number(int, 1), help="tokens of one answer (default: 1024; with --model, what fits)"
    )
    trying.add_argument("--temperature", type=number(float, 0), default=1.0, help="default: 1.0")
    checking.add_argument("--model", help="folder or hub model with the tokenizer (default: a tokenizer of bytes)")
    checking.add_argument(
        "--samples", type=number(int, 1), default=3, help="number of items, across the dataset (default: 3)"
    )
    checking.add_argument(
        "--solution", metavar="TEXT", help="form of a right answer, with {} for the gold, if the environment has none"
    )
    checking.add_argument(
        "--labels", type=user_path, metavar="FILE", help="JSON lines with prompt, answer and label, to try the judge on"
    )
    making.add_argument("--kind", choices=KINDS, default="single", help="single turn, several turns, tools or agent")
    making.add_argument(
        "--folder", "--path", type=user_path, default=Path("environments"), help="default: environments"
    )
    listing.set_defaults(func=run_list)
    describing.set_defaults(func=run_describe)
    trying.set_defaults(func=run_try)
    checking.set_defaults(func=run_check)
    making.set_defaults(func=run_new)
    return parser


def run_list(arguments: argparse.Namespace) -> int:
    """Prints all environments. Returns the exit status."""
    rows = [_listed(name, arguments.path) for name in list_environments(arguments.path)]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table("name", "kind", "about", box=None, pad_edge=False)
    for row in rows:
        style = "red" if row["problem"] else ""
        table.add_row(row["name"], row["kind"], Text(row["problem"] or row["about"], style=style))
    Console().print(table)
    return 0


def run_describe(arguments: argparse.Namespace) -> int:
    """Prints an environment's description, arguments and packages. Returns the exit status."""
    cls = environment_class(arguments.name, arguments.path)
    source = ENVIRONMENTS.check(arguments.name, arguments.path)
    print(f"{arguments.name}: {_kind(cls)}, class {cls.__qualname__}")
    if source.file is not None:
        print(f"in {source.file}")
    if optional := ENVIRONMENTS.missing_packages(source, "OPTIONAL_PACKAGES"):
        print(f"not installed, not required: {', '.join(optional)}")
    print(f"\n{_description(cls) or 'It has no description.'}\n\nArguments (kwargs):")
    for name, default in sorted(_arguments(cls).items()):
        print(f"  {name}{default}")
    return 0


def run_try(arguments: argparse.Namespace) -> int:
    """Rolls out items and prints their messages. Returns the exit status."""
    try:
        environment = get_environment(arguments.name, environments_path=arguments.path, **_keywords(arguments.set))
        len(environment)  # loads the dataset, so that its errors come before a server is started
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"Loading {arguments.name} and its dataset failed: {describe_error(error)}.") from error
    has_no_answers = not (arguments.url or arguments.model or arguments.answer)
    if has_no_answers and arguments.item is None and (golds := _golds(environment, max(arguments.items, NUM_GOLDS))):
        Console(highlight=False).print(golds)
        return 0
    with ExitStack() as stack:
        return _try(arguments, environment, _answerer(arguments, stack))


def run_check(arguments: argparse.Namespace) -> int:
    """Checks an environment and prints the rewards of answers. Returns the exit status."""
    from telescope.cli.envs_check import check  # imports everything that a rollout worker imports

    return check(arguments, _keywords(arguments.set))


def _try(arguments: argparse.Namespace, environment: Environment, answerer: Answerer) -> int:
    console = Console(stderr=arguments.json, highlight=False)
    rewards: list[float] = []
    records: list[dict[str, Any]] = []
    first = arguments.item or 0
    for item in range(first, first + arguments.items):
        console.print(Text(f"{arguments.name}, item {item} of {len(environment)}", style="bold underline"))
        try:
            rollout = roll_out_item(environment, item, answerer, lambda message: _print_message(console, message))
        except MalformedResultError as error:
            raise UserError(f"{arguments.name}, item {item}: {error}.") from None
        except NoAnswerError:
            if not records:
                raise
            console.print(Text(f"no answer: {len(records)} of {arguments.items} items were rolled out", style="yellow"))
            break
        except (UserError, RunError):
            raise
        except (Exception, SystemExit) as error:
            why = str(error) if isinstance(error, InfrastructureError) else describe_error(error)
            raise UserError(f"{arguments.name}, item {item}: {why}.") from error
        rewards.append(rollout.score["total_reward"])
        records.append(
            {"item": item, "messages": rollout.messages, "end_reason": rollout.end_reason, "score": rollout.score}
        )
        _print_score(console, rollout)
    if isinstance(answerer, _Script) and answerer.answers:
        unused = len(answerer.answers)
        console.print(Text(f"answers not used: {unused}", style="yellow"))
    if arguments.json:
        print(json.dumps(records, indent=1))
    elif len(rewards) > 1:
        console.print(f"mean reward of {len(rewards)}: {sum(rewards) / len(rewards):.4g}")
    return 0


def _golds(environment: Environment, count: int) -> Table | None:
    """Returns the first items with their golds as the reward parses them. None for an environment without golds."""
    table = Table("item", "prompt", "gold", "read as", "problem", title=f"{environment.name}, {len(environment)} items")
    for item in range(min(count, len(environment))):
        check = environment.check_gold(sample := environment.get_sample(item))
        if check is None:
            return None
        prompt = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1].get("content")
        cells = (item, prompt, sample.answer, check.parsed, check.problem or "")
        table.add_row(*(Text(" ".join(str(cell).split())[:200]) for cell in cells))
    return table


def run_new(arguments: argparse.Namespace) -> int:
    """Writes a new environment and prints the next steps. Returns the exit status."""
    is_taken = arguments.name in list_environments([])
    files = write_new(arguments.name, arguments.folder, arguments.kind)
    for file in files:
        print(file)
    if is_taken:
        print(
            f"\n{arguments.name} is also the name of an installed environment; in environments_path, this one is found."
        )
    folder = shlex.quote(str(arguments.folder))
    print(f"\nTest it:  python -m pytest {shlex.quote(str(files[1]))}   (pip install pytest)")
    print(f"Check it: telescope envs check {arguments.name} --path {folder}")
    print(f"Try it:   telescope envs try {arguments.name} --path {folder}")
    print(f'Train it: environments_path: ["{arguments.folder}"] and environments: [{{name: {arguments.name}}}]')
    return 0


def write_new(name: str, folder: Path, kind: str) -> list[Path]:
    """Writes `folder/name/environment.py` and a test of its reward. Raises `UserError` for an invalid or used name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of an environment: use small letters, digits and underscores.")
    target = folder / name
    if target.exists():
        raise UserError(f"{target} exists already: choose another name or another folder (--folder).")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    files = {target / "environment.py": f"{kind}.py.txt", target / f"test_{name}.py": f"test_{kind}.py.txt"}
    try:
        target.mkdir(parents=True)
        for file, template in files.items():
            source = (TEMPLATES / template).read_text(encoding="utf-8")
            file.write_text(source.replace("@NAME@", name).replace("@CLASS@", class_name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}): name another folder with --folder.") from error
    return list(files)


def _listed(name: str, path: list[str]) -> dict[str, str]:
    try:
        cls = environment_class(name, path)
    except UserError as error:
        return {"name": name, "kind": "?", "about": "", "problem": str(error)}
    about = _description(cls).split("\n\n")[0].replace("\n", " ")
    return {"name": name, "kind": _kind(cls), "about": about, "problem": ""}


def _description(cls: type[Environment]) -> str:
    """Returns the docstring of the class or of its module, not an inherited one, which describes another class."""
    module = sys.modules.get(cls.__module__)
    return inspect.cleandoc(vars(cls).get("__doc__") or (module.__doc__ if module else None) or "")


def _kind(cls: type[Environment]) -> str:
    if is_agent(cls):
        return "agent"
    if issubclass(cls, ToolEnvironment):
        return "tools"
    return "several turns" if issubclass(cls, MultiTurnEnvironment) else "single turn"


def _arguments(cls: type[Environment]) -> dict[str, str]:
    """Returns the names of the environment's arguments, with ` = default` for plain values."""
    defaults = dict.fromkeys(known := known_arguments(cls, Environment), "")
    for owner in reversed(cls.__mro__):
        for method in ("load_dataset", "__init__"):
            function = vars(owner).get(method)
            if function is None or not issubclass(owner, Environment):
                continue
            for parameter in inspect.signature(function).parameters.values():
                if parameter.name in known and parameter.default is not parameter.empty:
                    default = parameter.default
                    is_prompt = parameter.name in ("system_prompt", "instruction_prompt")
                    if default is DEFAULT_TURNS or (default is None and is_prompt):
                        default = getattr(cls, parameter.name, None)
                    is_shown = default is None or isinstance(default, _PLAIN)
                    defaults[parameter.name] = f" = {default!r}" if is_shown else ""
    return defaults


def _keywords(settings: list[str]) -> dict[str, Any]:
    keywords = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UserError(f"--set is {setting!r}; write it as KEY=VALUE.")
        keywords[key] = parse_yaml_value(value, what=f"--set {key}")
    return keywords


def _answerer(arguments: argparse.Namespace, stack: ExitStack) -> Answerer:
    """Returns the source of answers: a server, a model that is served until `stack` ends, a script, or a person."""
    if arguments.answer and (arguments.url or arguments.model):
        raise UserError(f"--{'url' if arguments.url else 'model'} and --answer cannot be combined; give one of them.")
    if arguments.url:
        limit = arguments.max_tokens or 1024
        return ChatServer(arguments.url, model=arguments.model, max_tokens=limit, temperature=arguments.temperature)
    if arguments.model:
        from telescope.cli.chat import build_config, find_stops, find_target, serving

        target = find_target(arguments.model)
        config = build_config(target)
        stops = find_stops(config, target)
        url, key = stack.enter_context(serving(config, target))
        return ChatServer(url, key=key, max_tokens=arguments.max_tokens, temperature=arguments.temperature, stops=stops)
    if arguments.answer:
        return _Script(arguments.answer)
    if not sys.stdin.isatty():
        raise UserError(
            "There is no source of answers: give --model with a model folder, --url of a model server, or --answer for "
            "each turn."
        )
    return _by_hand


class _Script:
    """Gives answers from a list. `answers` has the unused ones."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = list(answers)

    def __call__(self, _: list[ChatMessage]) -> Answer | None:
        return Answer(self.answers.pop(0)) if self.answers else None


def _by_hand(_: list[ChatMessage]) -> Answer | None:
    print("Your answer (end it with an empty line; Ctrl-D ends the rollout):", file=sys.stderr)
    lines: list[str] = []
    while line := sys.stdin.readline():
        if line == "\n":
            return Answer("\n".join(lines))
        lines.append(line.rstrip("\n"))
    return Answer("\n".join(lines)) if lines else None


def _print_message(console: Console, message: ChatMessage) -> None:
    role = str(message["role"])
    content = Text(plain(str(message.get("content", ""))))  # a model's text must not control the terminal
    console.print(Text(f"[{role}]", style=_STYLES.get(role, "")), content, soft_wrap=True)


def _print_score(console: Console, rollout: LocalRollout) -> None:
    score = rollout.score
    ended = f", {rollout.end_reason}" if rollout.end_reason else ""
    console.print(
        Text(f"reward {score['total_reward']:.4g} ({pluralize(rollout.num_turns, 'turn')}{ended})", style="bold green")
    )
    for title, values in (("metrics", score["sample_metrics"]), ("golden answers", score["golden_answers"])):
        if values:
            console.print(
                f"{title}: " + ", ".join(f"{name} {_shown(value)}" for name, value in values.items()), soft_wrap=True
            )
    console.print()


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
