"""Writes the record of a run into its run directory, and reads it.

`recorder.Recorder` writes. `reader.Run` and `reader.list_runs` read. `tables.TABLES` describes every column. Needs only
pyarrow and duckdb. Copies for W&B and other trackers are in `telescope.trackers`.
"""
