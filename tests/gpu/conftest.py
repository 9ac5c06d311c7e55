"""GPU tests, run by hand where there are two GPUs or more: `pytest tests/gpu`. Elsewhere they fail, never skip."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
