"""Shows a run in a terminal, for example over SSH. Reads through the dashboard's modules and writes nothing."""
