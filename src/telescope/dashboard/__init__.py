"""Serves the dashboard as a FastAPI application over the records of runs. Writes nothing into a run."""
