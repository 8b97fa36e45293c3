"""Passes keyword arguments of an environment to its methods, and refuses misspelled ones.

An argument from the YAML file may be meant for the constructor or for `load_dataset`, of the class itself or of a base
class. Known arguments are the named parameters of both methods, followed up the inheritance as long as each method
passes `**kwargs` on, and the names that their bodies read from `**kwargs` as literals (`kwargs.get("subset")`). Any
other argument becomes an attribute of the instance, unless it looks like a misspelled known one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from telescope.errors import UserError
from telescope.utils.text import did_you_mean, is_misspelled


def known_arguments(cls: type, root: type) -> set[str]:
    """Returns the names that the constructor, `load_dataset`, the constructor of `root` or `make_environment` takes."""
    named = [arguments_of(cls, method, root) for method in ("__init__", "load_dataset")]
    return set().union(*named, _named_parameters(vars(root)["__init__"]), getattr(cls, "arguments_of_registry", ()))


def load_arguments(cls: type, given: Mapping[str, Any], root: type) -> dict[str, Any]:
    """Returns the arguments in `given` that `cls.load_dataset` takes."""
    known = arguments_of(cls, "load_dataset", root)
    return {name: value for name, value in given.items() if name in known}


def refuse_near_misses(given: Iterable[str], known: set[str], called: str) -> None:
    """Raises `UserError` with the known names for a misspelled name."""
    for name in given:
        if name not in known and is_misspelled(name, known):
            hint = did_you_mean(name, known)
            raise UserError(f"{called} has no keyword argument {name!r}.{hint} It takes: {', '.join(sorted(known))}.")


def refuse_unknown(given: Iterable[str], known: set[str], called: str) -> None:
    """Raises `UserError` with the known names if `given` has any other name."""
    refuse_near_misses(given, known, called)
    unknown = [name for name in given if name not in known]
    if unknown:
        listed = ", ".join(sorted(known)) or "none"
        raise UserError(f"{called} has no keyword argument {', '.join(map(repr, unknown))}. It takes: {listed}.")


def refuse_wrong_types(cls: type, given: Mapping[str, Any], root: type, *, called: str) -> None:
    """Raises `UserError` for a value that the argument's annotation does not allow. Null is always allowed."""
    hints: dict[str, Any] = {}
    for method in ("__init__", "load_dataset"):
        for owner in _owners(cls, method, root):
            with contextlib.suppress(Exception):  # an annotation may be any expression
                hints = get_type_hints(vars(owner)[method], include_extras=True) | hints
    for name, value in given.items():
        if name in hints and value is not None:
            refuse_wrong_type(hints[name], name, value, called=called, fix="Correct it in its kwargs.")


def refuse_wrong_type(annotation: Any, name: str, value: Any, *, called: str, fix: str) -> None:
    """Raises `UserError` for a value that the annotation does not allow."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeError):
        return  # pydantic cannot check this annotation
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        from telescope.config.messages import describe_argument  # takes a second, and only errors need it

        raise UserError(f"{called}: {describe_argument(error, name, value)}. {fix}") from None


def instantiate(cls: type, root: type, name: str, given: Mapping[str, Any]) -> Any:
    """Returns an instance named `name`.

    Passes the constructor its arguments, and keeps those of `load_dataset` for later. `root` is the class that users
    subclass, `Environment` or `Eval`. Arguments that neither method takes become attributes.
    """
    refuse_wrong_types(cls, given, root, called=f"The {root.__name__.lower()} {name!r}")
    constructor = arguments_of(cls, "__init__", root)
    loads = load_arguments(cls, given, root)
    others = {key: value for key, value in given.items() if key not in constructor and key not in loads}
    passed = {key: value for key, value in given.items() if key in constructor}
    reaches_root = all(_rest_of(vars(owner)["__init__"]) for owner in _owners(cls, "__init__", root))
    passed |= others if reaches_root else {}
    try:
        inspect.signature(cls).bind(**passed)
    except TypeError as error:
        fix = "Set it in its kwargs, or give the parameter a default"
        raise UserError(f"The constructor of the {root.__name__.lower()} {name!r}: {error}. {fix}.") from None
    made: Any = cls(**passed)
    null_is_unset = _named_parameters(vars(root)["__init__"])
    left = {key: value for key, value in others.items() if key not in vars(made)}  # the constructor may drop them
    set_attributes(made, {k: v for k, v in left.items() if v is not None or k not in null_is_unset})
    made._load_arguments = {**(made._load_arguments or {}), **loads}
    made._name = made._name or name
    return made


def set_attributes(instance: Any, values: Mapping[str, Any]) -> None:
    """Sets attributes. Raises `UserError` for a name that would hide a method or property."""
    for name, value in values.items():
        existing = getattr(type(instance), name, None)
        if isinstance(existing, property) or callable(existing):
            raise UserError(
                f"{type(instance).__name__} cannot take the keyword argument {name!r}: it is a method or property."
            )
        setattr(instance, name, value)


def _owners(cls: type, method: str, root: type) -> list[type]:
    """Returns the classes from `cls` up to, but without, `root` that define `method` themselves."""
    owners = []
    for owner in cls.__mro__:
        if owner is root:
            break
        if method in vars(owner):
            owners.append(owner)
    return owners


def arguments_of(cls: type, method: str, root: type) -> set[str]:
    """Returns the keyword arguments of all definitions of `method` below `root`, as long as each passes `**kwargs` on.

    A constructor that passes them on to the root takes those of the root too. Arguments of a base class that a subclass
    sets itself are left out.
    """
    names: set[str] = set()
    fixed: set[str] = set()
    for owner in _owners(cls, method, root):
        function = vars(owner)[method]
        named = _named_parameters(function)
        names.update(named - fixed)
        if (rest := _rest_of(function)) is None:
            return names
        names.update(_literal_reads(function, rest))
        fixed |= _given_beside(function, rest) - named
    return names | (_named_parameters(vars(root)["__init__"]) - fixed) if method == "__init__" else names


def _rest_of(function: Callable[..., Any]) -> str | None:
    """Returns the name of the parameter `**kwargs`, if there is one."""
    return next((p.name for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD), None)


def _named_parameters(function: Callable[..., Any]) -> set[str]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _given_beside(function: Callable[..., Any], mapping: str) -> set[str]:
    """Returns the keywords passed beside the mapping, as in `super().__init__(tools=[f], **m)`."""
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError):  # of a text that is indented less than the code
        tree = ast.parse(textwrap.dedent(_source_of(function)))
    return {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == function.__name__
        if any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == mapping for k in node.keywords)
        for keyword in node.keywords
        if keyword.arg is not None
    }


def _literal_reads(function: Callable[..., Any], mapping: str) -> set[str]:
    """Returns the literals read from the mapping `m`: `m["x"]`, `m.get("x")`, `m.pop("x")`, `"x" in m`."""
    text = r"""(["'])(\w+)"""
    read = rf"\b{mapping}(?:\[|\.(?:get|pop|setdefault)\()\s*{text}\1|{text}\3 (?:not )?in {mapping}\b"
    return {found[2] or found[4] for found in re.finditer(read, _source_of(function))}


def _source_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""  # built at run time without source: only the signature is known
