"""Checks of engine, trainer and weights with the user's own hardware and configuration.

`checks` measures the claims, `run` starts the components and orders the checks, `report` holds the results.
"""
