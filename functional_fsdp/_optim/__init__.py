"""Optimizers as (init, update) pairs."""
