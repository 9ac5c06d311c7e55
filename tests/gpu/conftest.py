"""GPU tests, run by hand where there are two GPUs or more: `pytest tests/gpu/test_nccl.py`, each
file in a process of its own, since workers are forked and CUDA must not have been touched before. Elsewhere they fail;
only what needs four GPUs skips where there are two."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
