"""Packing, micro-batches, loss, optimizer, schedule and the trainer's ranks. Importing it imports no torch."""
