"""Optimizers beside the core's: torch's classes, Muon, rules by label, and whole leaves at owner ranks."""
