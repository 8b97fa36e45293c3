"""Fake inference servers (`tests/fakes`) in separate processes, and a tokenizer with long ids.

Separate processes keep their cost apart from the driver's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from measure import REPOSITORY
from tests.fakes.engine import FakeEngineSettings

from telescope.inference.auth import SECRET_VARIABLE
from telescope.tiny_model.build import TURN_END, build_tokenizer
from telescope.utils.child_guard import SUPERVISOR_PID_VARIABLE

VOCABULARY = 150_000
"""As large as Qwen's: ids of five and six digits, like most token ids of an answer."""

START_SECONDS = 60.0
SECRET = "benchmark"


@dataclass
class ServerProcess:
    """One running fake server, and the status of its supervisor, which has nothing to report."""

    url: str
    pid: int
    restarts: int = 0
    state: str = "ready"
    error: str | None = None
    last_log_lines: list[str] = field(default_factory=list)
    start_seconds: float | None = 0.0

    async def status(self) -> ServerProcess:
        return self

    async def dump_stacks(self) -> str:
        return ""


@asynccontextmanager
async def fake_servers(count: int, settings: FakeEngineSettings) -> AsyncIterator[list[ServerProcess]]:
    """Starts `count` servers on free loopback ports, and kills them at the end."""
    command = [sys.executable, "-m", "tests.fakes.server"]
    text = msgspec.json.encode(settings).decode()
    environment = {**os.environ, SECRET_VARIABLE: SECRET, SUPERVISOR_PID_VARIABLE: str(os.getpid())}
    processes = [
        await asyncio.create_subprocess_exec(
            *command, "--settings", text, stdout=asyncio.subprocess.PIPE, env=environment, cwd=REPOSITORY
        )
        for _ in range(count)
    ]
    try:
        servers = []
        for process in processes:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), START_SECONDS)).decode()
            if " on http" not in line:
                raise RuntimeError(f"a fake server did not start; it printed {line!r}")
            servers.append(ServerProcess(line.split()[-1], process.pid))
        yield servers
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


def save_tokenizer(folder: Path, num_tokens: int = VOCABULARY) -> int:
    """Writes a tokenizer of `num_tokens` tokens, most of them invented words; returns the id of its end token."""
    tokenizer = build_tokenizer(["item 1 2 3", "the target is reached from these numbers with plus and minus"], 512)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    taken = set(vocabulary.values()) | {token["id"] for token in content["added_tokens"]}
    generator = random.Random(0)
    for token_id in range(num_tokens):
        if token_id not in taken:
            vocabulary[_invented_word(generator, vocabulary)] = token_id
    path.write_text(json.dumps(content))
    return int(tokenizer.convert_tokens_to_ids(TURN_END))  # type: ignore[arg-type]


def _invented_word(generator: random.Random, taken: dict[str, int]) -> str:
    """Returns a new word of 2 to 6 letters with a leading space, in byte-level form."""
    while True:
        letters = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 6)))
        if (word := "\u0120" + letters) not in taken:
            return word
