"""Worker processes that run user code, and the driver's side of them."""
