"""Everything that depends on vLLM. This is its start, its wire format, and the code loaded into its processes."""
