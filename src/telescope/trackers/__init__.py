"""Copies of a run's record for W&B, TensorBoard and trackio, made by one process beside the run.

`launch` is the driver's side, `process` the other one. Each tracker is a file of its own. See docs/trackers.md.
"""
