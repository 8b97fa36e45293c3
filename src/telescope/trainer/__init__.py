"""Packing, micro-batches, loss, optimiser, schedule and the trainer's ranks. Importing it imports no torch."""
