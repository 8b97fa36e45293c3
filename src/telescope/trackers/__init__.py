"""Copies a run's record to W&B, TensorBoard and trackio in a process beside the run.

`launch` runs in the driver, `process` is the other process. Each tracker has its own module. See docs/trackers.md.
"""
