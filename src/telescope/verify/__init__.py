"""Checks engine, trainer and weights on the user's hardware and configuration.

`checks` measures the claims, `run` starts the components and orders the checks.
"""
