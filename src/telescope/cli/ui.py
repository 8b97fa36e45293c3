"""Implements `telescope ui`, which opens the dashboard. Parses and prints; `telescope.dashboard` is the server."""

from __future__ import annotations

import argparse
import errno
import os
import re
import socket
import sys
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from telescope.cli.main import CommandParser
from telescope.cli.runs import add_root, folders_of_runs
from telescope.errors import UserError
from telescope.record.files import replace_file
from telescope.record.reader import Run
from telescope.trackers.wandb import has_credentials
from telescope.utils.text import user_path

if TYPE_CHECKING:
    from telescope.dashboard.remote import WandbRuns

DEFAULT_PORT = 8005
NUM_PORTS = 100  # number of ports that are tried, beginning with the wanted port

LAST_PORT = 65_535

PROJECT = re.compile(
    r"^(https?://[^/]+/(?:wandb/)?)?(?!\.)([\w.-]+)/([\w.-]+)(?(1)(?:[/?#].*)?|(?:/(?:runs|table|workspace).*)?/?)$"
)
"""Matches a W&B project or its address in a browser."""

CLOSE_SECONDS = 1  # How long running requests may take after Ctrl-C. Open pages reconnect by themselves.


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope ui",
        description="Serve the dashboard: progress and health of runs, metrics, answers, timeline, evals and logs, "
        "live and afterwards. It only reads, and does not slow a run. Press Ctrl-C to end it.",
        epilog="examples:\n"
        "  telescope ui                            all runs in ./runs, and those on W&B after `wandb login`\n"
        "  telescope ui runs/demo runs/other       these two\n"
        "  telescope ui --root /data/runs          all runs in another folder\n"
        "  telescope ui my-team/my-project         the runs of a W&B project; opened ones are copied here\n"
        "  telescope ui --demo                     recorded runs, to look around without training\n"
        "  ssh -L 8005:localhost:8005 MACHINE      then open http://localhost:8005 here\n"
        "  telescope ui --host 0.0.0.0             reachable from other machines; the printed address has a secret\n"
        "  telescope ui --export runs/demo a.html  the run as one file to send",
    )
    parser.add_argument("places", nargs="*", metavar="RUN_DIR", help="run, folder of runs, or W&B's ENTITY/PROJECT")
    add_root(parser)
    parser.add_argument("--demo", action="store_true", help="replay recorded runs, one of them live")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="first port to try (default: 8005); 0: any")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    browser = "open no browser (default: one opens on a desktop, unless the address has a secret)"
    parser.add_argument("--no-browser", action="store_true", help=browser)
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="accept this name, for a proxy"
    )
    secret = "ask for the secret in the printed address (default: where other users or machines reach the dashboard)"
    parser.add_argument("--token", action=argparse.BooleanOptionalAction, help=secret)
    names = ("RUN_DIR", "FILE.html")
    parser.add_argument(
        "--export", nargs=2, type=user_path, metavar=names, help="write a run as one HTML file, and end"
    )
    parser.set_defaults(imports=("uvicorn", "telescope.dashboard.app"))
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Serves the dashboard until Ctrl-C, or exports a run to a file. Returns the exit code."""
    if arguments.export is not None:
        return export(*arguments.export)
    if not arguments.demo:
        folders, projects = choose_places(arguments.places, arguments.root)
        return serve(arguments, folders, [open_project(entity, project) for entity, project in projects])
    if arguments.places or arguments.root:
        raise UserError("--demo shows recorded runs only. Leave out --demo, or the folders.")
    from telescope.testing.demo import demo_runs

    print("This replays the recording of a real run; nothing is trained. It starts in some seconds.", flush=True)
    try:
        with demo_runs() as folder:
            return serve(arguments, [folder])
    except KeyboardInterrupt:
        return 0


def serve(arguments: argparse.Namespace, folders: list[Path], remotes: Sequence[WandbRuns] = ()) -> int:
    """Serves the runs in `folders` and of `remotes` until Ctrl-C. Returns the exit code."""
    import uvicorn

    from telescope.dashboard.app import STATIC, create_app
    from telescope.dashboard.safety import is_loopback, is_shared, new_token

    if arguments.token is False and not is_loopback(arguments.host):
        raise UserError(f"--no-token is for this machine alone, and --host is {arguments.host}. Omit one of them.")
    if not (STATIC / "index.html").is_file():
        print("The pages are not built. `make dashboard` in the clone builds or downloads them.", file=sys.stderr)
    listener, is_in_use = listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    token = new_token() if arguments.token or not is_loopback(arguments.host) else None
    if arguments.token is None and token is None and is_shared():
        token = new_token()
        print("Others can log in to this machine, so the address has a secret. --no-token omits it.", file=sys.stderr)
    app = create_app(folders, remotes=remotes, token=token, hosts=(arguments.host, *arguments.allow_host))
    if is_in_use:
        print(f"Port {arguments.port} is in use; using {port} instead. --port chooses another.", file=sys.stderr)
    finds = not (arguments.places or arguments.root or arguments.demo)
    finds = finds and os.environ.get("WANDB_MODE", "").strip().lower() not in ("offline", "dryrun", "disabled")
    has_key = finds and has_credentials(os.environ)
    places = [*map(str, folders), *(f"W&B {remote.project.path}" for remote in remotes)]
    shown = ", ".join([*places, *["your projects on W&B"] * has_key])
    # One run opens at its overview, where the dashboard's name links to the list.
    run_ids = list(app.state.registry.stores())
    opened = run_ids[0] if len(run_ids) == 1 and not (remotes or has_key) else None
    if finds:
        app.state.projects.start()
    url = address(arguments.host, port, token, opened)
    print(f"Telescope shows {shown} at\n\n    {url}\n", flush=True)
    print("Press Ctrl-C to end.", flush=True)
    # The secret would be among the arguments of the browser, which other users can list.
    if not arguments.no_browser and token is None and is_on_desktop(os.environ):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    config = uvicorn.Config(
        app,
        log_config=None,  # that of uvicorn closes the log handlers of other packages
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    server = uvicorn.Server(config)
    app.state.is_closing = lambda: server.should_exit
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
        app.state.projects.close()
    return 0


def is_on_desktop(environment: Mapping[str, str]) -> bool:
    """Returns whether the user of this terminal would see a browser that opens on this machine."""
    has_screen = sys.platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
    return has_screen and "SSH_CONNECTION" not in environment and sys.stdout.isatty()


def export(run_dir: Path, file: Path) -> int:
    """Writes a run as one HTML file. Raises `UserError` if there is no run, or the file cannot be written."""
    from telescope.dashboard.app import STATIC
    from telescope.dashboard.export import export_run
    from telescope.dashboard.registry import Registry

    run = Run(run_dir)
    registry = Registry([run_dir])
    (run_id,) = registry.stores()
    content = export_run(registry, run_id, STATIC)
    try:
        replace_file(file, content)
    except OSError as error:
        raise UserError(f"{str(file)!r} cannot be written: {error.strerror}. Choose another file.") from error
    print(f"{run.label} is in {file} ({len(content) / 2**20:.1f} MiB). Open it in a browser.")
    return 0


def choose_places(places: list[str], root: Path | None) -> tuple[list[Path], list[tuple[str, str]]]:
    """Returns folders, and W&B projects for places that are no folder. Raises `UserError` for other places.

    Without places, the folders are those in which runs are made, even if there is none yet.
    """
    if not places and root is None:
        return folders_of_runs(None), []
    folders, projects = [], []
    for place in [*places, *([str(root)] if root is not None else [])]:
        folder, project = user_path(place), PROJECT.match(place)
        if folder.is_dir():
            folders.append(folder)
        elif project is not None and place in places:
            projects.append((project[2], project[3]))
        else:
            hint = "`telescope train --config F` creates a run there; --root names another folder of runs."
            raise UserError(f"{place!r} is neither a folder nor a W&B project as ENTITY/PROJECT. {hint}")
    return folders, list(dict.fromkeys(projects))


def open_project(entity: str, project: str) -> WandbRuns:
    """Lists the runs of a W&B project. Raises `UserError` if W&B cannot be reached and there is no earlier copy."""
    from telescope.dashboard.remote import WandbRuns, cache_folder
    from telescope.dashboard.wandb_runs import WandbError, WandbProject

    print(f"Listing the runs of {entity}/{project} on W&B ...", file=sys.stderr, flush=True)
    remote = WandbRuns(WandbProject(entity, project, cache_folder() / ".wandb"))
    try:
        remote.start()
    except WandbError as error:
        raise UserError(f"{error} A folder of that name would be shown instead; there is none here.") from error
    print(
        remote.problem or f"{remote.num_runs} runs; those that you open are copied to {remote.root}.", file=sys.stderr
    )
    return remote


def listen(host: str, port: int) -> tuple[socket.socket, bool]:
    """Returns a listening socket and whether `port` was in use. Raises `UserError` if no port is free."""
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


def address(host: str, port: int, token: str | None, run_id: str | None = None) -> str:
    """Returns the address to open: the overview of a run, or the list of runs."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname(), "127.0.0.1": "localhost"}.get(host, host)
    shown = f"[{name}]" if ":" in name else name
    page = f"#/{quote(run_id, safe='')}/overview" if run_id else ""
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "") + page
