"""Finds sandbox providers by name."""

from __future__ import annotations

import pkgutil
from typing import Any

from telescope.errors import UserError
from telescope.sandbox.base import SandboxProvider

PROVIDERS = {
    "local": "telescope.sandbox.local.LocalSandboxProvider",
    "docker": "telescope.sandbox.containers.DockerSandboxProvider",
    "podman": "telescope.sandbox.containers.PodmanSandboxProvider",
    "prime": "telescope.sandbox.prime.PrimeSandboxProvider",
    "modal": "telescope.sandbox.modal.ModalSandboxProvider",
    "daytona": "telescope.sandbox.daytona.DaytonaSandboxProvider",
    "e2b": "telescope.sandbox.e2b.E2BSandboxProvider",
}
"""Class of each provider that is part of Telescope."""


def provider_class(name: str | None = None) -> type[SandboxProvider]:
    """Returns a provider's class, by default that of `local`. Raises `UserError` for an unknown name."""
    path = PROVIDERS.get(name or "local", name or "")
    if "." not in path:
        raise UserError(f"provider={name!r} is not known. Use one of {', '.join(PROVIDERS)}, or package.module.Class")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"provider={name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, SandboxProvider)):
        raise UserError(f"provider={name!r} is not a subclass of telescope.sandbox.SandboxProvider")
    return found


def get_provider(name: str | None = None, **kwargs: Any) -> SandboxProvider:
    """Returns a provider, by default `local`. `name` may also be the dotted path of a class.

    Raises `UserError` for an unknown name, and `SandboxSetupError` if the provider cannot be used here.
    """
    found = provider_class(name)
    try:
        return found(**kwargs)
    except TypeError as error:
        raise UserError(f"provider={name!r} cannot be made with {kwargs}: {error}") from error
