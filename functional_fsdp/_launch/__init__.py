"""The ranks of this machine as processes."""
