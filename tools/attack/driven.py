"""driven: a random model and a random program of it for each step, by `T.forward_backward`, against the plain module;
and what the engine starts, against what `advance` says alone.

A program is a list of operations on activations, a value, that the plain module and the driven one both carry out:

    ["use", i]  ["weight", i]  ["scale"]  ["nograd", i]  ["detach"]  ["loss"]  ["half", i]  ["checkpoint", [...]]

Ranks may leave out operations, within what README allows: in the first step one rank leaves out nothing; a step with
other operations, or another order, than the first one's is the same on every rank. Where there is a checkpoint, or
weights are tied, ranks leave out nothing; where a unit is used more than once, or is frozen, no `detach`. An evaluation
in the middle of a step comes where none left out anything. By "copy_engine" a step has the operations of the first one.
"""

from __future__ import annotations

import copy
import warnings
from random import Random
from typing import Any

import torch
import torch.nn as nn
from support.functions import KINDS as FUNCTIONS
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .issued import Issued
from .settings import draw_world
from .trained import uneven
from .verdict import Verdict, Wrong

Case = dict[str, Any]
Ops = list[Any]
D = 4  # features
CLOSE = 1e-9
LARGE = 1e6  # a loss from which on a program diverges, and any rounding is as large as its weights


# ---------------------------------------------------------------- the model


class Pair(nn.Module):
    """A unit with two outputs, of which a program may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x)


KINDS: dict[str, Any] = {
    "linear": lambda: nn.Linear(D, D),
    "block": lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)),
    "norm": lambda: nn.LayerNorm(D),
    "pair": Pair,
}


class Model(nn.Module):
    """Parts, registered in an order of their own, and a parameter that is in none of them."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__()
        made = [KINDS[kind]() for kind in said["parts"]]
        for i, j in said["tied"]:
            _first(made[i]).weight = _first(made[j]).weight
        self.loose = nn.Parameter(torch.ones(D))
        for i in said["registered"]:
            self.add_module(f"p{i}", made[i])
        for i in said["frozen"]:
            made[i].requires_grad_(False)

    def forward(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        x = self.run(x, ops, losses)
        return torch.stack([*losses, x.square().mean() if not ops or ops[-1] != ["loss"] else losses[-1]]).sum()

    def part(self, i: int, x: torch.Tensor, half: bool = False) -> torch.Tensor:
        out = getattr(self, f"p{i}")(x)
        if isinstance(out, tuple):
            out = out[0] if half else out[0] + out[1]
        return x + torch.tanh(out)

    def run(self, x: torch.Tensor, ops: Ops, losses: list[torch.Tensor]) -> torch.Tensor:
        for what, *which in ops:
            if what in ("use", "half"):
                x = self.part(which[0], x, what == "half")
            elif what == "weight":
                x = x + torch.tanh(x @ _first(getattr(self, f"p{which[0]}")).weight.t())
            elif what == "scale":
                x = x * self.loose
            elif what == "nograd":
                with torch.no_grad():
                    more = self.part(which[0], x)
                x = x + more
            elif what == "given":
                kind, i = which
                x = x + torch.tanh(FUNCTIONS[kind].apply(x, self.vector(i), None, 0.5))
            elif what == "detach":
                x = x.detach()
            elif what == "loss":
                losses.append(x.square().mean())
            else:
                x = checkpoint(self.run, x, which[0], losses, use_reentrant=False)
        return x

    def vector(self, i: int | None) -> Any:
        """A weight [D] of a part, or the one of its own."""
        part = None if i is None else getattr(self, f"p{i}")
        return self.loose if part is None else part.weight if isinstance(part, nn.LayerNorm) else _first(part).bias


def _first(part: nn.Module) -> Any:
    """The linear layer of a part."""
    return next(m for m in part.modules() if isinstance(m, nn.Linear))


# ---------------------------------------------------------------- cases


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"driven:{seed}:{index}")
    world = draw_world(rng, (1, 1, 2, 2, 2, 2, 4))
    parts = [rng.choice(("linear", "linear", "block", "block", "norm", "pair")) for _ in range(rng.randint(2, 6))]
    numbers = list(range(len(parts)))
    registered = rng.sample(numbers, len(numbers)) if rng.random() < 0.4 else numbers
    able = [i for i in numbers if parts[i] in ("linear", "block")]
    tied = [rng.sample(able, 2)] if len(able) > 1 and rng.random() < 0.25 else []
    frozen = [i for i in numbers if rng.random() < 0.1 and not any(i in pair for pair in tied)]
    model = {"parts": parts, "registered": registered, "tied": tied, "frozen": frozen}
    base = _program(rng, parts, rng.sample(numbers, len(numbers)) if rng.random() < 0.15 else numbers)
    if tied and ["scale"] not in _flat(
        base
    ):  # a unit that nobody uses, between two calls that share one, is in their way
        base.append(["scale"])
    steps: list[Any] = []
    for step in range(rng.randint(1, 4)):
        micros = []
        same = step == 0 or rng.random() < 0.7
        ops = base if same else _changed(rng, base, parts)
        for _ in range(rng.choice((1, 1, 1, 2))):
            leave = [
                _left_out(rng, ops, model) if same and rng.random() < 0.5 and (step or rank) else []
                for rank in range(world)
            ]
            micros.append({"ops": ops, "leave": leave})
        whole = not any(any(micro["leave"]) for micro in micros)
        steps.append({"micros": micros, "evaluate": whole and rng.random() < 0.4})
    case = {
        "kind": "driven", "world": world, "seed": rng.randint(0, 10**6), "model": model, "steps": steps,
        "preset": rng.choice(("zero3", "zero3", "zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp")),
        "prefetch": rng.randint(0, 4),
        "keep": rng.choice((None, None, "all", [], [f"p{rng.choice(numbers)}"])),
        "order": rng.choice((None, None, None, "recorded")) if world == 1 else None,
        "debug": rng.random() < 0.5,
        "patience": 15,
    }  # fmt: skip
    case["transport"] = rng.choice(("collective", "copy_engine")) if fixed(case) else "collective"
    return case


def fixed(case: Case) -> bool:
    """Whether every step has the operations of the first one."""
    programs = [micro["ops"] for said in case["steps"] for micro in said["micros"]]
    return all(ops == programs[0] for ops in programs)


def _program(rng: Random, parts: list[str], order: list[int]) -> Ops:
    """Operations that use parts in this order."""
    ops: Ops = []
    for i in order:
        dice = rng.random()
        able = parts[i] in ("linear", "block")
        if dice < 0.06:
            ops.append(["nograd", i])
        elif dice < 0.12 and able:
            ops.append(["weight", i])
        elif dice < 0.2 and parts[i] == "pair":
            ops.append(["half", i])
        else:
            ops.append(["use", i])
        if rng.random() < 0.08:
            ops.append(["use", i])  # again at once
        for what, odds in (("scale", 0.15), ("loss", 0.1), ("detach", 0.04)):
            if rng.random() < odds:
                ops.append([what])
    if rng.random() < 0.15:
        ops.append(["use", rng.choice(order)])  # a second time, later
    if rng.random() < 0.3 and len(ops) > 1:
        a = rng.randrange(len(ops) - 1)
        b = rng.randint(a + 1, len(ops))
        ops[a:b] = [["checkpoint", ops[a:b]]]
    return ops


def _changed(rng: Random, base: Ops, parts: list[str]) -> Ops:
    """Another program, of every rank."""
    ops = copy.deepcopy(base)
    dice = rng.random()
    if dice < 0.3 and len(ops) > 1:
        i, j = rng.sample(range(len(ops)), 2)
        ops[i], ops[j] = ops[j], ops[i]
    elif dice < 0.5:
        ops.insert(rng.randint(0, len(ops)), ["detach"])
    elif dice < 0.7:
        ops.insert(rng.randint(0, len(ops)), ["use", rng.randrange(len(parts))])
    elif dice < 0.85:
        ops = _flat(ops)
        ops = [["checkpoint", ops]]
    else:
        ops = [op for op in _flat(ops) if op[0] != "detach" and rng.random() < 0.8]
    return ops


def _flat(ops: Ops) -> Ops:
    return [one for op in ops for one in (_flat(op[1]) if op[0] == "checkpoint" else [op])]


def _left_out(rng: Random, ops: Ops, model: dict[str, Any]) -> list[int]:
    """Which operations a rank leaves out, by number; not those that it has twice (it would not be clear which)."""
    flat = _flat(ops)
    users = [op[1] for op in flat if len(op) > 1]
    repeats = len({*users}) < len(users) or sum(op == ["scale"] for op in flat) > 1
    if model["tied"] or any(op[0] == "checkpoint" for op in ops):
        return []
    what = ("use", "half", "scale") if repeats or model["frozen"] else ("use", "half", "scale", "detach")
    able = [n for n, op in enumerate(flat) if op[0] in what and (
        len(op) == 1 or users.count(op[1]) == 1)]  # fmt: skip
    return [n for n in able if rng.random() < 0.3]


def _kept(ops: Ops, leave: list[int], at: int = 0) -> tuple[Ops, int]:
    """The program without some of its operations."""
    found: Ops = []
    for op in ops:
        if op[0] == "checkpoint":
            inner, at = _kept(op[1], leave, at)
            if inner:
                found.append(["checkpoint", inner])
        else:
            if at not in leave:
                found.append(op)
            at += 1
    return found, at


# ---------------------------------------------------------------- playing


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank."""
    plain = uneven(Model, case)
    world = case["world"]
    mesh = fsdp.local_mesh(replica=world // 2, shard=2) if _two_axes(case) else fsdp.local_mesh()
    axes = ("replica", "shard") if _two_axes(case) else ("data",)
    preset = case["preset"] if len(axes) == 2 or case["preset"] not in ("hsdp", "hfsdp") else "zero3"
    placed = _placement(preset, axes)
    keep = case["keep"] if isinstance(case["keep"], str | None) else tuple(case["keep"])
    params, model = fsdp.functionalize(plain)
    keep = keep if not isinstance(keep, tuple) else tuple(k for k in keep if k in _units(mesh, placed, params))
    transport = case.get("transport", "collective")
    schedule = fsdp.Schedule(case["order"], case["prefetch"], keep, case["debug"])
    spec = fsdp.Spec(mesh, placed, schedule=schedule, transport=transport)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1, weight_decay=0.05))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.05)
    forward_backward = T.forward_backward(model, lambda m, x, ops: m(x, ops))
    apply = T.apply(model)
    issued, device, diverges = Issued(state), state.count.device, False
    for step, said in enumerate(case["steps"]):
        if not _some_gradient(plain, case, said):
            continue
        for k, micro in enumerate(said["micros"]):
            last = k == len(said["micros"]) - 1
            programs = [_kept(micro["ops"], leave)[0] for leave in micro["leave"]]
            if not all(_trains(plain, ops) for ops in programs):
                programs = [micro["ops"]] * world
            for r, ops in enumerate(programs):
                loss = plain(_batch(case, step, k, r), ops)
                diverges |= loss.item() > LARGE
                if r == rank:
                    mine = loss
                (loss / world).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x = _batch(case, step, k, rank).to(device)
                state, got = forward_backward(state, x, programs[rank], last_microbatch=last)
            issued.keep(state)
            _same(got, mine, f"the loss of step {step}, microbatch {k}")
        if said["evaluate"]:
            ops = said["micros"][0]["ops"]
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                state, got = apply(state, _batch(case, step, 9, rank).to(device), ops)
                _same(got, plain(_batch(case, step, 9, rank), ops), f"an evaluation in step {step}")
        state = fsdp.step(state)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if diverges:
            break
        found = fsdp.state_dict(state)
        for name, p in plain.named_parameters():
            _same(found[name], p, f"{name} after step {step}")
    issued.check()
    return Verdict("right")


def _units(mesh: Any, placed: Any, params: Any) -> tuple[str, ...]:
    return tuple(unit.name for unit in fsdp.make_layout(params, fsdp.Spec(mesh, placed)).units)


def _two_axes(case: Case) -> bool:
    return case["world"] in (4, 8) and case["preset"] in ("hsdp", "hfsdp")


def _placement(preset: str, axes: tuple[str, ...]) -> Any:
    if len(axes) == 1:
        return getattr(fsdp, preset)(*axes)
    return fsdp.hsdp("replica", "shard") if preset == "hsdp" else fsdp.hfsdp("replica", "shard")


def _batch(case: Case, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + 1000 * step + 100 * micro + rank)
    return torch.randn(3, D, generator=generator, dtype=torch.float64)


def _trains(plain: Model, ops: Ops) -> bool:
    """Whether the loss of a program hangs on a weight."""
    return plain(torch.zeros(1, D, dtype=torch.float64), ops).requires_grad


def _some_gradient(plain: Model, case: Case, said: dict[str, Any]) -> bool:
    return all(_trains(plain, micro["ops"]) for micro in said["micros"])


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    far = (got.detach().cpu() - want.detach()).abs().max().item() if got.numel() else 0.0
    if not far <= CLOSE * (1 + want.detach().abs().max().item()):
        raise Wrong(f"{what} is {far:.3g} from that of the plain module")


# ---------------------------------------------------------------- shrinking


def smaller(case: Case) -> list[Case]:
    """Simpler cases, the boldest first."""
    found: list[Case] = []
    steps = case["steps"]
    for k in range(1, len(steps)):
        if len(steps) > 1:
            found.append({**case, "steps": steps[:k] + steps[k + 1 :]})

    def but(k: int, **changes: Any) -> Case:
        return {**case, "steps": [{**said, **changes} if i == k else said for i, said in enumerate(steps)]}

    for k, said in enumerate(steps):
        if said["evaluate"]:
            found.append(but(k, evaluate=False))
        if len(said["micros"]) > 1:
            found += [but(k, micros=[micro]) for micro in said["micros"]]
        for m, micro in enumerate(said["micros"]):
            rest = said["micros"]
            if any(micro["leave"]):
                for r, leave in enumerate(micro["leave"]):
                    for some in [[]] * bool(leave) + [[n] for n in leave] * (len(leave) > 1):
                        none = {**micro, "leave": [some if q == r else one for q, one in enumerate(micro["leave"])]}
                        found.append(but(k, micros=[*rest[:m], none, *rest[m + 1 :]]))
            elif micro["ops"] != steps[0]["micros"][0]["ops"]:  # ranks leave out only what the first step has
                for n in range(len(micro["ops"])):
                    if len(micro["ops"]) > 1:
                        less = {**micro, "ops": micro["ops"][:n] + micro["ops"][n + 1 :]}
                        found.append(but(k, micros=[*rest[:m], less, *rest[m + 1 :]]))
    for key, value in (
        ("prefetch", 1),
        ("prefetch", 0),
        ("keep", None),
        ("debug", False),
        ("preset", "zero3"),
        ("transport", "collective"),
    ):
        if case[key] != value:
            found.append({**case, key: value})
    model = case["model"]
    for key in ("tied", "frozen"):
        if model[key]:
            found.append({**case, "model": {**model, key: []}})
    return found
