"""The host's work for the schedule: how many calls the verbs make a unit and step, with a transport that does nothing;
and how many a driven forward and backward makes.

Times hang on the machine and on what else it does; calls do not. `python tests/ranks/test_host_overhead.py` prints the
time, too; with PYTHONPATH set to another checkout, that one's.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn as nn

import functional_fsdp as fsdp
import functional_fsdp.transforms as T
from functional_fsdp import launch
from functional_fsdp._runtime.runtime import Runtime

UNITS, LEAVES, STEPS = 40, 6, 100  # six leaves: a block of examples/benchmark.py
CALLS = 243
DRIVEN, FILES = 900, 33  # of five units: Python calls of the package, and in how many of its files
