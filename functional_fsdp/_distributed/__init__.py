"""Other ranks: their processes, their memory, groups with them, and the lanes on which work is issued."""
