"""Judges the health of a run by rules with limits (`rules`), alerts (`watch`), and a verdict in words (`verdict`).

The run evaluates the rules after every step and records their findings in the table `alerts`. The dashboard and the
terminal view evaluate the same rules for the current state.
"""
