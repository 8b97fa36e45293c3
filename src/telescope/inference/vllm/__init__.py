"""Everything that depends on vLLM: its start, its wire format, and the code loaded into its processes."""
