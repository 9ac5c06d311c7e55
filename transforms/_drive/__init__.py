"""Any module, driven unit by unit: a private copy, whose parts gather their weights when they are called."""
