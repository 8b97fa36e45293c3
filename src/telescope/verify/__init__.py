"""Proofs on the user's own hardware and configuration: engine and trainer mean the same thing, weights arrive, and
gradients do not depend on packing. A file per proof; `run` puts them in order."""
