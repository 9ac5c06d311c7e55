"""Transforms: small functions around a train step, each in a file of its own. The core does not know them."""

from .accumulate import accumulate
from .apply import apply
from .clip import clip_by_global_norm, clip_by_value, global_norm
from .compile import compile
from .compile_units import compile_units
from .divide import divide
from .forward_backward import ForwardBackward, forward_backward
from .nonfinite import Nonfinite, find_nonfinite, nonfinite, skip_nonfinite
from .remat import remat
from .vjp import vjp

__all__ = [
    "ForwardBackward",
    "Nonfinite",
    "accumulate",
    "apply",
    "clip_by_global_norm",
    "clip_by_value",
    "compile",
    "compile_units",
    "divide",
    "find_nonfinite",
    "forward_backward",
    "global_norm",
    "nonfinite",
    "remat",
    "skip_nonfinite",
    "vjp",
]
