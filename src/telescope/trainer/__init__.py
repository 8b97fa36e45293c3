"""Packing, micro-batches, loss, optimiser, schedule and the trainer's ranks. Importing this package imports no torch."""
