"""buffers: a random model with buffers of many kinds, which its forward writes in many ways, in driven steps on ranks
that see other data; saved and loaded in the middle, or changed into another state; against a plain module a rank.

    {"dtype": "int64", "write": "data", "when": "always", "part": 1, "persistent": True, "own": False}

What ranks agree on is plain arithmetic: the mean of floats (by "first" the first rank's), the first rank's integers
and flags; nothing of a rule "local", of `local_buffers`, and of buffers that are not persistent. A checkpoint goes
on as if it had not been interrupted; of what is the ranks' own it has the first one's. "some": only ranks that see
certain data write.
"""

from __future__ import annotations

import copy
import warnings
from random import Random
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .verdict import Verdict, Wrong

Case = dict[str, Any]
D = 3
STRANGE = 5  # what lies in modules that are not read
DTYPES = ("float64", "float64", "float32", "complex128", "int64", "int64", "int32", "int16", "uint8", "bool", "bool")
WRITES = ("in place", "in place", "replace", "data", "data", "data =", "never")
PARTS = ("linear", "linear", "norm", "bare", "frozen")  # bare: without parameters
BETWEEN = (None, None, None, "save spec", "save spec", "save like", "redistribute", "replace")
PRESETS = ("zero3", "zero3", "zero2", "zero1", "ddp")


class Part(nn.Module):
    """A layer, and buffers which its forward reads and writes."""

    def __init__(self, kind: str, said: list[Any]) -> None:
        super().__init__()
        self.said = said
        if kind != "bare":
            self.linear = nn.Linear(D, D).requires_grad_(kind != "frozen")
        if kind == "norm":
            self.norm = nn.BatchNorm1d(D, momentum=None if said else 0.1)
        for name, one in said:
            made = torch.arange(D).to(getattr(torch, one["dtype"]))
            self.register_buffer(name, made if one["long"] else made[1], persistent=one["persistent"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, one in self.said:
            held = getattr(self, name)
            x = x + 0.1 * torch.tanh(_number(held).mean())
            if self.training and one["write"] != "never" and (one["when"] != "some" or bool(x.detach().sum() > 0)):
                self.write(name, one["write"], _next(held, x.detach()))
        if hasattr(self, "norm"):
            x = self.norm(x)
        return x + torch.tanh(self.linear(x)) if hasattr(self, "linear") else x

    def write(self, name: str, how: str, new: torch.Tensor) -> None:
        held = getattr(self, name)
        if how == "in place":
            held.copy_(new)
        elif how == "replace":
            setattr(self, name, new)
        elif how == "data":
            held.data.copy_(new)
        else:
            held.data = new


def _number(t: torch.Tensor) -> torch.Tensor:
    return t.real.double() + 0.5 * t.imag.double() if t.is_complex() else t.double()


def _next(held: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a forward that sees x makes of a buffer."""
    seen = x.mean(0) if held.dim() else x.mean()
    if held.dtype is torch.bool:
        return seen > 0
    if held.is_floating_point() or held.is_complex():
        return (0.5 * held + seen).to(held.dtype)
    count = (x > 0).sum(0) if held.dim() else (x > 0).sum()
    return (held + count).to(held.dtype)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.remade = case["checkpoint"]
        named = [(f"b{i}", one) for i, one in enumerate(case["buffers"])]
        self.parts = nn.ModuleList(
            Part(kind, [(name, one) for name, one in named if one["part"] == i]) for i, kind in enumerate(case["parts"])
        )

    def forward(self, x: torch.Tensor) -> Any:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.remade else part(x)
        return x.square().mean()


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"buffers:{seed}:{index}")
    parts = ["linear", *rng.choices(PARTS, k=rng.randint(0, 2))]
    rng.shuffle(parts)
    buffers = []
    for _ in range(rng.randint(1, 4)):
        persistent = rng.random() < 0.85
        buffers.append({
            "dtype": rng.choice(DTYPES), "long": rng.random() < 0.6, "part": rng.randrange(len(parts)),
            "write": rng.choice(WRITES), "when": rng.choice(("always", "always", "always", "some")),
            "persistent": persistent, "own": persistent and rng.random() < 0.2,
        })  # fmt: skip
    every = rng.random() < 0.5
    for one in buffers:
        if not one["persistent"] and not every:
            one["write"] = "never"  # it would be refused, or be a cache
    world = rng.choice((1, 2, 2, 2, 2, 4))
    return {
        "kind": "buffers", "world": world, "seed": rng.randint(0, 10**6), "parts": parts, "buffers": buffers,
        "every": every, "rule": rng.choice(("mean", "mean", "mean", "first", "local")),
        "preset": rng.choice((*PRESETS, "hsdp") if world == 4 else PRESETS), "checkpoint": rng.random() < 0.15,
        "from": rng.choice(("shard", "shard", "init", "src")) if not any(b["own"] for b in buffers) else "shard",
        "src": rng.randrange(world), "second_order": rng.random() < 0.15,
        "steps": [
            {"micros": rng.choice((1, 1, 2)), "evaluate": rng.random() < 0.3, "between": rng.choice(BETWEEN),
             "fresh": rng.random() < 0.5, "preset": rng.choice(PRESETS)}
            for _ in range(rng.randint(1, 4))
        ],
        "looks": rng.random() < 0.3, "patience": 15,
    }  # fmt: skip


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank, which keeps a plain module for each."""
    world, rule = case["world"], case["rule"]
    torch.manual_seed(case["seed"])
    plain = Model(case).double()
    plains = [copy.deepcopy(plain) for _ in range(world)]
    own = [f"parts.{b['part']}.b{i}" for i, b in enumerate(case["buffers"]) if b["own"]]
    for r, one in enumerate(plains):
        for path in own:
            t = _buffer(one, path)
            t.copy_(t ^ bool(r % 2) if t.dtype is torch.bool else t + r)
    state, model = _begun(case, plains[rank], own, case["from"] != "src" or rank == case["src"])
    paths = [*state.buffers]
    there = {path for path, _ in plain.named_buffers()}
    if not {*paths} <= there:
        raise Wrong(f"the state has the buffers {paths}, the module has {sorted(there)}")
    shared = [path for path in paths if path in plain.state_dict() and path not in own] if rule != "local" else []
    make = lambda: T.forward_backward(  # noqa: E731
        model, lambda m, x: m(x), buffers=rule, second_order=case["second_order"]
    )
    step, apply = make(), T.apply(model)
    absent = [_buffer(plain, path) for path in there - {*paths}]
    strange = (
        case["from"] == "src" and world > 1 and any(bool((t != torch.full_like(t, STRANGE)).any()) for t in absent)
    )
    if strange:  # also when it is asked a second time
        for call in (apply, step, apply, step)[1 - case["looks"] :]:
            try:
                call(state, _batch(case, 0, 0, rank))
            except fsdp.SpecError:
                continue
            return Verdict("accepted", "other tables on other ranks were taken")
        return Verdict("refused", notes={"end": "tables"})
    if case["looks"]:
        _evaluate(case, apply, state, plains[rank], _batch(case, 0, 9, rank), "before the first step")
    for number, said in enumerate(case["steps"]):
        for micro in range(said["micros"]):
            losses = []
            for r, one in enumerate(plains):
                losses.append(one(_batch(case, number, micro, r)))
                (losses[-1] / world).backward()
            _agree(plains, shared, rule)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                last = micro == said["micros"] - 1
                state, loss = step(state, _batch(case, number, micro, rank), last_microbatch=last)
            _same(case, loss, losses[rank], f"the loss of step {number}, microbatch {micro}")
        state = fsdp.step(state)
        mean = [sum(p.grad for p in some) for some in zip(*(_trains(one) for one in plains), strict=True)]
        for one in plains:
            with torch.no_grad():
                for p, grad in zip(_trains(one), mean, strict=True):
                    p.sub_(0.1 * grad)
            one.zero_grad()
        _look(case, state, plains[rank], f"after step {number}")
        state, fresh = _between(case, state, said, f"{folder}/{number}")
        if "save" in str(said["between"]):
            for one in plains:
                for path in paths:
                    _buffer(one, path).copy_(_buffer(plains[0], path))
        step = make() if fresh else step
        _look(case, state, plains[rank], f"after {said['between']!r} of step {number}")
        if sorted(state.local_buffers) != sorted(own):
            raise Wrong(f"after {said['between']!r} local_buffers are {sorted(state.local_buffers)}, expected {own}")
        if said["evaluate"]:
            _evaluate(case, apply, state, plains[rank], _batch(case, number, 9, rank), f"after step {number}")
    return Verdict("right", notes={"end": "end"})


def _evaluate(case: Case, apply: Any, state: fsdp.State, plain: Model, x: torch.Tensor, when: str) -> None:
    got, want = apply(state, x)[1], plain.eval()(x)
    plain.train()
    _same(case, got, want, f"an evaluation {when}")


def _begun(case: Case, plain: Model, own: list[str], reads: bool) -> tuple[fsdp.State, Any]:
    """The state, and a skeleton; of a rank that does not read its module, one with other values."""
    mesh = fsdp.local_mesh(replica=2, shard=2) if case["preset"] == "hsdp" else fsdp.local_mesh()
    spec, optimizer = fsdp.Spec(mesh, _placement(case["preset"], mesh)), fsdp.sgd(lr=0.1)
    if case["from"] == "init":
        weights = plain.state_dict() | (dict(plain.named_buffers()) if case["every"] else {})
        make = lambda: Model(case).double()  # noqa: E731
        return fsdp.init(make, spec, optimizer, every_buffer=case["every"], weights=weights)
    module = copy.deepcopy(plain)
    if not reads:
        with torch.no_grad():
            for t in (*module.parameters(), *module.buffers()):
                t.fill_(STRANGE)
    params, model = fsdp.functionalize(module)
    buffers = fsdp.buffers(module, every=case["every"])
    src = case["src"] if case["from"] == "src" else None
    return fsdp.shard(params, spec, optimizer, buffers=buffers, local_buffers=own, src=src), model


def _placement(preset: str, mesh: Any) -> Any:
    if mesh.ndim == 2:
        return fsdp.hsdp("replica", "shard") if preset in ("hsdp", "ddp", "zero1") else fsdp.hfsdp("replica", "shard")
    return getattr(fsdp, preset)("data")


def _between(case: Case, state: fsdp.State, said: dict[str, Any], folder: str) -> tuple[fsdp.State, bool]:
    """Another state with the same values, and whether the next step is of a new transform."""
    spec, how = state.spec, said["between"]
    mesh: Any = spec.mesh
    other = fsdp.Spec(mesh, _placement(said["preset"], mesh)) if said["preset"] else spec
    if how in ("save spec", "save like"):
        fsdp.save(state, folder)
        like = state if how == "save like" else None
        return (fsdp.load(folder, like=like) if like else fsdp.load(folder, other, fsdp.sgd(lr=0.1))), said["fresh"]
    if how == "redistribute":
        state = fsdp.redistribute(state, other)
    elif how == "replace":
        state = fsdp.replace_params(state, fsdp.full_params(state))
    return state, said["fresh"] and how is not None


def _agree(plains: list[Model], shared: list[str], rule: str) -> None:
    """What the ranks have in common, after each of them has gone forward."""
    for path in shared:
        mine = [_buffer(one, path) for one in plains]
        first = rule == "first" or not (mine[0].is_floating_point() or mine[0].is_complex())
        agreed = mine[0].clone() if first else torch.stack(mine).mean(0)
        for t in mine:
            t.copy_(agreed)


def _buffer(module: nn.Module, path: str) -> torch.Tensor:
    part, _, name = path.rpartition(".")
    found = getattr(module.get_submodule(part), name)
    assert isinstance(found, torch.Tensor)
    return found


def _trains(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _batch(case: Case, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + 1000 * step + 100 * micro + rank)
    return torch.randn(4, D, generator=generator, dtype=torch.float64) + (rank - 0.5) / 2


def _look(case: Case, state: fsdp.State, plain: Model, when: str) -> None:
    """The state's weights and buffers are those of this rank's module."""
    now = dict(plain.named_parameters())
    for path, weight in fsdp.full_params(state).items():
        _same(case, weight, now[path], f"the weight {path!r} {when}")
    for path, t in state.buffers.items():
        _same(case, t, _buffer(plain, path), f"the buffer {path!r} {when}")


def _same(case: Case, got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    got, want = got.detach().cpu(), want.detach()
    if got.dtype is not want.dtype or got.shape != want.shape:
        raise Wrong(f"{what} is {got.dtype} {[*got.shape]}, that of the plain module {want.dtype} {[*want.shape]}")
    close = 1e-5 if any(one["dtype"] == "float32" for one in case["buffers"]) else 1e-9
    far = (_number(got) - _number(want)).abs().max().item()
    if not far <= close * (1 + _number(want).abs().max().item()):
        raise Wrong(f"{what} is {far:.3g} from that of the plain module")


def smaller(case: Case) -> list[Case]:
    """Simpler cases, the boldest first."""
    found: list[Case] = []
    for key in ("steps", "buffers"):
        some = case[key]
        found += [{**case, key: some[:k] + some[k + 1 :]} for k in range(len(some)) if len(some) > 1]
    for key, value in (
        ("world", 2), ("preset", "zero3"), ("from", "shard"), ("checkpoint", False), ("second_order", False),
        ("rule", "mean"), ("every", False), ("looks", False),
    ):  # fmt: skip
        if case[key] != value and case["world"] > 1:
            found.append({**case, key: value, **({"preset": "zero3"} if key == "world" else {})})
    for k, step in enumerate(case["steps"]):
        for change in ({"between": None}, {"evaluate": False}, {"micros": 1}, {"fresh": False}, {"preset": ""}):
            if not change.items() <= step.items():
                found.append({**case, "steps": [{**s, **change} if j == k else s for j, s in enumerate(case["steps"])]})
    for k, one in enumerate(case["buffers"]):
        for change in ({"long": False}, {"when": "always"}, {"write": "in place"}, {"own": False}):
            if not change.items() <= one.items():
                some = [{**b, **change} if j == k else b for j, b in enumerate(case["buffers"])]
                found.append({**case, "buffers": some})
    return found
