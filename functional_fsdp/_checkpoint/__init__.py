"""States in files."""
