"""Triton, where torch has it: None on machines without."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["tl", "triton"]

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:  # torch for the CPU comes without
    triton = tl = None
