"""The images: what their Dockerfiles copy is in the build context, and their entry point starts the right program."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_copies_what_its_context_and_earlier_stages_have(name: str):
    text = (ROOT / "docker" / name).read_text().replace("\\\n", "")
    stages: list[str] = []
    for line in text.splitlines():
        if line.startswith("FROM"):
            stages += re.findall(r" AS (\S+)$", line)
        for stage in re.findall(r"(?:--from=|,from=)([\w-]+)", line):
            assert stage in stages
        if line.startswith("COPY ") and "--from" not in line:
            for source in shlex.split(line)[1:-1]:
                assert (ROOT / source).exists(), line
                assert not [pattern for pattern in IGNORED if Path(source).match(pattern)], line
    (entry,) = re.findall(r'^ENTRYPOINT \["/root/telescope/(.*)"\]$', text, re.MULTILINE)
    for script in (entry, *re.findall(r"^RUN (docker/\S+)$", text, re.MULTILINE)):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_context_has_nothing_that_git_ignores():
    ignored = (ROOT / ".gitignore").read_text().split()
    for name in (line.strip("/") for line in ignored):
        assert any(Path(name).match(pattern.removeprefix("**/")) for pattern in IGNORED), name


@pytest.mark.parametrize(("command", "started"), [
    (["train", "--config", "a b"], "telescope train --config a b"),
    (["telescope", "train"], "telescope train"),
    (["eval", "runs/one"], "telescope eval runs/one"),  # also a word of the shell
    (["echo", "a  b"], "a  b"),
])  # fmt: skip
def test_a_command_that_is_no_program_is_one_of_telescope(tmp_path: Path, command: list[str], started: str):
    telescope = tmp_path / "telescope"
    telescope.write_text('#!/bin/sh\necho telescope "$*"\n')
    telescope.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    entry = [str(ROOT / "docker" / "entrypoint.sh"), *command]
    answer = subprocess.run(entry, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == started
