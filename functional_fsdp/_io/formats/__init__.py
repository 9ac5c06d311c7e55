"""Formats of checkpoints, one class each; see `contents.Format`."""
