"""Environments: where prompts come from and how answers are scored.

`base` holds the classes to subclass, `registry` finds environments by name, `pool` runs their code in worker processes.
"""
