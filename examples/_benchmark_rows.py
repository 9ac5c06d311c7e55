"""The rows of benchmark.py: each is a function (model, setting) -> step, and a step is tokens -> loss.

`CONTESTANTS`, at the end, names them. A new row is a line there: one of the functions below with another `Setting` (a
further `Schedule(transport=...)`, say), or with a function of its own (a step in a CUDA graph). Rows whose libraries
cannot share a process get a `group` of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from _benchmark_models import Config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

LR = 3e-5  # low: larger ones make the first steps of an untrained model chaotic, and then losses cannot be compared

Step = Callable[[torch.Tensor], torch.Tensor]
Build = Callable[[Any, "Setting"], Step]


@dataclass(frozen=True)
class Setting:
    """What a row may vary. Peers read what they have a match for."""

    mesh: DeviceMesh
    config: Config
    placement: str
    dtype: torch.dtype
    wire: torch.dtype | None = None  # as dtype
    sum: str = "auto"
    compiled: bool = False  # layers by torch.compile
    transport: str = "collective"
    keep: Any = None  # `Schedule(keep=)`; FSDP2 keeps everything gathered for "all"
    budget: int = 0  # bytes, of the row "budget"; 0: half of the gathered weights'

    def spec(self) -> fsdp.Spec:
        placement = getattr(fsdp, self.placement)(*(self.mesh.mesh_dim_names or ()))
        precision = fsdp.Precision(torch.float32, compute=self.dtype, wire=self.wire, sum=self.sum)
        transport: Any = self.transport
        schedule = fsdp.Schedule(keep=self.keep, transport=transport)
        return fsdp.Spec(self.mesh, placement, precision=precision, units=self.config.units(), schedule=schedule)

    def functionalize(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], Any]:
        params, skeleton = fsdp.functionalize(model)
        return params, T.compile_units(skeleton, self.config.layers) if self.compiled else skeleton

    def shard(self, model: nn.Module) -> tuple[fsdp.State, Any]:
        params, skeleton = self.functionalize(model)
        return fsdp.shard(params, self.spec(), fsdp.adamw(lr=LR), buffers=fsdp.buffers(model)), skeleton

    def modules(self, model: nn.Module) -> list[list[nn.Module]]:
        """Those of each unit; the peers' layers compiled, their way."""
        if self.compiled:
            for path in self.config.units():
                if path.startswith(self.config.layers[:-1]):
                    model.get_submodule(path).compile(dynamic=False)
        return [[model.get_submodule(path) for path in paths] for paths in self.config.units().values()]


# ---------------------------------------------------------------- this project


def keeping(state: fsdp.State, train_step: Callable[..., tuple[fsdp.State, torch.Tensor]]) -> Step:
    """tokens -> loss, the state kept in between."""
    kept = [state]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        kept[0], loss = train_step(kept[0], tokens)
        return loss

    return step


def whole_tree(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    loss_fn = setting.config.loss

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda w: loss_fn(fsdp.bind(skeleton, w), tokens))(weights)
        state = fsdp.reduce(state, grads)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def whole_vjp(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    loss_fn = setting.config.loss

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        loss, pullback = T.vjp(lambda w: loss_fn(fsdp.bind(skeleton, w), tokens), weights)
        (grads,) = pullback(weights, torch.ones_like(loss))
        state = fsdp.reduce(state, grads)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def loop_by_hand(skeleton: Any, units: tuple[str, ...]) -> Callable[..., tuple[fsdp.State, torch.Tensor]]:
    stages = {unit: skeleton.get_submodule(unit) for unit in units}

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        h, pullbacks = None, {}
        for unit, stage in stages.items():
            state, w = fsdp.unshard(state, unit)
            h, pullbacks[unit] = T.vjp(lambda w, h, stage=stage: fsdp.bind(stage, w)(h, tokens), w, h)
            if unit != "head":  # used again at once
                state = fsdp.release(state, unit)
        assert h is not None
        loss, dh = h, torch.ones_like(h)
        for unit in reversed(stages):
            state, w = fsdp.unshard(state, unit)
            dw, dh = pullbacks.pop(unit)(w, dh)
            state = fsdp.release(state, unit)
            state = fsdp.reduce(state, dw, unit)
        return fsdp.step(state), loss

    return train_step


def unit_by_unit(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    return keeping(state, loop_by_hand(skeleton, tuple(state.units)))


def traced(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = replace(setting, transport="traced").shard(model)
    return keeping(state, T.compile(loop_by_hand(skeleton, tuple(state.units))))


def driven(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    forward_backward = T.forward_backward(skeleton, setting.config.loss)

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    return keeping(state, train_step)


def either(model: nn.Module, setting: Setting) -> Step:
    """By hand where the model is a chain of stages, else driven."""
    return (unit_by_unit if setting.config.stages else driven)(model, setting)


def budget(model: nn.Module, setting: Setting) -> Step:
    size = sum(p.numel() for p in model.parameters()) * setting.dtype.itemsize
    return either(model, replace(setting, keep=setting.budget or size // 2))


# ---------------------------------------------------------------- the bound


def resident(model: nn.Module, setting: Setting) -> Step:
    params, skeleton = setting.functionalize(model)
    weights = {path: p.detach().to(setting.dtype) for path, p in params.items()}
    ranks = dist.get_world_size()
    shares = {path: p.detach().flatten()[: -(-p.numel() // ranks)].clone() for path, p in params.items()}
    main = [nn.Parameter(share) for share in shares.values()]
    optimizer = torch.optim.AdamW(main, lr=LR, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss, pullback = T.vjp(lambda w: setting.config.loss(fsdp.bind(skeleton, w), tokens), weights)
        (grads,) = pullback(weights, torch.ones_like(loss))
        for p, grad in zip(main, grads.values(), strict=True):
            p.grad = grad.flatten()[: p.numel()].float()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---------------------------------------------------------------- peers


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting) -> Step:
    """The step of every peer whose optimizer sees to everything."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = setting.config.loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fsdp2(model: nn.Module, setting: Setting, tune: Callable[[Any, list[Any], Setting], None] | None = None) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=setting.dtype, reduce_dtype=setting.wire or setting.dtype)
    reshard = setting.placement not in ("zero1", "zero2") and setting.keep != "all"
    *units, head = setting.modules(model)
    for modules in units:
        fully_shard(modules, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(head, mesh=setting.mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=setting.mesh, mp_policy=policy)
    if tune:
        tune(model, [modules[0] for modules in (*units, head)], setting)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), setting)


def fsdp2_tuned(model: nn.Module, setting: Setting) -> Step:
    return fsdp2(model, setting, tune)


def tune(model: Any, units: list[Any], setting: Setting) -> None:
    """Gathers two units ahead, issued early; reductions on a communicator of their own, two of them in flight."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 3])
        unit.set_modules_to_backward_prefetch(units[max(0, i - 2) : i][::-1])
    if hasattr(model, "set_separate_reduce_scatter_group"):  # torch 2.13
        model.set_separate_reduce_scatter_group()
    else:
        ranks = dist.get_process_group_ranks(setting.mesh.get_group(setting.mesh.ndim - 1))
        own = ReduceScatter(dist.new_group(ranks, use_local_synchronization=True))
        for unit in units:
            unit.set_custom_reduce_scatter(own)
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):  # torch 2.13
        model.set_reduce_scatter_max_input_buffers(2)


class ReduceScatter:
    """What `set_custom_reduce_scatter` asks for: the default's, in a process group of its own."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, self.group, async_op)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights only: buffers keep their dtype, as they do for the other contestants."""
    for p in model.parameters():
        p.data = p.data.to(dtype)


def ddp(model: nn.Module, setting: Setting) -> Step:
    main = list(model.parameters())
    if setting.dtype is not torch.float32:
        main = [nn.Parameter(p.detach().clone()) for p in main]
        cast(model, setting.dtype)
    setting.modules(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compute = list(model.parameters())
    optimizer = torch.optim.AdamW(main, lr=LR, fused=True)
    if setting.dtype is torch.float32:
        return trained(parallel, optimizer, setting)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = setting.config.loss(parallel, tokens)
        loss.backward()
        for m, p in zip(main, compute, strict=True):
            m.grad = p.grad.float() if p.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list[torch.Tensor](compute), list[torch.Tensor](main))
        parallel.zero_grad()
        return loss.detach()

    return step


def megatron(model: nn.Module, setting: Setting) -> Step:
    import megatron_fsdp as peer  # type: ignore[import-not-found]

    strategy = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[setting.placement]
    policy = peer.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=setting.wire or setting.dtype
    )
    cast(model, setting.dtype)  # compute's dtype is the module's there
    parallel = peer.fully_shard_model(
        module=model,
        # classes: the head is left to the root, which keeps it gathered, as the others do
        fsdp_unit_modules=list({type(module) for module in chain(*setting.modules(model)[:-1])}),
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    optimizer = peer.fully_shard_optimizer(torch.optim.AdamW(parallel.parameters(), lr=LR, fused=True))
    for values in optimizer.state.values():  # it has made a step on zeros, which does not count
        values["step"].zero_()
    return trained(parallel, optimizer, setting)


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Contestant:
    """A row: how it is built, whose it is, and with whom it shares processes."""

    build: Build
    whose: str = "here"  # or "peer", "bound"
    group: str = "eager"  # rows of a group share processes where groups are kept apart
    stages: bool = False  # needs a model that is a chain of stages


def varied(build: Build, **changes: Any) -> Build:
    return lambda model, setting: build(model, replace(setting, **changes))


CONTESTANTS = {
    "whole tree": Contestant(whole_tree),
    "whole tree vjp": Contestant(whole_vjp),
    "unit by unit": Contestant(unit_by_unit, stages=True),
    "driven": Contestant(driven),
    "float32 wire": Contestant(varied(either, wire=torch.float32)),
    "exact sum": Contestant(varied(either, wire=torch.bfloat16, sum="fp32")),
    "kept": Contestant(varied(either, keep="all")),
    "budget": Contestant(budget),
    "compiled": Contestant(varied(unit_by_unit, compiled=True), group="compiled", stages=True),
    "driven compiled": Contestant(varied(driven, compiled=True), group="compiled"),
    "kept compiled": Contestant(varied(either, keep="all", compiled=True), group="compiled"),
    "traced": Contestant(traced, group="traced", stages=True),
    "copy engine": Contestant(varied(either, transport="copy_engine"), group="copies"),
    "copy engine compiled": Contestant(varied(either, transport="copy_engine", compiled=True), group="copies"),
    # further transports: Contestant(varied(either, transport="..."), group="..."), one group for each that needs it
    # CUDA graphs: a function beside `traced` that wraps the same loop, with a group of its own
    "FSDP2": Contestant(fsdp2, "peer", "peers"),
    "FSDP2 tuned": Contestant(fsdp2_tuned, "peer", "peers"),
    "FSDP2 kept": Contestant(varied(fsdp2, keep="all"), "peer", "peers"),
    "FSDP2 float32": Contestant(varied(fsdp2, wire=torch.float32), "peer", "peers"),
    "FSDP2 compiled": Contestant(varied(fsdp2, compiled=True), "peer", "peers compiled"),
    "FSDP2 tuned compiled": Contestant(varied(fsdp2_tuned, compiled=True), "peer", "peers compiled"),
    "DDP": Contestant(ddp, "peer", "peers"),
    "DDP compiled": Contestant(varied(ddp, compiled=True), "peer", "peers compiled"),
    "Megatron-FSDP": Contestant(megatron, "peer", "Megatron-FSDP"),
    "resident": Contestant(resident, "bound", "bound"),
    "resident compiled": Contestant(varied(resident, compiled=True), "bound", "bound"),
}
PEER, BY_HAND, BOUNDS = "FSDP2", "unit by unit", ("resident compiled", "resident")

CPU = ("whole tree", "whole tree vjp", "unit by unit", "driven", "FSDP2", "DDP")
GPU = (
    "unit by unit", "driven", "compiled", "driven compiled", "traced", "FSDP2", "FSDP2 tuned", "FSDP2 compiled", "DDP",
    "resident", "resident compiled",
)  # fmt: skip
LARGE = ("unit by unit", "compiled", "FSDP2", "FSDP2 compiled")  # as many as fit beside each other


def default(model: str, cuda: bool, apart: bool) -> list[str]:
    """The rows of a run that names none."""
    if not cuda:
        return [*CPU]
    return [*LARGE] if model == "6.7b" and not apart else [*GPU]


def missing(name: str, model: str, config: Config, cuda: bool, placement: str) -> str | None:
    """Why this row cannot run, or None."""
    if CONTESTANTS[name].stages and not config.stages:
        return f"{model} is no chain of stages; driven takes any module"
    if name.startswith("DDP") and model == "6.7b":
        return "6.7 B parameters with their AdamW state take 100 GiB and more on every rank"
    if name == "Megatron-FSDP":
        if find_spec("megatron_fsdp") is None:
            return "not installed (pip install megatron-fsdp)"
        if not cuda or placement in ("hsdp", "hfsdp"):
            return "needs GPUs" if not cuda else f"has no row for {placement} here"
    return None
