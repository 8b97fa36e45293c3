"""Whether the Ray cluster that a run joins asks for a token, and so whether this process shows one.

Ray decides that by how a cluster was named and not by the cluster. Found by "auto", it shows a token, and wants to be
shown one, if there is one in the home directory; named by its address, it never does. So a cluster that was started
where there is one (the first local run on a machine makes it) cannot be joined by address, and one that was started
without is joined by "auto" and loses every actor at once. Therefore the cluster is asked. A user's own `RAY_AUTH_MODE`
wins.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import grpc
from ray._private import services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

from telescope.errors import UserError

MODE_VARIABLE = "RAY_AUTH_MODE"
QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""What the head node of a cluster answers to everybody who may speak with it."""
QUESTION_SECONDS = 10.0


def settle_authentication(ray_address: str) -> None:
    """Set `RAY_AUTH_MODE` of this process to what the cluster at `ray_address` wants, if it can be asked.

    Raises ConnectionError when nobody is there, UserError when it wants a token that is not here. Otherwise what is
    wrong is for `ray.init` to say.
    """
    if "://" in ray_address:
        return
    address = services.canonicalize_bootstrap_address(ray_address)
    if address is None:
        return
    check_that_somebody_listens(address)
    if MODE_VARIABLE in os.environ or (open_to_all := admits(address)) is None:
        return
    if not open_to_all:
        _check_token(ray_address, address)
    os.environ[MODE_VARIABLE] = "disabled" if open_to_all else "token"
    Config.initialize("")  # Ray reads the environment once


def forget_authentication() -> None:
    """Take back what `settle_authentication` has set: the cluster was not joined after all."""
    os.environ.pop(MODE_VARIABLE, None)
    Config.initialize("")


def admits(address: str, token: str | None = None) -> bool | None:
    """Whether the cluster at `address` speaks with who shows this token, or none. None: it gives no answer."""
    shown: Sequence[tuple[str, str]] = [("authorization", f"Bearer {token}")] if token is not None else []
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(QUESTION)(b"", timeout=QUESTION_SECONDS, metadata=shown)
        except grpc.RpcError as error:
            return False if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return True


def check_that_somebody_listens(address: str) -> None:
    """Raises ConnectionError when nobody does: `ray.init` would try for minutes. A cluster behind TLS passes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # for `ray.init` to say
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=QUESTION_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error


def _check_token(ray_address: str, address: str) -> None:
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    has_token = loader.has_token(ignore_auth_mode=True)
    if has_token and admits(address, loader.get_raw_token(ignore_auth_mode=True)) is not False:
        return
    raise UserError(
        f"ray_address: the cluster at {ray_address!r} ({address}) asks for its token, and "
        + ("the one that is here is another" if has_token else "there is none here")
        + ". Copy ~/.ray/auth_token from the machine that its head was started on, or set RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH"
    )
