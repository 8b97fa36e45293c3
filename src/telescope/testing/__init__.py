"""The recorded runs of `telescope ui --demo`."""
