"""The terminal view of a run, over SSH for example. Reads through the modules of the dashboard and writes nothing."""
