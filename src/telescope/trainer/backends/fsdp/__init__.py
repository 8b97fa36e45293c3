"""FSDP2: parameters, gradients and optimiser state sharded over all ranks."""
