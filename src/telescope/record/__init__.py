"""The run directory: writing the record of a run, and reading it.

`Recorder` writes. `reader.Run` and `reader.list_runs` read. `tables.TABLES` describes every column. Needs only pyarrow
and duckdb. Copies for W&B and other trackers are in `telescope.trackers`.
"""

from telescope.record.recorder import Recorder, RecorderHealth

__all__ = ["Recorder", "RecorderHealth"]
