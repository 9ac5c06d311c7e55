"""Modules as functions of their parameters."""
