# ruff: noqa: C408, E731
"""Each parameter of each public function is given what it does not mean, and what comes of it is counted.

    python tools/wrong_arguments.py [NAME...] [--show=raw,vague,odd]

    well     refused by an error of the package, or a TypeError or ValueError that it raises, which names the function
             or the parameter, and what was given
    vague    refused by such an error that does not name them
    raw      an error of torch's or Python's came through
    lost     refused, but the state that was given cannot be used any more, or a folder has remains
    odd      taken, though the annotation has no such values
    flag     taken for true or false, though it is no bool
    taken    taken, as the annotation says

One rank, in this process. What is slow (SLOW) is done by name only.
"""

from __future__ import annotations

import collections.abc
import inspect
import linecache
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T

ROOT = Path(fsdp.__file__).resolve().parents[1]
X = torch.randn(3, 4)


def model_of() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loss_fn(model: Any, x: torch.Tensor) -> Any:
    return model(x).square().mean()


def spec_of() -> Any:
    return fsdp.Spec(fsdp.local_mesh("cpu"), units=["0", "1"])


params, model = fsdp.functionalize(model_of())
made: list[Any] = []


def state_of(optimizer: Any = None) -> Any:
    made.append(fsdp.shard(params, spec_of(), optimizer or fsdp.adamw(lr=0.1)))
    return made[-1]


def graded() -> Any:
    made.append(T.forward_backward(model, loss_fn)(state_of(), X)[0])
    return made[-1]


def a_file() -> Path:
    Path("some_file").write_text("text")
    return Path("some_file").resolve()


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "3": lambda: 3,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "1j": lambda: 1j,
    "True": lambda: True,
    "'x'": lambda: "x",
    "b'x'": lambda: b"x",
    "[]": lambda: [],
    "{}": lambda: {},
    "()": lambda: (),
    "[1, 2, 3]": lambda: [1, 2, 3],
    "['x']": lambda: ["x"],
    "{1: 2}": lambda: {1: 2},
    "{'x': 1}": lambda: {"x": 1},
    "object": object,
    "tensor": lambda: torch.ones(3),
    "lambda": lambda: lambda *args, **kwargs: None,
    "class": lambda: int,
    "module": model_of,
    "state": lambda: fsdp.shard(params, spec_of(), fsdp.sgd(lr=0.1)),
    "spec": spec_of,
    "dtype": lambda: torch.int32,
    "file": a_file,
}
SLOW = ("predict", "tune", "measure_compute", "measure_links", "T.budget", "T.step_memory", "T.compile_report")


def lr_step(lr: Any) -> Any:
    """A step whose learning rate is made by a function that gives this."""
    state = T.forward_backward(model, loss_fn)(state_of(fsdp.adamw(lr=lambda count: lr)), X)[0]
    made.append(state)
    return fsdp.step(state)


def sgd_step(lr: Any) -> Any:
    state = T.forward_backward(model, loss_fn)(state_of(fsdp.sgd(lr=lambda count: lr)), X)[0]
    made.append(state)
    return fsdp.step(state)


def drive(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **given: make(**given)(state_of(), X)


def plan_of() -> Any:
    return fsdp.make_plan(state_of().layout)


def grads_of() -> Any:
    return {path: torch.ones_like(p) for path, p in params.items()}


def saved(folder: Path) -> Path:
    return fsdp.save(state_of(), folder / "saved")


def exported(folder: Path) -> Path:
    return fsdp.save_safetensors(state_of(), folder / "exported")


def mesh_of() -> Any:
    return fsdp.local_mesh("cpu")


def weights() -> Any:
    return fsdp.unshard(state_of())[1]


def simulated(fn: Any, args: Any) -> Any:
    with fsdp.simulate(data=2) as ranks:
        return ranks(fn, *args).get()


def pairs_of(state: Any) -> Any:
    return {axes: torch.zeros(()) for axes in extend.shards(state)}


H = dict(hidden=torch.randn(3, 4), weight=torch.randn(5, 4), labels=torch.tensor([0, 1, 2]))
Entry = Callable[[Path], tuple[Callable[..., Any], dict[str, Any]]]


def entries() -> dict[str, Entry]:
    found: dict[str, Entry] = {}

    def of(name: str, fn: Callable[..., Any], make: Callable[[Path], dict[str, Any]] = lambda folder: {}) -> None:
        found[name] = lambda folder: (fn, make(folder))

    S = lambda folder: {"state": state_of()}
    G = lambda folder: {"state": graded()}
    M = lambda folder: {"model": model, "loss_fn": loss_fn}
    # values
    of("Along", fsdp.Along, lambda f: dict(axis="model"))
    for name in ("ddp", "zero1", "zero2", "zero3"):
        of(name, getattr(fsdp, name), lambda f: {"*axes": "data"})
    for name in ("hsdp", "hfsdp"):
        of(name, getattr(fsdp, name), lambda f: dict(replica="a", shard="b"))
    of("Placement", fsdp.Placement, lambda f: dict(data=("data",)))
    of("Precision", fsdp.Precision)
    of("Schedule", fsdp.Schedule)
    of("Spec", fsdp.Spec, lambda f: dict(mesh={"data": 2}))
    of(
        "Spec+shard",
        lambda **kw: fsdp.shard(params, fsdp.Spec(**kw)),
        lambda f: dict(
            mesh=mesh_of(),
            placement=None,
            precision=None,
            units=None,
            labels=None,
            trainable=None,
            average="mean",
            schedule=None,
            transport="collective",
            own=None,
        ),
    )
    of(
        "Schedule+shard",
        lambda **kw: fsdp.unshard(fsdp.shard(params, fsdp.Spec(mesh_of(), schedule=fsdp.Schedule(**kw))), "0"),
        lambda f: dict(order=None, prefetch=1, keep=None, debug=False, overlap_update=False),
    )
    for name in ("with_schedule", "with_trainable", "with_placement", "with_transport"):
        of(
            f"Spec.{name}",
            getattr(spec_of(), name),
            lambda f, n=name: {
                "with_schedule": dict(schedule=fsdp.Schedule()),
                "with_trainable": dict(trainable={"*": True}),
                "with_placement": dict(placement=fsdp.ddp("data")),
                "with_transport": dict(transport="collective"),
            }[n],
        )
    for name in ("Stacked", "Concatenated"):
        of(name, getattr(fsdp, name), lambda f: dict(parts=["a", "b"]))
    of("Transposed", fsdp.Transposed, lambda f: dict(part="a"))
    of("Sliced", fsdp.Sliced, lambda f: dict(part="a", start=0, of=2))
    for name in ("int8", "int4", "nf4", "mxfp8", "fp8_block", "dynamic8", "symmetric"):
        of(name, getattr(fsdp, name))
    for name in ("adamw", "sgd", "muon"):
        of(name, getattr(fsdp, name))
    of("lr of adamw", lr_step, lambda f: dict(lr=0.1))
    of("lr of sgd", sgd_step, lambda f: dict(lr=0.1))
    of("from_torch", fsdp.from_torch, lambda f: dict(cls=torch.optim.SGD, **{"**options": {"lr": 0.1}}))
    of("from_updates", fsdp.from_updates, lambda f: dict(pair=(lambda p: (), lambda u, s, params=None: (u, s))))
    of("partition", fsdp.partition, lambda f: dict(members={"default": fsdp.sgd(lr=0.1)}))
    of("Hardware.named", fsdp.Hardware.named, lambda f: dict(said="H100"))
    of("Link", fsdp.Link, lambda f: dict(latency=1e-6, bandwidth=1e9))
    # modules
    of("functionalize", fsdp.functionalize, lambda f: dict(module=model_of()))
    of("bind", fsdp.bind, lambda f: dict(model=model, weights=params))
    of("as_module", fsdp.as_module, lambda f: dict(model=model, weights=state_of()))
    of("buffers", fsdp.buffers, lambda f: dict(module=model))
    of("units", fsdp.units, lambda f: {"model": model, "*types": nn.Linear})
    of("tie", fsdp.tie, lambda f: dict(state=state_of(), grads=grads_of()))
    of("from_quantized", fsdp.from_quantized, lambda f: dict(model=model_of()))
    # making
    of("shard", fsdp.shard, lambda f: dict(params=params, spec=spec_of(), optimizer=fsdp.sgd(lr=0.1)))
    of("init", fsdp.init, lambda f: dict(make=model_of, spec=spec_of(), optimizer=fsdp.sgd(lr=0.1)))
    of(
        "abstract_state",
        fsdp.abstract_state,
        lambda f: dict(params=params, spec=fsdp.Spec({"data": 2}), optimizer=fsdp.sgd(lr=0.1)),
    )
    of("make_layout", fsdp.make_layout, lambda f: dict(params=params, spec=fsdp.Spec({"data": 2})))
    of("make_plan", fsdp.make_plan, lambda f: dict(layout=state_of().layout))
    of(
        "local_mesh",
        lambda device, axes: fsdp.local_mesh(device, **axes),
        lambda f: dict(device="cpu", axes={"data": 1}),
    )
    of("local_mesh axis", lambda n: fsdp.local_mesh("cpu", data=n), lambda f: dict(n=1))
    # verbs
    of("unshard", fsdp.unshard, lambda f: dict(state=state_of(), unit="0"))
    of(
        "release",
        lambda state, unit: fsdp.release(fsdp.unshard(state, "0")[0] if isinstance(state, fsdp.State) else state, unit),
        lambda f: dict(state=state_of(), unit="0"),
    )
    of("reduce", fsdp.reduce, lambda f: dict(state=state_of(), grads=grads_of()))
    of(
        "reduce unit",
        lambda state, grads, unit: fsdp.reduce(fsdp.unshard(state, "0")[0], grads, unit),
        lambda f: dict(
            state=state_of(), grads={k[2:]: v for k, v in grads_of().items() if k.startswith("0.")}, unit="0"
        ),
    )
    of("step", fsdp.step, G)
    for name in ("drop_gradients", "finish_reductions"):
        of(name, getattr(fsdp, name), G)
    for name in ("newest", "full_params", "local_shards", "state_dict", "optimizer_state", "snapshot", "free_arena"):
        of(name, getattr(fsdp, name), S)
    of("freeze", fsdp.freeze, lambda f: {"state": state_of(), "*patterns": "0.*"})
    of(
        "unfreeze",
        fsdp.unfreeze,
        lambda f: {"state": made.append(fsdp.freeze(state_of(), "0.*")) or made[-1], "*patterns": "0.*"},
    )
    for name in ("pmean", "psum", "pmax"):
        of(name, getattr(fsdp, name), lambda f: dict(state=state_of(), tree={"a": torch.ones(())}))
    of("redistribute", fsdp.redistribute, lambda f: dict(state=state_of(), spec=spec_of()))
    of(
        "replace_extras",
        lambda state, extra: fsdp.replace_extras(state, ema=extra),
        lambda f: dict(state=state_of(), extra=torch.ones(())),
    )
    of("replace_grads", fsdp.replace_grads, lambda f: (lambda s: dict(state=s, grads=s.grads))(graded()))
    of("replace_params", fsdp.replace_params, lambda f: dict(state=state_of(), params=params))
    of("host_transfer", fsdp.host_transfer, S)
    # files
    of("save", fsdp.save, lambda f: dict(state=state_of(), folder=f / "a"))
    of("save_dcp", fsdp.save_dcp, lambda f: dict(state=state_of(), folder=f / "a"))
    of("save_safetensors", fsdp.save_safetensors, lambda f: dict(state=state_of(), folder=f / "a"))
    of(
        "async_save",
        lambda **kw: fsdp.async_save(**kw).result(),
        lambda f: dict(state=state_of(), folder=f / "a", max_to_keep=None),
    )
    of("load", fsdp.load, lambda f: dict(folder=saved(f), spec=spec_of(), optimizer=fsdp.adamw(lr=0.1)))
    of("load like", fsdp.load, lambda f: dict(folder=saved(f), like=state_of()))
    of("latest_checkpoint", fsdp.latest_checkpoint, lambda f: dict(folder=f))
    of("load_weights", fsdp.load_weights, lambda f: dict(state=state_of(), source=exported(f)))
    of("load_weights dict", fsdp.load_weights, lambda f: dict(state=state_of(), source=params))
    of(
        "load_optimizer_state",
        fsdp.load_optimizer_state,
        lambda f: dict(state=state_of(), source=fsdp.optimizer_state(state_of())),
    )
    of("open_checkpoint", fsdp.open_checkpoint, lambda f: dict(path=exported(f)))
    of(
        "save_adapter",
        fsdp.save_adapter,
        lambda f: dict(state=state_of(), folder=f / "a", config={"peft_type": "LORA"}),
    )
    of("save_merged", fsdp.save_merged, lambda f: dict(state=state_of(), folder=f / "a", config={"peft_type": "LORA"}))
    of(
        "merged",
        lambda **kw: list(fsdp.merged(**kw)),
        lambda f: dict(state=state_of(), config={"peft_type": "LORA"}, adapter="default", dtype=None, rank=None),
    )
    of(
        "stream",
        lambda **kw: list(fsdp.stream(**kw)),
        lambda f: dict(state=state_of(), dtype=None, convert=None, rank=None),
    )
    of(
        "stream_to",
        lambda **kw: fsdp.stream_to(**kw)(),
        lambda f: dict(put=lambda n, t: None, state=state_of(), gather=True, dtype=None, convert=None, rank=None),
    )
    of("delta", fsdp.delta, lambda f: (lambda s: dict(since=fsdp.snapshot(s), state=s))(state_of()))
    of(
        "apply_delta",
        fsdp.apply_delta,
        lambda f: (lambda s: dict(weights=dict(params), changed=fsdp.delta(fsdp.snapshot(s), s)))(state_of()),
    )
    of("conversions_of", fsdp.conversions_of, lambda f: dict(model=model))
    of("flight_record", fsdp.flight_record, lambda f: dict(folder=f))
    # planning
    of("predict", fsdp.predict, lambda f: dict(model=model, loss_fn=loss_fn, batch=X, spec=fsdp.Spec({"data": 2})))
    of("tune", fsdp.tune, lambda f: dict(model=model, loss_fn=loss_fn, batch=X, mesh={"data": 2}))
    of(
        "measure_compute",
        fsdp.measure_compute,
        lambda f: dict(model=model, loss_fn=loss_fn, batch=X, spec=spec_of(), rounds=1),
    )
    of("measure_links", fsdp.measure_links, lambda f: dict(mesh=mesh_of()))
    of("timeline", fsdp.timeline, lambda f: dict(plan=plan_of(), path=f / "a.svg", gather=1.0, reduce=1.0, compute=1.0))
    of("draw", fsdp.draw, lambda f: dict(what=state_of().layout, path=f / "a.svg"))
    of("compare", fsdp.compare, lambda f: dict(a=fsdp.Prints(), b=fsdp.Prints()))
    of("fingerprint", fsdp.fingerprint, lambda f: dict(train_step=lambda s, x: (s, x)))
    of("observe", fsdp.observe, lambda f: dict(train_step=lambda s, x: (s, x)))
    of("lower", fsdp.lower, lambda f: {"fn": lambda s: fsdp.unshard(s), "state": state_of()})
    # ranks
    of(
        "simulate",
        lambda order, seed, kill, slow, only, data: fsdp.simulate(
            order=order, seed=seed, kill=kill, slow=slow, only=only, data=data
        ),
        lambda f: dict(order="ranks", seed=0, kill={}, slow={}, only=None, data=2),
    )
    of("Simulation", simulated, lambda f: dict(fn=lambda: None, args=()))
    of(
        "launch",
        lambda fn, args, kwargs, nprocs, timeout: fsdp.launch(
            fn, args, kwargs, nprocs=nprocs, timeout=timeout, simulate=True
        ),
        lambda f: dict(fn=lambda: None, args=(), kwargs=None, nprocs=2, timeout=None),
    )
    of(
        "workers",
        lambda nprocs, timeout: fsdp.workers(nprocs, timeout=timeout, simulate=True).close(),
        lambda f: dict(nprocs=2, timeout=None),
    )
    # transforms
    of("T.forward_backward", T.forward_backward, M)
    of(
        "T.forward_backward run",
        drive(T.forward_backward),
        lambda f: dict(
            model=model,
            loss_fn=loss_fn,
            has_aux=False,
            buffers="mean",
            second_order=False,
            find_nonfinite=False,
            input_grads=False,
        ),
    )
    of(
        "T.forward_backward call",
        lambda state, x: T.forward_backward(model, loss_fn)(state, x),
        lambda f: dict(state=state_of(), x=X),
    )
    of("T.accumulate", T.accumulate, lambda f: dict(forward_backward=T.forward_backward(model, loss_fn), n=1))
    of(
        "T.accumulate run",
        lambda forward_backward, n, split: T.accumulate(forward_backward, n, split=split)(state_of(), X),
        lambda f: dict(forward_backward=T.forward_backward(model, loss_fn), n=1, split=None),
    )
    of("T.apply", T.apply, lambda f: dict(model=model, fn=lambda m, x: m(x)))
    of("T.apply run", drive(T.apply), lambda f: dict(model=model, fn=lambda m, x: m(x), training=False))
    of("T.budget", T.budget, lambda f: {"model": model, "nbytes": 10**9, "*patterns": "0"})
    of("T.chunked_loss", T.chunked_loss, lambda f: dict(model=model, head="1", hidden=lambda m, x: m(x)))
    of("T.clip_by_global_norm", T.clip_by_global_norm, lambda f: dict(state=graded(), max_norm=1.0))
    of("T.clip_by_value", T.clip_by_value, lambda f: dict(state=graded(), max_value=1.0))
    of("T.clipped_gradients", T.clipped_gradients, lambda f: dict(**M(f), max_norm=1.0))
    of(
        "T.clipped_gradients run",
        drive(T.clipped_gradients),
        lambda f: dict(**M(f), max_norm=1.0, noise=0.0, chunk=None),
    )
    of("T.compile", T.compile, lambda f: dict(train_step=lambda s: s))
    of("T.compile_units", T.compile_units, lambda f: {"what": model, "*patterns": "0"})
    of("T.cuda_graph", T.cuda_graph, lambda f: dict(train_step=lambda s: s))
    of("T.divide", T.divide, lambda f: dict(state=graded(), divisor=2.0))
    of("T.dot", T.dot, lambda f: (lambda s: dict(state=s, a=s.main, b=s.main))(state_of()))
    of("T.find_nonfinite", T.find_nonfinite, G)
    of("T.any_nonfinite", T.any_nonfinite, G)
    of("T.global_norm", T.global_norm, G)
    of("T.norms", T.norms, G)
    of("T.wire_error", T.wire_error, G)
    of("T.hvp", T.hvp, M)
    for name in ("jvp", "linearize", "pullback"):
        of(f"T.{name}", getattr(T, name), lambda f: dict(model=model, fn=loss_fn))
    of("T.linear_cross_entropy", T.linear_cross_entropy, lambda f: dict(H))
    of("T.offload", T.offload, lambda f: {"what": model, "*patterns": "0"})
    of("T.remat", T.remat, lambda f: {"what": model, "*patterns": "0"})
    of(
        "T.remat run",
        lambda pattern: T.forward_backward(T.remat(model, pattern), loss_fn)(state_of(), X),
        lambda f: dict(pattern="0"),
    )
    of("T.per_sample_norms", T.per_sample_norms, M)
    of("T.per_sample_norms run", drive(T.per_sample_norms), lambda f: dict(**M(f), chunk=None))
    of("T.per_sample_vjp", T.per_sample_vjp, lambda f: {"fn": lambda w, x: x, "weights": params, "*primals": X})
    of("T.vjp", T.vjp, lambda f: {"fn": lambda w, x: x @ w["0.weight"], "weights": params, "*primals": X})
    of("T.vmap", T.vmap, lambda f: dict(fn=T.apply(model)))
    of(
        "T.vmap run",
        lambda **kw: T.vmap(**kw)(X),
        lambda f: dict(fn=lambda x: x.sum(), in_dims=0, out_dims=0, randomness="different"),
    )
    of("T.saved", T.saved, lambda f: dict(fn=loss_fn))
    of("T.skip_nonfinite", T.skip_nonfinite, lambda f: dict(step=fsdp.step))
    of("T.startup", T.startup)
    of(
        "T.step_memory",
        T.step_memory,
        lambda f: {"forward_backward": T.forward_backward(model, loss_fn), "state": state_of(), "*args": X},
    )
    of(
        "T.compile_report",
        T.compile_report,
        lambda f: {
            "forward_backward": T.forward_backward(model, loss_fn),
            "state": state_of(),
            "rounds": 1,
            "*args": X,
        },
    )
    C = T.collectives
    for name in ("pmax", "pmean", "psum", "pvary", "all_gather", "all_to_all", "reduce_scatter", "split"):
        of(f"T.collectives.{name}", getattr(C, name), lambda f: dict(x=torch.randn(2, 2), axis=mesh_of()))
    of("T.collectives.ppermute", C.ppermute, lambda f: dict(x=torch.randn(2, 2), axis=mesh_of(), pairs=[(0, 0)]))
    of("T.collectives.dropout", C.dropout, lambda f: dict(x=torch.randn(2, 2), p=0.5, axis=mesh_of(), dim=0))
    # extend
    E = extend
    of("extend.all_reduce", E.all_reduce, lambda f: dict(state=state_of(), tensors=[torch.ones(2)]))
    of("extend.alone", E.alone, lambda f: dict(fn=lambda s: s))
    of("extend.begin_round", E.begin_round, lambda f: dict(state=state_of(), verb="x"))
    of("extend.by_unit", E.by_unit, lambda f: dict(state=state_of(), what="x", grads=grads_of()))
    of("extend.change", E.change, lambda f: dict(state=graded(), what="x", work=lambda: None))
    of("extend.change_weights", E.change_weights, lambda f: dict(state=state_of(), what="x", work=lambda: None))
    of("extend.check_between_steps", E.check_between_steps, lambda f: dict(state=state_of(), what="x"))
    of("extend.every_buffer", lambda **kw: list(E.every_buffer(**kw)), lambda f: dict(module=model))
    of("extend.evolve", lambda state, f: E.evolve(state, buffers=f), lambda f: dict(state=state_of(), f={}))
    of("extend.match", E.match, lambda f: dict(pattern="*", path="a"))
    of("extend.ranks_of", E.ranks_of, S)
    of("extend.lineage_of", E.lineage_of, S)
    of("extend.state_bytes", E.state_bytes, S)
    of("extend.shards", E.shards, G)
    of("extend.seeds", E.seeds, S)
    of("extend.total", E.total, lambda f: (lambda s: dict(state=s, values=pairs_of(s)))(graded()))
    of("extend.over_shards", E.over_shards, lambda f: (lambda s: dict(state=s, values=pairs_of(s)))(graded()))
    of("extend.gather_leaves", E.gather_leaves, lambda f: dict(buffer=next(iter(state_of().main.values()))))
    of("extend.leaf_shards", E.leaf_shards, lambda f: dict(buffer=next(iter(state_of().main.values()))))
    of("extend.skeleton_of", E.skeleton_of, lambda f: dict(module=model_of()))
    of(
        "extend.separate_gradients",
        E.separate_gradients,
        lambda f: dict(state=state_of(), what="x", fn=lambda s: T.forward_backward(model, loss_fn)(s, X)),
    )
    return found


# ---- what an annotation takes


def takes(hint: Any, value: Any) -> bool:
    """Whether an annotation has such values. What it does not say is taken."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar | str | typing.ForwardRef):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(takes(one, value) for one in args)
    if origin is typing.Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in args)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return value is True or value is False
    if hint is int:
        return type(value) is int
    if hint is float:
        return type(value) in (int, float)
    if origin is collections.abc.Callable or hint is Callable:
        return callable(value)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    if kind in (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection) and isinstance(
        value, str | bytes | torch.Tensor | dict
    ):
        return kind is collections.abc.Iterable and isinstance(value, dict)
    try:
        if not isinstance(value, kind):
            return False
        if isinstance(value, dict) and len(args) == 2:
            return all(takes(args[0], k) and takes(args[1], v) for k, v in value.items())
        if isinstance(value, list | tuple) and args:
            if kind is tuple and Ellipsis not in args:
                return len(args) == len(value) and all(map(takes, args, value))
            return all(takes(args[0], v) for v in value)
    except TypeError:
        pass
    return True


# ---- one call


class TooLong(BaseException):
    pass


def rings(*_: Any) -> None:
    raise TooLong


def call(fn: Callable[..., Any], given: dict[str, Any]) -> Any:
    words = {k: v for k, v in given.items() if not k.startswith("*")}
    rest: list[Any] = []
    for key, value in given.items():
        if key.startswith("**"):
            words |= value
        elif key.startswith("*"):
            rest = [value]
    if rest:
        names = list(inspect.signature(fn).parameters)
        first = [words.pop(name) for name in names[: names.index(next(k for k in given if k[0] == "*")[1:])]]
        rest = first + rest
    return fn(*rest, **words)


def named(text: str, name: str, param: str, value: Any) -> bool:
    who = {name, name.split(".")[-1].split("+")[0].split(" ")[0], param.strip("*")}
    what = {repr(value), type(value).__name__, str(value), "nothing"}
    if isinstance(value, type):
        what.add(value.__name__)
    if isinstance(value, list | tuple | dict) and value:
        what |= {repr(one) for one in value} | {type(one).__name__ for one in value} | {str(len(value))}
    if isinstance(value, torch.Tensor):
        what |= {str(tuple(value.shape)), str(value.dtype)}
    if isinstance(value, str | Path):
        what.add(str(value))
    if isinstance(value, str):
        what.add(f"{value!r}")
    if isinstance(value, list | tuple | dict | bytes | None) and not value:
        what.add("empty")
    whose = any(re.search(rf"\b{re.escape(one)}\b", text) for one in who if one)
    return whose and any(one in text for one in what)


def classify(name: str, param: str, label: str, entry: Entry, hints: dict[str, Any]) -> tuple[str, str]:
    folder = Path(tempfile.mkdtemp(prefix="wrong"))
    made.clear()
    try:
        fn, given = entry(folder)
        states = made[-1:]
        before = set(folder.rglob("*"))
        value = VALUES[label]()
        given = {**given, param: {"data": value} if param.startswith("**") else value}
        signal.alarm(20)
        try:
            call(fn, given)
        except TooLong:
            return "raw", "longer than 20 s"
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            ours = where[-1].filename.startswith(str(ROOT)) and not where[-1].filename.startswith(__file__)
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:260]}"
            place = f"  @{Path(where[-1].filename).name}:{where[-1].lineno}"
            signal.alarm(0)
            raised = linecache.getline(where[-1].filename, where[-1].lineno or 0)
            # a raise may begin some lines above
            deliberate = isinstance(error, fsdp.FsdpError | fsdp.LaunchError) or (
                ours and isinstance(error, TypeError | ValueError | OSError) and re.search(r"\braise\b", raised)
            )
            binding = (
                isinstance(error, TypeError) and "argument" in str(error) and len(where) == 3 and "()" in str(error)
            )
            if not (deliberate or binding):
                return "raw", text + place
            for state in states:
                try:
                    now = fsdp.full_params(state)
                except Exception as after:
                    return "lost", f"{text}; then {type(after).__name__}: {after}"
                if any(not torch.equal(now[k], params[k]) for k in params):
                    return "lost", text + "; weights have changed"
            left = {one for one in folder.rglob("*") if one not in before}
            if left:
                return "lost", f"{text}; left {sorted(map(str, left))[:2]}"
            return ("well" if named(str(error), name, param, value) else "vague"), text + place
        finally:
            signal.alarm(0)
        hint = hints.get(param.strip("*"), Any)
        return ("taken" if takes(hint, value) else "flag" if hint is bool else "odd"), ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, rings)
    os.chdir(tempfile.mkdtemp(prefix="wrong"))  # for what is written beside the names that are given
    show = next(
        (a.split("=")[1].split(",") for a in sys.argv if a.startswith("--show=")), ["raw", "lost", "vague", "odd"]
    )
    only = [a for a in sys.argv[1:] if not a.startswith("--")]
    counts: Counter[str] = Counter()
    for name, entry in entries().items():
        if not any(re.fullmatch(one, name) for one in only) if only else name in SLOW:
            continue
        folder = Path(tempfile.mkdtemp(prefix="wrong"))
        fn, valid = entry(folder)
        try:
            call(fn, valid)
        except Exception as error:
            if name not in (
                "save_adapter",
                "save_merged",
                "merged",
                "conversions_of",
                "T.cuda_graph",
                "from_quantized",
                "newest",
            ):
                print(f"!! {name}: the valid call fails: {type(error).__name__}: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        target = fn.__init__ if inspect.isclass(fn) and "__init__" in vars(fn) else fn
        try:
            hints = typing.get_type_hints(target)
        except Exception:
            hints = {}
        kinds = inspect.signature(fn).parameters
        names = [
            *dict.fromkeys(
                [*valid, *(n for n, p in kinds.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))]
            )
        ]
        for param in names:
            same: dict[tuple[str, str], list[tuple[str, str]]] = {}
            for label in VALUES:
                kind, text = classify(name, param, label, entry, hints)
                counts[kind] += 1
                same.setdefault((kind, text.partition("  @")[2]), []).append((label, text))
            for (kind, _), some in same.items():
                if kind in show:
                    print(
                        f"{kind:5} {name}({param}=) {'; '.join(label for label, _ in some)}: {some[0][1]}", flush=True
                    )
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
