"""Threads that read, write and sum blocks beside each other: files and checksums hold no interpreter lock."""

from __future__ import annotations

import os

__all__ = ["THREADS"]

THREADS = min(8, os.cpu_count() or 1)
