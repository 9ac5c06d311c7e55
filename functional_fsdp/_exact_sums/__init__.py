"""Gradients added up in float32, in the order of the ranks."""
