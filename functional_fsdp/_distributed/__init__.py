"""Other ranks: their processes, their memory, and groups with them."""
