"""Trains the policy: packing, micro-batches, loss, optimizer, schedule and ranks. Importing it imports no torch."""
