"""What can be put on top of an algorithm's loss, each a pure function of the trained tokens. All off by default.

`telescope.algorithms.loss` says in which order they compose.
"""
