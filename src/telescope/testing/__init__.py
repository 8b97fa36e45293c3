"""Fakes of the engine, the trainer and a whole run, for tests without a GPU."""
