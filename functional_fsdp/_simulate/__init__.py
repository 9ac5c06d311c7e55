"""Ranks that are threads of one process and take turns: a medium beside processes. Only `_launch` knows of it."""
