"""State and its lineage: where states come from, and what `step` does to them."""
