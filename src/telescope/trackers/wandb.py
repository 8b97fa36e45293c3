"""Weights & Biases: charts, the code, and the files of the record, online or offline.

Step metrics have the step as their axis, gauges the minutes since the run started. The record's files are the run's
files below `telescope/`, in the layout of a run directory; `files.json` there names the current ones. They lie in the
folder of the W&B run too (linked where possible), so that `wandb sync` can upload an offline run later.

Invariants: attempts of a run are one run of W&B, whose id is that in `run.json`. Without a server the run is recorded
offline. What has been uploaded is not uploaded again.
"""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from telescope.record.files import replace_json
from telescope.trackers.base import Report, TrackedRun

INIT_SECONDS = 90.0
"""Deadline for reaching the server. Afterwards the run is recorded offline."""

API_SECONDS = 30
"""Deadline of a question to the server."""

FOLDER = "telescope"
"""Folder of the record among the files of a W&B run. W&B itself writes a `config.yaml` beside it."""

MANIFEST = f"{FOLDER}/files.json"
"""Names and sizes of the record's current files: a W&B run keeps files that the record has replaced."""

_DEFAULT_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Hosts of W&B's own server; which one a client names depends on its version."""


def has_credentials(environment: Mapping[str, str]) -> bool:
    """Returns whether W&B would find a key, in the environment or netrc."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environment.get("HOME", "~")).expanduser()
    candidates = [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]
    hosts = server_hosts(environment)
    for path in candidates:
        try:
            known = netrc.netrc(str(path.expanduser()))
        except (OSError, netrc.NetrcParseError):
            continue
        if any(known.authenticators(host) for host in hosts):
            return True
    return False


def server_hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the hosts of the server, as netrc may name them: of `WANDB_BASE_URL`, `wandb login --host`, or W&B's."""
    settings = configparser.ConfigParser()
    home = Path(environment.get("HOME", "~")).expanduser()
    folder = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb")
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):  # W&B reports it
        settings.read(folder / "settings")
    url = environment.get("WANDB_BASE_URL") or str(settings.get("default", "base_url", fallback=""))
    own = urlparse(url).hostname or ""
    return (own, urlparse(url).netloc) if own and own not in _DEFAULT_HOSTS else _DEFAULT_HOSTS


def wandb_mode(environment: Mapping[str, str]) -> str:
    """Returns `online`, `offline` or `disabled`: `WANDB_MODE`, else online if there are credentials."""
    asked = environment.get("WANDB_MODE", "").strip().lower()
    if asked in ("online", "offline", "disabled"):
        return asked
    return "online" if has_credentials(environment) else "offline"


def start(run: TrackedRun, report: Report) -> WandbTracker:
    """Starts the run as configured, or offline if the server cannot be reached."""
    import wandb

    try:
        started = _init(run, run.wandb_mode)
    except wandb.errors.Error as error:
        if run.wandb_mode == "offline":
            raise
        report("WARNING", f"W&B cannot be used, so the run is recorded offline: {error}")
        wandb.teardown()  # its service still holds the id of the run
        started = _init(run, "offline")
    if started.url:
        report("INFO", f"W&B: {started.url}")
    return WandbTracker(started, run)


def _init(run: TrackedRun, mode: Any) -> Any:
    import wandb

    return wandb.init(
        mode=mode,
        dir=run.directory,
        entity=run.entity,
        project=run.project,
        name=run.name,
        id=run.run_id,
        tags=run.tags or None,
        resume=run.resume,  # type: ignore[arg-type]
        config=run.config,
        allow_val_change=True,  # a resumed run may have another learning rate
        settings=wandb.Settings(console="off", save_code=False, init_timeout=INIT_SECONDS, silent=True),
    )


class WandbTracker:
    """A run of W&B."""

    def __init__(self, run: Any, info: TrackedRun) -> None:
        self._run = run
        self._info = info
        self._known: set[str] = set()
        self._uploaded: dict[str, int] | None = None
        last = info.last_step if run.offline else None  # the earlier attempts are in files beside this one's
        if run.resumed:
            last = run.summary.get("step")
            last = last.get("max") if hasattr(last, "get") else last
        self.last_step = -1 if last is None else int(last)
        # Axes are columns, because W&B's own counter cannot go back after a resume.
        run.define_metric("step", summary="max")  # an eval may end after later steps
        run.define_metric("elapsed_minutes", summary="max", hidden=True)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a row with the metrics of a step."""
        self._log("step", step, metrics)

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        """Adds a row with the gauges, at the minutes since the run started."""
        self._log("elapsed_minutes", (time - self._info.started_at) / 60, values)

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Sets values of the run's summary."""
        self._run.summary.update(dict(values))

    def upload(self, names: Sequence[str], sizes: Mapping[str, int]) -> None:
        """Uploads changed files of the record, and the list of all."""
        if self._uploaded is None:
            self._uploaded = self._sizes_on_server()
        folder = Path(self._run.dir)
        saved = []
        for name in names:
            if name.endswith(".parquet") and self._uploaded.get(f"{FOLDER}/{name}") == sizes[name]:
                continue
            target = folder / FOLDER / name
            with contextlib.suppress(FileNotFoundError):  # replaced by the recorder; its successor comes with the next
                _place(Path(self._info.directory) / name, target)
                saved.append(target)
        if self._run.offline:  # nothing is being uploaded, and a link to a replaced file keeps its space
            _remove_replaced(folder / FOLDER, sizes)
        replace_json(folder / MANIFEST, {"format": 1, "files": sizes}, indent=None)
        for target in (*saved, folder / MANIFEST):
            self._run.save(str(target), base_path=str(folder), policy="now")
        for name in names:
            if name.startswith("code/"):
                self._log_code(Path(self._info.directory) / name)

    def finish(self) -> None:
        """Waits until everything is uploaded, or written to the offline folder."""
        self._run.finish()

    def _log(self, axis: str, at: float, values: Mapping[str, float]) -> None:
        for name in values.keys() - self._known:
            self._run.define_metric(name, step_metric=axis, step_sync=False)
        self._known |= values.keys()
        self._run.log({axis: at, **values})

    def _sizes_on_server(self) -> dict[str, int]:
        """Returns the sizes of files that earlier attempts have uploaded. Empty without any, or offline."""
        import wandb

        if not self._run.resumed:
            return {}
        run = wandb.Api(timeout=API_SECONDS).run(self._run.path)
        return {file.name: file.size for file in run.files(per_page=1000) if file.name.startswith(f"{FOLDER}/")}

    def _log_code(self, archive: Path) -> None:
        """Logs a code snapshot as W&B's artifact of sources, which its page Code shows."""
        with tempfile.TemporaryDirectory(prefix="telescope-code-") as folder:
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
            self._run.log_code(folder, name=f"source-{self._run.id}", include_fn=lambda path: True)


def _remove_replaced(folder: Path, current: Mapping[str, int]) -> None:
    for path in folder.glob("tables/*/*"):
        if path.relative_to(folder).as_posix() not in current:
            path.unlink(missing_ok=True)


def _place(source: Path, target: Path) -> None:
    """Puts a file of the record where W&B uploads it from. Raises `FileNotFoundError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    temporary.unlink(missing_ok=True)
    if source.suffix == ".parquet":  # replaced by a new file when it changes, so a link keeps its content
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(source, temporary)
    else:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
