"""Finds environments by name, and creates them.

An environment named `<name>` is, in this order: `<name>/environment.py` in a folder of `environments_path`, an
installed entry point of the group `telescope.environments`, or `src/telescope/environments/<name>/environment.py`. A
name with a colon is `<name>:<task>` if the file says `TAKES_TASK = True`; its class gets the attribute `task`. Any
other name with a colon is `package.module:Class`. Nothing needs to be registered.

`Discovery` is the search, which evals share. It finds names and checks required packages from files and package
metadata; only `load_class` imports user code.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import shlex
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from telescope.environments.arguments import arguments_of, instantiate, known_arguments, refuse_near_misses
from telescope.environments.base import Environment, MultiTurnEnvironment, SingleTurnEnvironment, is_agent
from telescope.environments.user_code import describe_error, load_function
from telescope.errors import UserError
from telescope.utils.packages import installed_version, is_installed
from telescope.utils.text import did_you_mean, user_path

_TAKES_TASK = re.compile(rb"^(?:\xef\xbb\xbf)?TAKES_TASK(?: *: *bool)? *= *True\b", re.MULTILINE)


@dataclass(slots=True, frozen=True)
class Source:
    """The location of a named class: module, class and file.

    `class_name` is None for the only class of the module, and `file` is None if it cannot be read.
    """

    name: str
    module: str
    class_name: str | None
    file: Path | None
    folder: Path | None = None
    """Set for a folder of `environments_path`. Its module is imported from there, not from `sys.path`."""
    task: str = ""
    """The part after the colon in `<name>:<task>`."""


@dataclass(slots=True, frozen=True)
class Discovery:
    """The search for a kind of class: its name in messages, the package of built-in classes, and the base class."""

    kind: str
    package: str
    root: type

    @property
    def file_name(self) -> str:
        return f"{self.kind}.py"

    def names(self, folders: Sequence[str | Path] = ()) -> list[str]:
        """Returns all names that can be found, sorted."""
        return sorted(self._sources(folders))

    def has(self, name: str, folders: Sequence[str | Path] = ()) -> bool:
        """Returns whether the search finds `name`. False for `package.module:Class`."""
        return _named(name, self._sources(folders)) is not None

    def find(self, name: str, folders: Sequence[str | Path] = ()) -> Source:
        """Returns the location of `name`. Raises `UserError` with the nearest name if there is none."""
        sources = self._sources(folders)
        if source := _named(name, sources):
            return source if source.file else replace(source, file=_file_of(source.module, f"{self.kind} {name!r}"))
        if ":" in name:
            module, _, class_name = name.partition(":")
            return Source(name, module, class_name, _file_of(module, f"{self.kind} {name!r}"))
        for root in map(user_path, folders):
            if (root / name).is_dir() and not (root / name / self.file_name).is_file():
                raise UserError(f"The folder {root / name} has no {self.file_name}: give its file this name.")
            if root.resolve().name == name and (root / self.file_name).is_file():
                fix = f"Name the folder that contains it: {root.resolve().parent}."
                raise UserError(f"environments_path names {root}, which is the {self.kind} itself. {fix}")
        raise UserError(self.no_such(name, sorted(sources)))

    def no_such(self, name: str, known: Sequence[str]) -> str:
        """Returns the error message for an unknown name."""
        return (
            f"There is no {self.kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}. To add your own, "
            f"put a folder <name>/{self.file_name} into a folder named in environments_path (`--path` of "
            "`telescope envs`), or write package.module:Class."
        )

    def missing_packages(self, source: Source, declared: str) -> list[str]:
        """Returns the packages of REQUIRED_PACKAGES or OPTIONAL_PACKAGES that are missing. Imports nothing."""
        packages = _declared_packages(source.file, declared) if source.file else []
        return [package for package in packages if not _is_installed(package)]

    def check(self, name: str, folders: Sequence[str | Path] = ()) -> Source:
        """Returns the location of `name`. Imports no module of users.

        Raises `UserError` with the nearest name if there is none, or with the install command if a required package is
        missing.
        """
        source = self.find(name, folders)
        if missing := self.missing_packages(source, "REQUIRED_PACKAGES"):
            raise UserError(
                f"The {self.kind} {name!r} needs packages that are not installed: {', '.join(missing)}. "
                f"Install them with: pip install {' '.join(shlex.quote(p) for p in missing)}"
            )
        return source

    def load_class(self, name: str, folders: Sequence[str | Path] = (), *, also: type | None = None) -> type:
        """Imports and returns the class. Raises `UserError` if its module cannot be imported or has no such class.

        A class named as `package.module:Class` may be a subclass of `also` instead.
        """
        source = self.check(name, folders)
        module = self._import(source)
        if source.class_name is None:
            cls = self._only_class(module, source)
            return _derived(cls, cls, task=source.task) if source.task else cls
        found = module
        for part in source.class_name.split("."):
            found = getattr(found, part, None)  # type: ignore[assignment]
        if not (isinstance(found, type) and issubclass(found, (self.root, also) if also else self.root)):
            problem = f"is not a subclass of {self.root.__module__}.{self.root.__name__}."
            if found is None:
                problem = f"does not exist.{did_you_mean(source.class_name, vars(module))}"
            raise UserError(
                f"The {self.kind} {name!r} is not usable: {source.class_name!r} in {source.module} {problem}"
            )
        return found

    def _sources(self, folders: Sequence[str | Path]) -> dict[str, Source]:
        sources: dict[str, Source] = {}
        shipped = importlib.import_module(self.package)
        for place in shipped.__path__:
            for folder in self._marked_folders(Path(place)):
                module = f"{self.package}.{folder.name}.{Path(self.file_name).stem}"
                sources[folder.name] = Source(folder.name, module, None, folder / self.file_name)
        for point in importlib.metadata.entry_points(group=self.package):
            sources[point.name] = Source(point.name, point.module, point.attr or None, None)
        for named in reversed(folders):
            root = user_path(named).resolve()
            if not root.is_dir():
                raise UserError(f"environments_path names {str(named)!r}, which is not a folder.")
            for folder in self._marked_folders(root):
                module = f"{_synthetic_package(folder)}.{Path(self.file_name).stem}"
                sources[folder.name] = Source(folder.name, module, None, folder / self.file_name, folder)
        return sources

    def _marked_folders(self, root: Path) -> list[Path]:
        return sorted(p.parent for p in root.glob(f"*/{self.file_name}") if not p.parent.name.startswith((".", "_")))

    def _import(self, source: Source) -> ModuleType:
        try:
            if source.folder is not None:
                package, name = _install_package(source.folder), source.folder.name
                alias = f"{self.package}.{name}"
                if name.isidentifier() and alias not in sys.modules and importlib.util.find_spec(alias) is None:
                    # The folder may import itself like a shipped one: `telescope.environments.<folder>.helper`.
                    sys.modules[alias] = package
                    setattr(sys.modules[self.package], name, package)
            return importlib.import_module(source.module)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            why = describe_error(error, source.file.parent if source.file else None)
            raise UserError(f"The {self.kind} {source.name!r} cannot be imported: {why}.") from error

    def _only_class(self, module: ModuleType, source: Source) -> type:
        """Returns the module's concrete subclass, or the most derived one if subclasses inherit from each other."""
        every = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
        found = [c for c in every if issubclass(c, self.root)]
        defined = [c for c in found if not inspect.isabstract(c) or _is_complete_agent(c)]
        leaves = [c for c in defined if not any(c is not other and issubclass(other, c) for other in defined)]
        if len(leaves) == 1:
            return leaves[0]
        if not leaves:
            problem = f"defines no concrete subclass of {self.root.__name__}"
            abstract = [f"{c.__name__} lacks {', '.join(sorted(getattr(c, '__abstractmethods__', ())))}" for c in found]
            problem += f" ({'; '.join(abstract)})" if abstract else "; imported classes do not count"
        else:
            problem = (
                f"defines several: {', '.join(c.__name__ for c in leaves)}. Keep one, or name package.module:Class"
            )
        raise UserError(f"The {self.kind} {source.name!r} is not usable: {source.file} {problem}.")


def _named(name: str, sources: Mapping[str, Source]) -> Source | None:
    """Returns the location of `<name>` or `<name>:<task>`, if there is one."""
    name_of_folder, colon, task = name.partition(":")
    source = sources.get(name_of_folder)
    if source is None or not colon:
        return source
    code = b"" if source.file is None else source.file.read_bytes()
    return replace(source, name=name, task=task) if _TAKES_TASK.search(code) else None


def _file_of(module: str, what: str) -> Path | None:
    """Returns the source file of a dotted module. Imports its parent packages, but not the module."""
    try:
        spec = importlib.util.find_spec(module)
        problem = f"there is no module {module!r}"
    except (ImportError, ValueError) as error:
        spec, problem = None, str(error)
    if spec is None:
        raise UserError(f"The {what} cannot be found: {problem}. Install its package, or add its folder to PYTHONPATH.")
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _declared_packages(file: Path, wanted: str) -> list[str]:
    """Reads the module-level list REQUIRED_PACKAGES or OPTIONAL_PACKAGES without importing the module."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))  # bytes, for a byte order mark or another encoding
    except SyntaxError as error:
        place = f"{file}:{error.lineno}" if error.lineno else str(file)
        raise UserError(f"{place}: {error.msg}.") from error
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name == wanted:
                items = None
                with contextlib.suppress(ValueError):
                    items = ast.literal_eval(value)
                if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
                    place = f"{file}:{value.lineno}"
                    raise UserError(f"{place}: {name} must be a list of strings written out in place.")
                return list(items)
    return []


def _is_installed(requirement: str) -> bool:
    """Returns whether a distribution or module of that name is installed."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0]
    top = re.sub(r"[-.].*", "", name) if "." in name else name.replace("-", "_")
    return installed_version(name) is not None or is_installed(top)


def _synthetic_package(folder: Path) -> str:
    """Returns the package name for a folder outside `sys.path`. Folders with the same name get distinct ones."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return f"telescope_folder_{re.sub(r'[^0-9A-Za-z_]', '_', folder.name)}_{digest}"


def _install_package(folder: Path) -> ModuleType:
    """Makes the folder importable under its synthetic name, for relative imports. Returns its package."""
    name = _synthetic_package(folder)
    if name in sys.modules:
        return sys.modules[name]
    initial = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, initial, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    if initial.exists():
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise
    return package


ENVIRONMENTS = Discovery("environment", "telescope.environments", Environment)


def list_environments(environments_path: Sequence[str | Path] = ()) -> list[str]:
    """Returns the names of all environments that can be found, sorted. Imports none of them."""
    return ENVIRONMENTS.names(environments_path)


def check_environments(names: Iterable[str], environments_path: Sequence[str | Path] = ()) -> list[Source]:
    return [ENVIRONMENTS.check(name, environments_path) for name in names]


def environment_class(name: str, environments_path: Sequence[str | Path] = ()) -> type[Environment]:
    """Imports and returns the class. Raises `UserError` as `Discovery.check` does, and if the import fails.

    A direct subclass of `Environment` (or `BaseEnvironment`) with a `compute_reward` is a single-turn environment, and
    is returned as a subclass of `SingleTurnEnvironment`. An environment with its own `rollout` needs no other method
    than `load_dataset`.
    """
    return complete_class(ENVIRONMENTS.load_class(name, environments_path), name)


def complete_class(cls: type[Environment], name: str) -> type[Environment]:
    """Returns a class with the base and the methods that it needs; see `environment_class`."""
    bases: tuple[ABCMeta, ...] = (cls,)
    if not issubclass(cls, SingleTurnEnvironment | MultiTurnEnvironment):
        if not is_agent(cls) and not callable(getattr(cls, "compute_reward", None)):
            raise UserError(
                f"The environment {name!r} has no compute_reward: {cls.__name__} is a direct subclass of Environment. "
                "Subclass SingleTurnEnvironment or MultiTurnEnvironment (telescope.environments.base), or write "
                "`async def rollout(self, sample, context)`."
            )
        bases = (cls, SingleTurnEnvironment)
    unneeded = set()
    if is_agent(cls):
        if not inspect.iscoroutinefunction(cls.rollout):
            raise UserError(
                f"`rollout` of the environment {name!r} is no coroutine: write `async def rollout`, without yield."
            )
        abstract = {name for base in bases for name in base.__abstractmethods__} - {"load_dataset"}
        unneeded = {name for name in abstract if name in cls.__abstractmethods__ or not hasattr(cls, name)}
    return _derived(cls, *bases, **{each: _undefined(each) for each in unneeded}) if unneeded or len(bases) > 1 else cls


def _is_complete_agent(cls: type) -> bool:
    """Returns whether a class has its own `rollout` and lacks at most what `complete_class` adds."""
    return issubclass(cls, Environment) and is_agent(cls) and "load_dataset" not in cls.__abstractmethods__


def _undefined(method: str) -> Callable[..., Any]:
    """Returns a method that says what the turn loop of an agent lacks."""

    def refuse(self: Environment, *_: Any, **__: Any) -> Any:
        raise UserError(f"{type(self).__name__} has no `{method}`, which `take_turns` needs: define it")

    return refuse


def _derived(cls: type, /, *bases: type, **attributes: Any) -> type:
    """Returns a subclass of `bases` with the name and docstring of `cls`."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, bases, {**same, **attributes})


def get_environment(name: str, /, *, environments_path: Sequence[str | Path] = (), **kwargs: Any) -> Environment:
    """Creates an environment. Its dataset is loaded on first use.

    `kwargs` go to the constructor, to `load_dataset`, or to both, as each declares them. Other arguments become
    attributes of the instance; an argument that looks like a misspelled known one raises `UserError`.
    """
    return make_environment(environment_class(name, environments_path), name, kwargs)


def make_environment(cls: type[Environment], name: str, kwargs: dict[str, Any]) -> Environment:
    """Returns an instance of `cls` named `name`. Raises `UserError` for misspelled keyword arguments.

    In `tools`, `package.module:function` is imported, a name refers to `sandbox_tools`, and a mapping is a server of
    `mcp_tools`. A single-turn environment with tools becomes a `ToolEnvironment`.
    """
    tools = kwargs.get("tools")
    if isinstance(tools, str | dict) and "tools" not in arguments_of(cls, "__init__", Environment):
        raise UserError(f"The environment {name!r}: tools is {tools!r}; write a list: tools: [{tools}].")
    if isinstance(tools, list) and tools:
        use = f"{name}: the tool"
        tools = [load_function(tool, use) if isinstance(tool, str) and ":" in tool else tool for tool in tools]
        cls, kwargs = _with_tools(cls, tools), {**kwargs, "tools": tools}
    refuse_near_misses(kwargs, known_arguments(cls, Environment), f"The environment {name!r}")
    environment: Environment = instantiate(cls, Environment, name, kwargs)
    for method, given in (METHODS | (TURN_METHODS if environment.is_multi_turn else {})).items():
        if hasattr(environment, method):
            refuse_other_parameters(environment, name, method, given)
    scored = STATE if environment.is_multi_turn else COMPLETION
    refuse_other_parameters(environment, name, "compute_reward", scored)
    refuse_other_parameters(environment, name, "compute_eval_metrics", scored)
    if isinstance(environment.judge, dict):  # the constructor has not converted it
        from telescope.environments.judge import Judge

        environment.judge = Judge.of(environment.judge)
    others = [key for key in kwargs if key not in known_arguments(cls, Environment)]
    if others:
        environment.notice(
            f"The environment {name!r} received {', '.join(others)} as attributes: neither its constructor nor its "
            "load_dataset names them."
        )
    return environment


COMPLETION, STATE = ("completion", "sample", 'eos_token=""'), ("state", 'eos_token=""')
"""Parameters of scoring methods of one turn, and of several."""
METHODS = {"rollout": ("sample", "context"), "solution": ("sample",), "cheats": ("sample",)}
TURN_METHODS = {
    "get_initial_prompt": ("sample", "tokenizer=None"),
    "create_initial_state": ("sample",),
    "env_response": ("messages", "state"),
    "is_done": ("state",),
    "get_next_prompt_messages": ("state", "response"),
    "end_rollout": ("state",),
}
"""Parameters of the other methods that an environment may define, and those of several turns. One with a default is
optional: callers may leave it out."""


def refuse_other_parameters(owner: Any, name: str, method: str, given: Sequence[str]) -> None:
    """Raises `UserError` if a method does not take what it will be given. `eos_token` is given by name."""
    named = {"eos_token": None} if given[-1].startswith("eos_token") else {}
    positional = given[: len(given) - len(named)]
    function = getattr(owner, method)
    try:
        for least in (positional, [each for each in positional if "=" not in each]):
            inspect.signature(function).bind(*least, **named)
    except TypeError as error:
        keyword = "async def" if method == "rollout" or inspect.iscoroutinefunction(function) else "def"
        form = f"{keyword} {method}({', '.join(('self', *given))})"
        raise UserError(f"{method} of {name!r}: {error}. Write `{form}`.") from None


def _with_tools(cls: type[Environment], tools: list[Any]) -> type[Environment]:
    """Returns a class that takes these tools, or the class itself if it is neither single-turn nor takes tools."""
    # Imported here, because other environments do not need them.
    from telescope.environments.mcp_tools import McpTools
    from telescope.environments.sandbox_tools import SandboxTools
    from telescope.environments.tool_env import SingleTurnTools, ToolEnvironment

    mixins: list[type] = []
    if "tools" not in arguments_of(cls, "__init__", Environment) and issubclass(cls, SingleTurnEnvironment):
        mixins.append(SingleTurnTools)
    if mixins or issubclass(cls, ToolEnvironment):
        for mixin, form in ((SandboxTools, str), (McpTools, dict)):
            if any(isinstance(tool, form) for tool in tools) and not issubclass(cls, mixin):
                mixins.insert(0, mixin)
    # The bases of a mixin come before `cls`, and have a system prompt of their own.
    return _derived(cls, *mixins, cls, system_prompt=getattr(cls, "system_prompt", None)) if mixins else cls
