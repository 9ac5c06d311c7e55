"""What the rows of benchmark.py have in common, this project's and its peers': what varies, and the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from _benchmark_models import Config, parts
from float8 import converted, gathered
from torch.distributed.device_mesh import DeviceMesh

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

__all__ = ["LR", "WARMUP", "Build", "Setting", "Step"]

WARMUP = 2  # eager steps before one is captured
LR = 3e-5  # low: larger ones make the first steps of an untrained model chaotic, and then losses cannot be compared

Step = Callable[[torch.Tensor], torch.Tensor]
Build = Callable[[Any, "Setting"], Step]


@dataclass(frozen=True)
class Setting:
    """What a row may vary. Peers read what they have a match for."""

    mesh: DeviceMesh
    hybrid: DeviceMesh | None  # replica × shard, of the rows that are hybrid whatever `--placement` is
    config: Config
    placement: str
    dtype: torch.dtype
    wire: torch.dtype | None = None  # as dtype
    sum: str = "auto"
    compiled: bool = False  # layers by torch.compile
    transport: Any = "collective"
    graph: bool = False  # the step as a CUDA graph
    keep: Any = None  # `Schedule(keep=)`; FSDP2 keeps everything gathered for "all"
    budget: int = 0  # bytes, of the row "budget"; 0: half of the gathered weights'
    offloaded: int = 0  # one of so many layers, the first ones: their activations wait in the host's memory
    gather: tuple[str, ...] = ()  # weights that are gathered in float8
    rounded: bool = False  # whether weights are rounded to `dtype` before the first step
    selective: bool = False  # FSDP2's layers recompute what torch's policy for selective checkpoints does not save
    once: bool = False  # whether shards are kept as they are gathered, so that gathers cast nothing

    def spec(self) -> fsdp.Spec:
        placement = getattr(fsdp, self.placement)(*(self.mesh.mesh_dim_names or ()))
        kept = self.dtype if self.once else None
        wide = fsdp.Precision(torch.float32, compute=self.dtype, wire=self.wire, sum=self.sum, gather=kept)
        narrow = replace(wide, gather=torch.float8_e4m3fn)
        precision = {**dict.fromkeys(self.gather, narrow), "*": wide}
        schedule = fsdp.Schedule(keep=self.keep, overlap_update=True)
        units, transport = self.config.units(), self.transport
        return fsdp.Spec(self.mesh, placement, precision=precision, units=units, schedule=schedule, transport=transport)

    def functionalize(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
        params, skeleton = fsdp.functionalize(model)
        if self.compiled:
            skeleton = T.compile_units(skeleton, self.config.layers, *self.chunked_head())
        if self.offloaded:
            first = [path for path in self.config.units() if path.startswith(self.config.layers[:-1])]
            skeleton = T.offload(skeleton, *first[: max(1, len(first) // self.offloaded)])
        return params, skeleton

    def shard(self, model: nn.Module) -> tuple[fsdp.State, Any]:
        params, skeleton = self.functionalize(model)
        return fsdp.shard(params, self.spec(), fsdp.adamw(lr=LR), buffers=fsdp.buffers(model)), skeleton

    def chunked_head(self) -> list[str]:
        """The path of the head, if its loss is in chunks: then it is compiled as layers are."""
        return [parts(self.config)[2][-1]] if self.config.chunks else []

    def modules(self, model: nn.Module) -> list[list[nn.Module]]:
        """Those of each unit."""
        return [[model.get_submodule(path) for path in paths] for paths in self.config.units().values()]

    def in_float8(self, model: nn.Module, fsdp2_gathers: bool = False) -> nn.Module:
        """The model with its layers' linears in float8, emulated on CPUs."""
        return converted(model, (self.config.layers[:-1],), self.mesh.device_type == "cpu", fsdp2_gathers)

    def gathering(self, model: nn.Module) -> Setting:
        """The same with the weights of a converted model's float8 linears gathered in float8."""
        return replace(self, gather=tuple(path for path in gathered(model) if path != "*"))

    def to_compile(self, model: nn.Module) -> list[nn.Module]:
        """The layers, and a head in chunks, which peers compile their way; none where nothing is compiled."""
        paths = [path for path in self.config.units() if path.startswith(self.config.layers[:-1])]
        paths += self.chunked_head()
        return [model.get_submodule(path) for path in paths] if self.compiled else []
