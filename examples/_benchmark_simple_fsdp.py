"""The row "SimpleFSDP" of benchmark.py: parameters are DTensors behind properties, and the compiler does all the rest.

    weight [n / ranks] ──cast──▶ all-gather ──▶ layer        in the graph, and again in the backward
    gradient ──cast──▶ reduce-scatter ──▶ [n / ranks]

Written from the paper (Zhang et al., SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile, 2024,
arXiv:2411.00284) and torch's documentation of DTensor, selective checkpointing and Inductor. The whole model is one
graph; on GPUs collectives are joined and moved by torch's own pass, a bucket for each unit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn as nn
from _benchmark_peers import trained
from _benchmark_setting import LR, Setting, Step
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

__all__ = ["simple_fsdp"]

ops = torch.ops
AGAIN = (  # what the backward does again, instead of keeping what it gave
    ops._c10d_functional.all_gather_into_tensor.default, ops._c10d_functional.wait_tensor.default,
    ops.aten._to_copy.default,
)  # fmt: skip
# the pass below has put collectives where they are to be
ORDERED = ("allow_buffer_reuse", "reorder_for_peak_memory", "reorder_for_compute_comm_overlap")


def simple_fsdp(model: nn.Module, setting: Setting) -> Step:
    """Fully sharded (zero3), the whole model compiled."""
    from torch._inductor import config
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    for part in model.modules():
        shard(part, setting)
    plans: list[Any] = [[*paths] if len(paths) > 1 else paths[0] for paths in setting.config.units().values()]

    def ordered(graph: torch.fx.Graph) -> None:
        manual_overlap_bucketing(cast(Any, graph.owning_module), plans, insert_overlap_deps=False)

    if setting.mesh.device_type == "cuda":  # the pass asks for the GPU's bandwidth
        for name in ORDERED:
            setattr(config, name, False)
        config.post_grad_custom_post_pass = ordered
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return trained(torch.compile(model, fullgraph=True, dynamic=False), optimizer, setting)  # type: ignore[arg-type]


def shard(part: nn.Module, setting: Setting) -> None:
    """A module's own parameters [n, ...] become DTensors [n / ranks, ...], and properties give them whole."""
    names = [name for name, parameter in part._parameters.items() if parameter is not None]
    for name in names:
        parameter: Any = part._parameters[name]
        part._parameters[name] = nn.Parameter(distribute_tensor(parameter.data, setting.mesh, [Shard(0)]))
    if names:
        policy = partial(create_selective_checkpoint_contexts, again)

        def given(name: str) -> property:
            def whole(self: nn.Module) -> Any:
                return checkpoint(gathered, self._parameters[name], setting, use_reentrant=False, context_fn=policy)

            return property(whole)

        body = {name: given(name) for name in names}
        part.__class__ = type(f"Sharded{type(part).__name__}", (type(part),), body)


def again(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if op in AGAIN else CheckpointPolicy.MUST_SAVE


def gathered(parameter: DTensor, setting: Setting) -> torch.Tensor:
    """[n / ranks, ...] -> [n, ...] in the compute dtype; its gradient is reduced in the wire's, to the mean."""
    wire = setting.wire or setting.dtype
    whole = parameter.redistribute(placements=[Replicate()], forward_dtype=setting.dtype, backward_dtype=wire)
    return whole.to_local(grad_placements=[Partial("avg")])
