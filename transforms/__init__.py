"""Transforms: small functions around a train step. The core does not know them."""

from . import collectives
from ._compile.compile_units import compile_units
from ._compile.startup import StartupReport, start_compilers, startup
from ._compile.whole_step import compile
from ._cuda_graph.graphed import cuda_graph
from ._drive.forward_backward import ForwardBackward, apply, forward_backward
from ._drive.jvp import jvp, linearize, pullback, vmap
from ._per_sample import clipped_gradients, per_sample_norms, per_sample_vjp
from .accumulate import accumulate, divide
from .budget import BudgetChoice, budget
from .chunked_loss import chunked_loss, linear_cross_entropy
from .compile_report import ClassTimes, CompileReport, compile_report
from .hvp import hvp
from .norms import (
    Nonfinite,
    NonfiniteError,
    WireError,
    any_nonfinite,
    clip_by_global_norm,
    clip_by_value,
    dot,
    find_nonfinite,
    global_norm,
    norms,
    skip_nonfinite,
    wire_error,
)
from .remat import offload, remat, saved
from .step_memory import step_memory
from .vjp import vjp

__all__ = [
    "BudgetChoice",
    "ClassTimes",
    "CompileReport",
    "ForwardBackward",
    "Nonfinite",
    "NonfiniteError",
    "StartupReport",
    "WireError",
    "accumulate",
    "any_nonfinite",
    "apply",
    "budget",
    "chunked_loss",
    "clip_by_global_norm",
    "clip_by_value",
    "clipped_gradients",
    "collectives",
    "compile",
    "compile_report",
    "compile_units",
    "cuda_graph",
    "divide",
    "dot",
    "find_nonfinite",
    "forward_backward",
    "global_norm",
    "hvp",
    "jvp",
    "linear_cross_entropy",
    "linearize",
    "norms",
    "offload",
    "per_sample_norms",
    "per_sample_vjp",
    "pullback",
    "remat",
    "saved",
    "skip_nonfinite",
    "start_compilers",
    "startup",
    "step_memory",
    "vjp",
    "vmap",
    "wire_error",
]
