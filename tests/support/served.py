"""What forks the ranks of tests: it imports what their files do, once, and not each rank for itself."""

from __future__ import annotations

import pytest  # noqa: F401
import support.problems  # noqa: F401

import functional_fsdp.extend
import functional_fsdp.transforms  # noqa: F401
from functional_fsdp._launch.server import serve

__all__ = ["serve"]
