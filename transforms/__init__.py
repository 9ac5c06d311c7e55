"""Transforms: small functions around a train step, each in a file of its own. The core does not know them."""

from .accumulate import accumulate
from .apply import apply
from .clip import clip_by_global_norm, clip_by_value, global_norm
from .clipped import clipped_gradients
from .compile import compile
from .compile_units import compile_units
from .cuda_graph import cuda_graph
from .divide import divide
from .forward_backward import ForwardBackward, forward_backward
from .hvp import hvp
from .nonfinite import Nonfinite, NonfiniteError, find_nonfinite, nonfinite, skip_nonfinite
from .per_sample import per_sample_norms, per_sample_vjp
from .remat import remat
from .vjp import vjp

__all__ = [
    "ForwardBackward",
    "Nonfinite",
    "NonfiniteError",
    "accumulate",
    "apply",
    "clip_by_global_norm",
    "clip_by_value",
    "clipped_gradients",
    "compile",
    "compile_units",
    "cuda_graph",
    "divide",
    "find_nonfinite",
    "forward_backward",
    "global_norm",
    "hvp",
    "nonfinite",
    "per_sample_norms",
    "per_sample_vjp",
    "remat",
    "skip_nonfinite",
    "vjp",
]
