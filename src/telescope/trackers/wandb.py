"""Sends charts to Weights & Biases, online or offline, and with `wandb_files` also the code and the record's files.

Step metrics have the step as their axis, gauges the minutes since the run started.

Invariants: all attempts of a run are one W&B run, with the id in `run.json`. Without a server the run is recorded
offline.
"""

import configparser
import contextlib
import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from telescope import __version__
from telescope.trackers.base import Histogram, Report, TrackedRun
from telescope.trackers.wandb_files import RecordUpload

INIT_SECONDS = 90.0
"""Deadline for reaching the server. Afterwards the run is recorded offline."""

VERSION_KEY = "telescope_version"
"""Key of the W&B config that marks the runs of Telescope."""

DEFAULT_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Hosts of W&B's own server. The client's version decides which one it uses."""

OLD_MODES = {"dryrun": "offline", "run": "online"}
"""Values of `WANDB_MODE` that W&B still accepts, and what they mean."""


def has_credentials(environment: Mapping[str, str]) -> bool:
    """Returns whether W&B would find a key, in the environment or netrc."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = environment.get("HOME", "~")
    for path in [environment["NETRC"]] if environment.get("NETRC") else [f"{home}/.netrc", f"{home}/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            known = netrc.netrc(str(Path(path).expanduser()))
            if any(known.authenticators(host) for host in server_hosts(environment)):
                return True
    return False


def server_hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the hosts of the server that netrc may name: of `WANDB_BASE_URL`, `wandb login --host`, or W&B's own."""
    settings = configparser.ConfigParser()
    home = Path(environment.get("HOME", "~")).expanduser()
    folder = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb")
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):  # W&B reports it
        settings.read(folder / "settings")
    url = environment.get("WANDB_BASE_URL") or str(settings.get("default", "base_url", fallback=""))
    own = urlparse(url).hostname or ""
    return (own, urlparse(url).netloc) if own and own not in DEFAULT_HOSTS else DEFAULT_HOSTS


def wandb_mode(environment: Mapping[str, str]) -> str:
    """Returns `online`, `offline` or `disabled`, from `WANDB_MODE` or else from whether there are credentials."""
    asked = environment.get("WANDB_MODE", "").strip().lower()
    asked = OLD_MODES.get(asked, asked)
    if asked in ("online", "offline", "disabled"):
        return asked
    return "online" if has_credentials(environment) else "offline"


class WandbTracker:
    """A run of W&B, offline if the server cannot be reached."""

    def __init__(self, run: TrackedRun, report: Report) -> None:
        import wandb

        self._started_at = run.started_at
        self._known: set[str] = set()
        try:
            opened = _init(run, run.wandb_mode)
        except wandb.errors.Error as error:
            if run.wandb_mode == "offline":
                raise
            report("WARNING", f"W&B cannot be used, so the run is recorded offline: {error}")
            wandb.teardown()  # its service still uses the id of the run
            opened = _init(run, "offline")
        if opened.url:
            report("INFO", f"W&B: {opened.url}")
        self._run = opened
        self._files = RecordUpload(opened, run.directory, run.uploads, run.interval)
        self.upload = self._files.upload
        last = run.last_step if opened.offline else -1  # the files of earlier attempts are beside this one's
        if opened.resumed:
            last = opened.summary.get("step")
            last = last.get("max") if hasattr(last, "get") else last
        self.last_step = -1 if last is None else int(last)
        # Axes are columns, because W&B's own counter cannot go back after a resume.
        opened.define_metric("step", summary="max")  # an eval may end after later steps
        opened.define_metric("elapsed_minutes", summary="max", hidden=True)

    def log(self, step: int, values: Mapping[str, float | Histogram]) -> None:
        self._log("step", step, values)

    def log_gauges(self, time: float, values: Mapping[str, float]) -> None:
        self._log("elapsed_minutes", (time - self._started_at) / 60, values)

    def log_summary(self, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def finish(self) -> None:
        self._run.finish()
        self._files.finish()

    def _log(self, axis: str, at: float, values: Mapping[str, float | Histogram]) -> None:
        import numpy as np
        import wandb

        row: dict[str, Any] = {axis: at}
        for name, value in values.items():
            if name not in self._known:
                self._known.add(name)
                self._run.define_metric(name, step_metric=axis, step_sync=False)
            if isinstance(value, int | float):
                row[name] = value
            else:
                row[name] = wandb.Histogram(np_histogram=(np.asarray(value[0]), np.asarray(value[1])))
        self._run.log(row)


def _init(run: TrackedRun, mode: Any) -> Any:
    import wandb

    return wandb.init(
        mode=mode, dir=run.directory, entity=run.entity, project=run.project, name=run.name, id=run.run_id,
        tags=run.tags or None, resume=run.resume,  # type: ignore[arg-type]
        config={VERSION_KEY: __version__, **run.config} if run.config else None,
        allow_val_change=True,  # a resumed run may have another learning rate
        settings=wandb.Settings(console="off", save_code=False, init_timeout=INIT_SECONDS, silent=True),
    )  # fmt: skip
