"""`telescope ui`: opens the dashboard. Arguments and printing; the server is `telescope.dashboard`."""

from __future__ import annotations

import argparse
import errno
import socket
import sys
from pathlib import Path
from typing import Any

from telescope.cli.runs import DEFAULT_ROOT
from telescope.errors import UserError

DEFAULT_PORT = 8005
NUM_PORTS = 100
"""Ports that are tried, from the wanted one on."""

LAST_PORT = 65_535

CLOSE_SECONDS = 1
"""How long requests that run may end after Ctrl-C. Open pages reconnect by themselves."""


def add_parser(subparsers: Any) -> None:
    """Registers the subcommand on `telescope`'s parser."""
    parser = subparsers.add_parser(
        "ui",
        help="open the dashboard",
        description="Serve the dashboard: progress and health of runs, metrics, answers, timeline, evals and logs, "
        "live and afterwards. It only reads, and does not slow a run. Press Ctrl-C to end it.",
        epilog="examples:\n"
        "  telescope ui                            all runs in ./runs\n"
        "  telescope ui runs/demo runs/other       these two\n"
        "  telescope ui --root /data/runs          all runs in another folder\n"
        "  telescope ui --demo                     generated runs, to look around without training\n"
        "  ssh -L 8005:localhost:8005 MACHINE      then open http://localhost:8005 here\n"
        "  telescope ui --host 0.0.0.0             reachable from other machines; the printed address has a secret",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="a run, or a folder of runs")
    parser.add_argument("--root", type=Path, default=None, help="folder of the runs (default: runs)")
    parser.add_argument(
        "--demo", action="store_true", help="show generated runs, one of them live, from a temporary folder"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"first port to try (default: {DEFAULT_PORT}); 0 takes any free one",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="accept this name of the machine, as behind a proxy",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves the dashboard until Ctrl-C. Returns the exit code."""
    if not arguments.demo:
        return serve(arguments, choose_roots(arguments.run_dirs, arguments.root))
    if arguments.run_dirs or arguments.root:
        raise UserError("--demo shows generated runs only. Leave out --demo, or the folders.")
    from telescope.testing.demo_run.serve import demo_runs

    print("Generating a run of 1,000 steps takes a few seconds.", flush=True)
    try:
        with demo_runs() as folder:
            return serve(arguments, [folder])
    except KeyboardInterrupt:
        return 0


def serve(arguments: argparse.Namespace, roots: list[Path]) -> int:
    """Serves the runs in `roots` until Ctrl-C. Returns the exit code."""
    import uvicorn

    from telescope.dashboard.app import create_app
    from telescope.dashboard.safety import is_loopback, new_token

    listener, taken = listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    token = None if is_loopback(arguments.host) else new_token()
    app = create_app(roots, token=token, hosts=(arguments.host, *arguments.allow_host))
    if taken:
        print(f"Port {arguments.port} is in use; using {port} instead. --port chooses another.", file=sys.stderr)
    print(
        f"Telescope shows {', '.join(map(str, roots))} at\n\n    {address(arguments.host, port, token)}\n", flush=True
    )
    print("Press Ctrl-C to end.", flush=True)
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, server_header=False, timeout_graceful_shutdown=CLOSE_SECONDS
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0


def choose_roots(run_dirs: list[Path], root: Path | None) -> list[Path]:
    """Returns the folders to show. Raises `UserError` if one does not exist."""
    chosen = [*run_dirs, *([root] if root is not None else [])] or [DEFAULT_ROOT]
    for folder in chosen:
        if not folder.is_dir():
            hint = "`telescope train --config F` creates a run there; --root names another folder of runs."
            raise UserError(f"{str(folder)!r} is not a folder. {hint}")
    return chosen


def listen(host: str, port: int) -> tuple[socket.socket, bool]:
    """Returns a listening socket and whether `port` was taken. Raises `UserError` if no port is free."""
    if not 0 <= port <= LAST_PORT:
        raise UserError(f"--port {port} is not a port. Use 0 to {LAST_PORT}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(port, min(port + NUM_PORTS, LAST_PORT + 1)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(128)
            return listener, number != port
        except PermissionError:
            listener.close()
            raise UserError(f"Port {number} needs root. Use --port with a number from 1024 on.") from None
        except OSError as error:
            listener.close()
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    f"--host {host!r} is not an address of this machine. Use 127.0.0.1 or 0.0.0.0."
                ) from None
    raise UserError(f"Ports {port} to {port + NUM_PORTS - 1} are in use. Choose another with --port.")


def address(host: str, port: int, token: str | None) -> str:
    """Returns the address to open."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname(), "127.0.0.1": "localhost"}.get(host, host)
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
