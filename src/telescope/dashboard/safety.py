"""Restricts access to the dashboard by Host, Origin and token, and sets the headers of every response.

Owns the refusals. Invariants: only PUT changes something, and only the user's documents. A page of another site can
neither read a response nor send a request, because Host and Origin are checked, which also prevents DNS rebinding.
Beyond loopback and on a machine with several users, every request needs the token of this start, a cookie that the
printed address sets.
"""

import ipaddress
import os
import pwd
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "font-src 'self'; img-src 'self' data: blob:; connect-src 'self'; worker-src 'self' blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response. Inline styles are for formulas. Scripts and images come from this server only."""

WRITABLE = "/api/user/"
"""Addresses below this prefix accept PUT."""

FIRST_PERSON, NOBODY = 1000, 65534
"""User ids on Linux. Services have ids below the first."""

SESSIONS = Path("/run/user")
"""Contains a folder for each user who is logged in."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Returns whether a bound address can be reached from this machine only."""
    found = _address(host)
    return host == "localhost" or (found is not None and found.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_shared() -> bool:
    """Returns whether the machine has accounts of other people, or sessions of people without a local account."""
    shells = {entry.pw_uid: entry.pw_shell for entry in pwd.getpwall()}
    people = {uid for uid, shell in shells.items() if not shell.endswith(("/nologin", "/false"))}
    sessions = {int(path.name) for path in SESSIONS.glob("[0-9]*") if path.name.isdigit()}
    return any(uid >= FIRST_PERSON and uid not in (NOBODY, os.getuid()) for uid in people | sessions)


def new_token() -> str:
    """Returns a secret that is valid until the server ends."""
    return secrets.token_urlsafe(24)


class Safety:
    """ASGI middleware. With a `token`, every request needs it, and `hosts` are allowed besides addresses."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._token = token
        own = (socket.gethostname(), socket.getfqdn()) if token else ()
        self._hosts = {name.lower() for name in (*LOOPBACK, *own, *hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        writes = scope["method"] == "PUT" and scope["path"].startswith(WRITABLE)
        if scope["method"] not in ("GET", "HEAD") and not writes:
            return _refuse(405, f"The dashboard only reads: use GET, or PUT below {WRITABLE}.")
        host = headers.get("host", "")
        if not self._allowed(host):
            return _refuse(
                403, f"Host {host!r} is not allowed. Open the address that `telescope ui` printed, or use --allow-host."
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return _refuse(403, f"Origin {origin!r} is not this dashboard.")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api"):
            return _refuse(403, "Another site may not use the API.")
        return self._without_token(scope, headers) if self._token else None

    def _allowed(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._hosts or (self._token is not None and _address(name) is not None)

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        assert self._token is not None
        name = f"telescope-{(scope.get('server') or ('', 0))[1]}"
        query = QueryParams(scope["query_string"])
        if _equal(query.get("token"), self._token):
            rest = QueryParams([(key, value) for key, value in query.multi_items() if key != "token"])
            path = "/" + scope["path"].lstrip("/\\")  # never to the address of another host
            answer = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303)
            answer.set_cookie(name, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if _equal(cookie_parser(headers.get("cookie", "")).get(name), self._token):
            return None
        return _refuse(401, "The token is missing or from another start. Open the address that `telescope ui` printed.")


def _equal(given: str | None, expected: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode(errors="replace"), expected.encode())


def _refuse(status: int, message: str) -> Response:
    return JSONResponse({"detail": message}, status_code=status, headers={"Cache-Control": "no-store"})
