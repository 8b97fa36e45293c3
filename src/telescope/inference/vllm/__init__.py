"""Everything that knows vLLM: how it is started, its wire format, and the code loaded into its processes."""
