"""State and its lineage: where states come from, what they give out, and what step does to them."""
