"""Helpers without knowledge of training: text, log files, processes, suggestions."""
