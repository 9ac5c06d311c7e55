"""The rows of benchmark.py: each is a function (model, setting) -> step, and a step is tokens -> loss.

`CONTESTANTS`, at the end, names them. A new row is a line there: one of the functions below with another `Setting` (a
further `Spec(transport=...)`, say), or with a function of its own (a step in a CUDA graph). Rows whose libraries
cannot share a process get a `group` of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from _benchmark_models import Config, in_chunks
from _benchmark_peers import ddp, fsdp2, fsdp2_float8, fsdp2_tuned, megatron
from _benchmark_setting import LR, WARMUP, Build, Setting, Step
from _benchmark_simple_fsdp import simple_fsdp

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

# ---------------------------------------------------------------- this project


def keeping(state: fsdp.State, train_step: Callable[..., tuple[fsdp.State, torch.Tensor]], setting: Setting) -> Step:
    """tokens -> loss, the state kept in between; as a graph if the setting says so."""
    kept = [state]
    run: Any = T.cuda_graph(train_step, warmup=WARMUP) if setting.graph else train_step

    def step(tokens: torch.Tensor) -> torch.Tensor:
        kept[0], loss = run(kept[0], tokens)
        return loss

    step.graphs = run.graphs if setting.graph else {}  # type: ignore[attr-defined]
    step.shared = state.shared_bytes  # type: ignore[attr-defined]
    return step


def whole_tree(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    loss_fn = setting.config.loss

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda w: loss_fn(fsdp.bind(skeleton, w), tokens))(weights)
        state = fsdp.reduce(state, grads)
        return fsdp.step(state), loss

    return keeping(state, train_step, setting)


def whole_vjp(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    loss_fn = setting.config.loss

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, weights = fsdp.unshard(state)
        loss, pullback = T.vjp(lambda w: loss_fn(fsdp.bind(skeleton, w), tokens), weights)
        (grads,) = pullback(weights, torch.ones_like(loss))
        state = fsdp.reduce(state, grads)
        return fsdp.step(state), loss

    return keeping(state, train_step, setting)


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
    return keeping(state, loop_by_hand(skeleton, tuple(state.units)), setting)


def traced(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    return keeping(state, T.compile(loop_by_hand(skeleton, tuple(state.units))), setting)


def driven_step(skeleton: Any, setting: Setting) -> Callable[..., tuple[fsdp.State, torch.Tensor]]:
    forward_backward = T.forward_backward(skeleton, setting.config.loss)

    def train_step(state: fsdp.State, tokens: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    return train_step


def driven(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    return keeping(state, driven_step(skeleton, setting), setting)


def driven_traced(model: nn.Module, setting: Setting) -> Step:
    state, skeleton = setting.shard(model)
    return keeping(state, T.compile(driven_step(skeleton, setting)), setting)


def either(model: nn.Module, setting: Setting) -> Step:
    """By hand where the model is a chain of stages, else driven."""
    return (unit_by_unit if setting.config.stages else driven)(model, setting)


def float8(model: nn.Module, setting: Setting) -> Step:
    """Layers whose linears multiply in float8; weights are gathered in the compute dtype."""
    return either(setting.in_float8(model), setting)


def float8_gathered(model: nn.Module, setting: Setting) -> Step:
    """The same, and the weights of these linears are gathered in float8."""
    converted = setting.in_float8(model)
    return either(converted, setting.gathering(converted))


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
    optimizer = torch.optim.AdamW(main, lr=LR, fused=True, capturable=setting.graph)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss, pullback = T.vjp(lambda w: setting.config.loss(fsdp.bind(skeleton, w), tokens), weights)
        (grads,) = pullback(weights, torch.ones_like(loss))
        for p, grad in zip(main, grads.values(), strict=True):
            p.grad = grad.flatten()[: p.numel()].float()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Replayed(step) if setting.graph else step


class Replayed:
    """A step as a CUDA graph, by torch alone."""

    def __init__(self, step: Step) -> None:
        self.step, self.calls, self.graph = step, 0, torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= WARMUP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.step(tokens)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.calls == WARMUP + 1:
            self.tokens = tokens.clone()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.step(self.tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.loss.clone()


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Contestant:
    """A row: how it is built, whose it is, and with whom it shares processes."""

    build: Build
    whose: str = "here"  # or "peer", "bound"
    group: str = "eager"  # rows of a group share processes where groups are kept apart
    stages: bool = False  # needs a model that is a chain of stages
    hybrid: bool = False  # runs on replicas × shards


def varied(build: Build, **changes: Any) -> Build:
    return lambda model, setting: build(model, replace(setting, **changes))


def chunked(build: Build, **changes: Any) -> Build:
    """The row with head and loss in 8 chunks of tokens."""
    return lambda model, setting: build(
        in_chunks(model, 8), replace(setting, config=replace(setting.config, chunks=8), **changes)
    )


def hybrid(build: Build, placement: str, **changes: Any) -> Build:
    """The row on the mesh replica × shard."""
    return lambda model, setting: build(
        model, replace(setting, mesh=setting.hybrid or setting.mesh, placement=placement, **changes)
    )


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
    "traced graph": Contestant(varied(traced, graph=True), group="traced", stages=True),
    "driven traced": Contestant(driven_traced, group="traced"),
    "driven traced graph": Contestant(varied(driven_traced, graph=True), group="traced"),
    "graph": Contestant(varied(either, graph=True), group="graphs"),
    "graph compiled": Contestant(varied(either, graph=True, compiled=True), group="graphs"),
    "graph compiled cast once": Contestant(varied(either, graph=True, compiled=True, once=True), group="graphs"),
    "driven chunked loss": Contestant(chunked(driven)),
    "driven traced chunked loss": Contestant(chunked(driven_traced), group="traced"),
    "graph compiled chunked loss": Contestant(chunked(either, graph=True, compiled=True), group="graphs"),
    "copy engine graph compiled chunked loss": Contestant(
        chunked(either, transport="copy_engine", graph=True, compiled=True), group="copies"
    ),
    "copy engine": Contestant(varied(either, transport="copy_engine"), group="copies"),
    "copy engine compiled": Contestant(varied(either, transport="copy_engine", compiled=True), group="copies"),
    "copy engine graph": Contestant(varied(either, transport="copy_engine", graph=True), group="copies"),
    "copy engine graph compiled": Contestant(
        varied(either, transport="copy_engine", graph=True, compiled=True), group="copies"
    ),
    "copy engine graph compiled kept": Contestant(
        varied(either, transport="copy_engine", graph=True, compiled=True, keep="all"), group="copies"
    ),
    "copy engine graph compiled cast once": Contestant(
        varied(either, transport="copy_engine", graph=True, compiled=True, once=True), group="copies"
    ),
    "copy engine graph compiled offloaded": Contestant(
        varied(driven, transport="copy_engine", graph=True, compiled=True, offloaded=8), group="copies"
    ),
    "hsdp": Contestant(hybrid(either, "hsdp"), hybrid=True),
    "hfsdp": Contestant(hybrid(either, "hfsdp"), hybrid=True),
    "copy engine graph compiled hsdp": Contestant(
        hybrid(either, "hsdp", transport="copy_engine", graph=True, compiled=True), group="copies", hybrid=True
    ),
    "copy engine graph compiled hfsdp": Contestant(
        hybrid(either, "hfsdp", transport="copy_engine", graph=True, compiled=True), group="copies", hybrid=True
    ),
    "symmetric hsdp": Contestant(hybrid(either, "hsdp", transport="symmetric"), group="symmetric", hybrid=True),
    "symmetric graph compiled hsdp": Contestant(
        hybrid(either, "hsdp", transport="symmetric", graph=True, compiled=True), group="symmetric", hybrid=True
    ),
    "symmetric graph compiled hfsdp": Contestant(
        hybrid(either, "hfsdp", transport="symmetric", graph=True, compiled=True), group="symmetric", hybrid=True
    ),
    "float8": Contestant(float8, group="float8"),
    "copy engine graph compiled float8": Contestant(
        varied(float8, transport="copy_engine", graph=True, compiled=True), group="float8"
    ),
    "float8 gathered": Contestant(float8_gathered, group="float8"),
    "copy engine graph compiled float8 gathered": Contestant(
        varied(float8_gathered, transport="copy_engine", graph=True, compiled=True), group="float8"
    ),
    "symmetric": Contestant(varied(either, transport="symmetric"), group="symmetric"),
    "symmetric graph compiled": Contestant(
        varied(either, transport="symmetric", graph=True, compiled=True), group="symmetric"
    ),
    "zero-CTA": Contestant(varied(either, transport=fsdp.symmetric(zero_cta=True)), group="symmetric"),
    "zero-CTA graph compiled": Contestant(
        varied(either, transport=fsdp.symmetric(zero_cta=True), graph=True, compiled=True), group="symmetric"
    ),
    "FSDP2": Contestant(fsdp2, "peer", "peers"),
    "FSDP2 tuned": Contestant(fsdp2_tuned, "peer", "peers"),
    "FSDP2 kept": Contestant(varied(fsdp2, keep="all"), "peer", "peers"),
    "FSDP2 float32": Contestant(varied(fsdp2, wire=torch.float32), "peer", "peers"),
    "FSDP2 hsdp": Contestant(hybrid(fsdp2, "hsdp"), "peer", "peers", hybrid=True),
    "FSDP2 compiled hsdp": Contestant(hybrid(fsdp2, "hsdp", compiled=True), "peer", "peers compiled", hybrid=True),
    "FSDP2 compiled": Contestant(varied(fsdp2, compiled=True), "peer", "peers compiled"),
    "FSDP2 chunked loss": Contestant(chunked(fsdp2), "peer", "peers"),
    "FSDP2 compiled chunked loss": Contestant(chunked(fsdp2, compiled=True), "peer", "peers compiled"),
    "FSDP2 compiled selective": Contestant(varied(fsdp2, compiled=True, selective=True), "peer", "peers compiled"),
    "FSDP2 tuned compiled": Contestant(varied(fsdp2_tuned, compiled=True), "peer", "peers compiled"),
    "FSDP2 float8 compiled": Contestant(varied(fsdp2_float8, compiled=True), "peer", "peers compiled"),
    "SimpleFSDP": Contestant(simple_fsdp, "peer", "SimpleFSDP"),
    "DDP": Contestant(ddp, "peer", "peers"),
    "DDP compiled": Contestant(varied(ddp, compiled=True), "peer", "peers compiled"),
    "Megatron-FSDP": Contestant(megatron, "peer", "Megatron-FSDP"),
    "Megatron-FSDP compiled": Contestant(varied(megatron, compiled=True), "peer", "Megatron-FSDP"),
    "resident": Contestant(resident, "bound", "bound"),
    "resident compiled": Contestant(varied(resident, compiled=True), "bound", "bound"),
    "resident graph compiled": Contestant(varied(resident, compiled=True, graph=True), "bound", "bound"),
}
PEER, BY_HAND, BOUNDS = "FSDP2", "unit by unit", ("resident graph compiled", "resident compiled", "resident")

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


def missing(name: str, model: str, config: Config, cuda: bool, placement: str, ranks: int, replicas: int) -> str | None:
    """Why this row cannot run, or None."""
    if CONTESTANTS[name].hybrid and ranks % replicas:
        return f"{ranks} ranks are no multiple of {replicas} replicas (--replicas)"
    if "chunked" in name and config.kind == "mixed":
        return "has no chunked loss of the mixed stack"
    if CONTESTANTS[name].stages and not config.stages:
        return f"{model} is no chain of stages; driven takes any module"
    if ("graph" in name or "symmetric" in name or "zero-CTA" in name) and not cuda:
        return "needs GPUs"
    if "float8" in name and find_spec("torchao") is None:
        return "needs torchao (pip install torchao)"
    if name in ("SimpleFSDP", "FSDP2 float8 compiled") and placement != "zero3":
        return f"has no row for {placement} here"
    if name.startswith("DDP") and model == "6.7b":
        return "6.7 B parameters with their AdamW state take 100 GiB and more on every rank"
    if name.startswith("Megatron-FSDP"):
        if find_spec("megatron_fsdp") is None:
            return "not installed (pip install megatron-fsdp)"
        if not cuda or placement in ("hsdp", "hfsdp"):
            return "needs GPUs" if not cuda else f"has no row for {placement} here"
    return None
