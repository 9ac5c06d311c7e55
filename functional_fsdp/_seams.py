"""What the compilers, graphs and drivers of this package take from the core beside `extend`.

It follows what torch does and how the core is made, and changes with them without a word: nobody else uses it.
"""

from __future__ import annotations

from ._axes import by_rules, full_tensor
from ._capture import Capture, Veto, Vetoed
from ._common import objects
from ._common.calls import KEEPING, outside_inference, ranged, tracing_now, users_line
from ._common.errors import as_names, expect
from ._extend import note_activations
from ._graph.graph import Graph, GraphBuild, graph_of, keep_residuals, point_at_second_gathers, refuse_values
from ._graph.traced import base_of, begin_compiled, coordinate_of, given_in
from ._host_memory import HostBuffer
from ._nn.module import around_bound_calls, refuse_meta
from ._nn.skeleton import aliases_of
from ._optim.optimizer import put
from ._plan.cursor import Collision
from ._runtime.agreement import NewCounts
from ._shared import torch_names as torch_private
from ._shared.device import cuda_driver
from ._state.shard import local_part
from ._storage import aliased_by, changed, clear_padding, spoilt, written_by
from .look.tables import StepMemory, Stretch, find_peak, plan_for, steps_on

__all__ = [
    "Capture", "Collision", "Graph", "GraphBuild", "HostBuffer", "NewCounts", "StepMemory", "Stretch", "Veto",
    "Vetoed", "aliased_by", "aliases_of", "around_bound_calls", "as_names", "base_of", "begin_compiled", "by_rules",
    "changed", "clear_padding", "coordinate_of", "cuda_driver", "expect", "find_peak", "full_tensor",
    "given_in", "graph_of", "keep_residuals", "local_part", "note_activations", "objects", "outside_inference",
    "plan_for", "point_at_second_gathers", "put", "ranged", "refuse_meta", "refuse_values", "residuals_kept",
    "spoilt", "steps_on", "torch_private", "tracing_now", "users_line", "written_by",
]  # fmt: skip


def residuals_kept() -> bool:
    """Whether a traced pullback may keep the forward's residuals, which `point_at_second_gathers` then has read the
    second gather; else it recomputes. True inside `keep_residuals(True)`."""
    return bool(KEEPING)
