"""The server of the dashboard: a FastAPI application over the records of runs. It writes nothing into a run."""
