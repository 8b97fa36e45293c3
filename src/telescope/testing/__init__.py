"""Fakes of engine, trainer and whole run, for tests without a GPU."""
