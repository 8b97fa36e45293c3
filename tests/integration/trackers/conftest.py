"""No credentials of the person who runs the tests, a home without settings, and readers of what W&B wrote offline."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_credentials(tmp_path_factory, monkeypatch):
    """Gives the test a home of its own, without keys for W&B."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "TRACKIO_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """Yields the records of all offline runs, oldest first.

    A .wandb file is, after 7 bytes, a LevelDB log with blocks of 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    paths = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in paths}) == 1, "one run of W&B"
    for path in paths:
        data, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            left_in_block = 2**15 - position % 2**15
            if left_in_block < 7:
                position += left_in_block
                continue
            length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
            record += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                yield wandb_internal_pb2.Record.FromString(record)
                record = b""


def offline_values(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of the history that W&B wrote offline."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(run_dir)
        if record.HasField("history")
    ]


def offline_summary(run_dir: Path) -> dict[str, Any]:
    """Returns the summary that W&B wrote offline: the last value of every key."""
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in wandb_records(run_dir)
        if record.HasField("summary")
        for item in record.summary.update
    }
