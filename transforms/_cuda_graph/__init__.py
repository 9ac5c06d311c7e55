"""Whole steps captured once and replayed."""
