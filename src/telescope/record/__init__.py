"""The run directory: what a run writes about itself, and how it is read back, live or dead.

`Recorder` writes, `reader.Run` and `reader.list_runs` read, `tables.TABLES` says what every column means. Needs only
pyarrow and duckdb; W&B (`wandb_sink`) is optional and nothing waits for it.
"""

from telescope.record.recorder import Recorder, RecorderHealth

__all__ = ["Recorder", "RecorderHealth"]
