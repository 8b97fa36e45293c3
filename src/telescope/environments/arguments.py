"""Which keyword arguments an environment takes, and the error for those that it does not.

An argument from the YAML file may be meant for the constructor or for `load_dataset`, of the class itself or of one
that it inherits from. Known are: the named parameters of both methods, followed up the inheritance for as long as each
passes `**kwargs` on, and the names that their bodies read from `**kwargs` as literals (`kwargs.get("subset")`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from telescope.errors import UserError
from telescope.utils.suggest import nearest_name


def constructor_arguments(cls: type, root: type) -> set[str]:
    """Names that `cls(...)` takes by itself, without those that `root` passes on to `load_dataset`."""
    return _arguments_of(cls, "__init__", root)


def dataset_arguments(cls: type, root: type) -> set[str]:
    """Names that `cls.load_dataset` takes."""
    return _arguments_of(cls, "load_dataset", root)


def check_arguments(cls: type, given: Iterable[str], root: type, *, called: str = "") -> None:
    """Raise `UserError` when `given` holds a name that neither method of `cls` knows."""
    known = constructor_arguments(cls, root) | dataset_arguments(cls, root)
    refuse_unknown(given, known, called or cls.__name__)


def refuse_unknown(given: Iterable[str], known: set[str], called: str) -> None:
    """Raise `UserError` that lists the known names when `given` holds another."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    words = []
    for name in unknown:
        near = nearest_name(name, known)
        words.append(f"{name!r} (did you mean {near!r}?)" if near else repr(name))
    listed = ", ".join(sorted(known)) or "none at all"
    raise UserError(f"{called} has no keyword argument {', '.join(words)}. It takes: {listed}.")


def load_arguments(cls: type, given: Mapping[str, Any], root: type) -> dict[str, Any]:
    """The part of `given` that `cls.load_dataset` takes."""
    known = dataset_arguments(cls, root)
    return {name: value for name, value in given.items() if name in known}


def instantiate(cls: type, root: type, name: str, given: Mapping[str, Any]) -> Any:
    """An instance that goes by `name`; of `given`, the constructor gets what it takes, `load_dataset` its part later.

    `root` is the class below which users' classes begin, `Environment` or `Eval`.
    """
    accepted = constructor_arguments(cls, root)
    made: Any = cls(**{key: value for key, value in given.items() if key in accepted})
    made._load_arguments = {**(made._load_arguments or {}), **load_arguments(cls, given, root)}
    made._name = made._name or name
    return made


def _owners(cls: type, method: str, root: type) -> list[type]:
    """Classes from `cls` up to, but without, `root` that define `method` themselves."""
    owners = []
    for owner in cls.__mro__:
        if owner is root:
            break
        if method in vars(owner):
            owners.append(owner)
    return owners


def _arguments_of(cls: type, method: str, root: type) -> set[str]:
    names: set[str] = set()
    fixed: set[str] = set()
    """Arguments of a base class that a subclass gives by itself."""
    for owner in _owners(cls, method, root):
        function = vars(owner)[method]
        parameters = list(inspect.signature(function).parameters.values())[1:]
        taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        names.update(taken - fixed)
        rest = _var_keyword(function)
        if rest is None:
            break
        names.update(_literal_reads(function, rest))
        fixed |= _given_beside(function, rest) - taken
    return names


def _given_beside(function: Callable[..., Any], mapping: str) -> set[str]:
    """Keywords that the source gives itself where it passes the mapping on: `super().__init__(tools=[f], **m)`."""
    return {
        keyword.arg
        for node in ast.walk(_source_of(function))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == function.__name__
        if any(k.arg is None and _is_name(k.value, mapping) for k in node.keywords)
        for keyword in node.keywords
        if keyword.arg is not None
    }


def _var_keyword(function: Callable[..., Any]) -> str | None:
    """Name of the `**kwargs` parameter, if there is one."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return parameter.name
    return None


def _literal_reads(function: Callable[..., Any], mapping: str) -> set[str]:
    """String literals that the source reads from the mapping: `m["x"]`, `m.get("x")`, `m.pop("x")`, `"x" in m`."""
    names: set[str] = set()
    for node in ast.walk(_source_of(function)):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if name == mapping:
                names.add(key)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop" | "setdefault"),
                args=[ast.Constant(value=str(key)), *_],
            ) if name == mapping:
                names.add(key)
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name(id=name)]) if name == mapping:
                names.add(key)
    return names


def _source_of(function: Callable[..., Any]) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])  # no source at hand (built at run time): the signature alone has to do


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
