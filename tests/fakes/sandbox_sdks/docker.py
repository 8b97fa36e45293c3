"""A fake of the commands `docker` and `podman`. `DOCKER_FAKE` is a folder with its state: containers, argv of calls.

`exec` really runs commands; a container is a file, and its /tmp a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.fakes.sandbox_sdks.machine import Box


def main(arguments: list[str]) -> int:
    state = Path(os.environ["DOCKER_FAKE"])
    with open(state / "calls.jsonl", "a") as file:
        file.write(json.dumps(arguments) + "\n")
    if (state / "failure").exists():
        sys.exit((state / "failure").read_text())
    action, rest = arguments[0], arguments[1:]
    if action == "run":
        return start(state, rest)
    if action == "ps":
        wanted = rest[rest.index("--filter") + 1].removeprefix("label=")
        found = (json.loads(path.read_text()) for path in state.glob("*.json"))
        print("\n".join(box["id"] for box in found if wanted in box["labels"]))
        return 0
    name = next(argument for argument in rest if not argument.startswith("--"))
    path = state / f"{name}.json"
    if not path.exists():
        sys.exit(f"Error response from daemon: No such container: {name}")
    values = json.loads(path.read_text())
    box = Box({}, {}, values["network"], values["variables"], values["id"], Path(values["folder"]))
    if action == "rm":
        path.unlink()
        box.end()
        return 0
    line, variables = box.command(*rest[rest.index(name) + 1 :])
    os.execvpe(line[0], line, variables)


def start(state: Path, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    for option in ("name", "memory", "memory-swap", "cpus", "pids-limit", "cap-drop", "security-opt", "tmpfs"):
        parser.add_argument(f"--{option}", required=True)
    for option in ("workdir", "network", "gpus", "entrypoint"):
        parser.add_argument(f"--{option}")
    for option in ("label", "env"):
        parser.add_argument(f"--{option}", action="append", default=[])
    for option in ("detach", "rm", "read-only"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("image")
    parser.add_argument("-c", required=True)
    found = parser.parse_args(arguments)
    variables = dict(variable.split("=", 1) for variable in found.env)
    box = Box({}, {}, found.network != "none", variables, found.name)
    values = {"id": box.id, "network": box.network, "variables": variables, "folder": str(box.folder)}
    (state / f"{box.id}.json").write_text(json.dumps(values | {"labels": found.label}))
    print(box.id)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
