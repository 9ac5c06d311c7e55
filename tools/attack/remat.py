"""remat: random programs of models some of whose modules recompute, keep or move what they made, in a driven step;
beside the plain module, whose programs may be others in each step. Where numbers are random, beside the same model
driven without that, as a State has random numbers of its own.

    model     b0, b1, ...: bodies, each with parts q0, q1, ...; t0, t1, ...: parts of its own; a loose weight in each
    program   ["body", i, ops]  ["part", i, j]  ["top", j]  ["checkpoint", [...]]  ["loss"]
    ops       ["use", j]  ["weight", j]  ["nograd", j]  ["scale"]  ["drop"]  ["count"]  ["checkpoint", [...]]

A part may be used twice in a region, by several bodies (tied weights), and from outside of its body.
"""

from __future__ import annotations

import copy
import warnings
from random import Random
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .trained import uneven
from .verdict import Verdict, Wrong

Case = dict[str, Any]
Ops = list[Any]
D = 4
CLOSE = 1e-9
LARGE = 1e6  # a loss from which on a program diverges


def _part(kind: str) -> Any:
    if kind == "block":
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    return nn.LayerNorm(D) if kind == "norm" else nn.Linear(D, D)


class Body(nn.Module):
    """Some parts, and what it does with them, which is given."""

    def __init__(self, parts: list[str]) -> None:
        super().__init__()
        for j, kind in enumerate(parts):
            self.add_module(f"q{j}", _part(kind))
        self.loose = nn.Parameter(torch.ones(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, ops: Ops) -> torch.Tensor:
        for what, *which in ops:
            if what == "use":
                x = x + torch.tanh(getattr(self, f"q{which[0]}")(x))
            elif what == "weight":
                x = x + torch.tanh(x * _vector(getattr(self, f"q{which[0]}")))
            elif what == "nograd":
                with torch.no_grad():
                    more = getattr(self, f"q{which[0]}")(x)
                x = x + 0.1 * more
            elif what == "scale":
                x = x * self.loose
            elif what == "drop":
                x = F.dropout(x, 0.25, self.training)
            elif what == "count":
                self.get_buffer("count").add_(1)
                x = x + 0.01 * self.get_buffer("count")
            else:
                x = checkpoint(self.forward, x, which[0], use_reentrant=False)
        return x


class Model(nn.Module):
    """Bodies, and parts of its own."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__()
        for i, parts in enumerate(said["bodies"]):
            self.add_module(f"b{i}", Body(parts))
        for j in range(said["tops"]):
            self.add_module(f"t{j}", nn.Linear(D, D))
        for (i, j), (k, m) in said["tied"]:
            a, b = getattr(getattr(self, f"b{i}"), f"q{j}"), getattr(getattr(self, f"b{k}"), f"q{m}")
            a.weight = b.weight
        for i, j in said["frozen"]:
            getattr(getattr(self, f"b{i}"), f"q{j}").requires_grad_(False)

    def forward(self, x: torch.Tensor, program: Ops) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        x = self.run(x, program, losses)
        return torch.stack([*losses, x.square().mean()]).sum()

    def run(self, x: torch.Tensor, program: Ops, losses: list[torch.Tensor]) -> torch.Tensor:
        for what, *which in program:
            if what == "body":
                x = getattr(self, f"b{which[0]}")(x, which[1])
            elif what == "part":
                x = x + torch.tanh(getattr(getattr(self, f"b{which[0]}"), f"q{which[1]}")(x))
            elif what == "top":
                x = x + torch.tanh(getattr(self, f"t{which[0]}")(x))
            elif what == "loss":
                losses.append(x.square().mean())
            else:
                x = checkpoint(self.run, x, which[0], losses, use_reentrant=False)
        return x


def _vector(part: nn.Module) -> torch.Tensor:
    """A weight [D] of a part."""
    return part[0].bias if isinstance(part, nn.Sequential) else part.bias  # type: ignore[return-value]


# ---------------------------------------------------------------- cases


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"remat:{seed}:{index}")
    bodies = [
        [rng.choice(("linear", "linear", "block", "norm")) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(1, 3))
    ]
    places = [(i, j) for i, parts in enumerate(bodies) for j in range(len(parts))]
    linear = [(i, j) for i, j in places if bodies[i][j] == "linear"]
    tied = [rng.sample(linear, 2)] if len(linear) > 1 and rng.random() < 0.2 else []
    frozen = [at for at in places if rng.random() < 0.08 and not any(at in pair for pair in tied)]
    said = {"bodies": bodies, "tops": rng.randint(0, 2), "tied": tied, "frozen": frozen}
    base = _program(rng, said)
    steps = []
    for step in range(rng.randint(1, 4)):
        program = base if step == 0 or rng.random() < 0.5 else _program(rng, said)
        steps.append([program] * rng.choice((1, 1, 1, 2)))
    return {
        "kind": "remat", "world": rng.choice((1, 1, 2, 2, 2, 3)), "seed": rng.randint(0, 10**6), "model": said,
        "steps": steps, "recomputes": _recomputes(rng, bodies),
        "units": rng.choice(("parts", "parts", "bodies", "own")),
        "preset": rng.choice(("zero3", "zero3", "zero3", "zero2", "zero1", "ddp")), "prefetch": rng.randint(0, 3),
        "keep": rng.choice((None, None, "all")), "debug": rng.random() < 0.6, "patience": 15,
    }  # fmt: skip


def _recomputes(rng: Random, bodies: list[list[str]]) -> list[Any]:
    """[a body, or one of its parts; parts that are saved, that are moved]; or a body that is moved."""
    found: list[Any] = []
    for i, parts in enumerate(bodies):
        dice, names = rng.random(), [f"q{j}" for j in range(len(parts))]
        if dice < 0.6:
            fates = {name: rng.choice(("", "", "save", "offload")) for name in names}
            found.append(["remat", f"b{i}", *([n for n in names if fates[n] == f] for f in ("save", "offload"))])
        elif dice < 0.75:
            found.append(["remat", f"b{i}.{rng.choice(names)}", [], []])
        elif dice < 0.85:
            found.append(["offload", f"b{i}", [], []])
    return found


def _program(rng: Random, said: dict[str, Any]) -> Ops:
    program: Ops = []
    order = [*range(len(said["bodies"]))]
    rng.shuffle(order)
    for i in order:
        if rng.random() < 0.85:
            program.append(["body", i, _ops(rng, len(said["bodies"][i]))])
        if rng.random() < 0.15:
            program.append(["part", i, rng.randrange(len(said["bodies"][i]))])
        if rng.random() < 0.1:
            program.append(["loss"])
        if said["tops"] and rng.random() < 0.4:
            program.append(["top", rng.randrange(said["tops"])])
    if rng.random() < 0.25:
        i = rng.choice(order)
        program.append(["body", i, _ops(rng, len(said["bodies"][i]))])  # perhaps a second time
    if not any(op[0] == "body" for op in program):
        program.append(["body", 0, [["scale"]]])
    if rng.random() < 0.15:
        a = rng.randrange(len(program))
        b = rng.randint(a + 1, len(program))
        program[a:b] = [["checkpoint", [_uncounted(op) for op in program[a:b]]]]
    return program


def _uncounted(op: Any) -> Any:
    """What torch's own checkpoint counts twice is left out."""
    return ["body", op[1], [one for one in op[2] if one != ["count"]]] if op[0] == "body" else op


def _ops(rng: Random, parts: int) -> Ops:
    ops: Ops = []
    for _ in range(rng.randint(1, parts + 1)):
        j = rng.randrange(parts)
        ops.append(rng.choice((["use", j], ["use", j], ["use", j], ["weight", j], ["nograd", j])))
        if rng.random() < 0.2:
            ops.append(["use", j])
        for what, odds in (("scale", 0.2), ("drop", 0.15)):
            if rng.random() < odds:
                ops.append([what])
    ops.append(["scale"])  # so that something trains
    if rng.random() < 0.2:
        ops.insert(rng.randrange(len(ops)), ["count"])
    elif rng.random() < 0.15:
        a = rng.randrange(len(ops))
        b = rng.randint(a + 1, len(ops))
        ops[a:b] = [["checkpoint", ops[a:b]]]
    return ops


# ---------------------------------------------------------------- playing


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank, which keeps a plain module of each."""
    plain = uneven(Model, case)
    said = case["model"]
    params, model = fsdp.functionalize(copy.deepcopy(plain))
    bodies = [f"b{i}" for i in range(len(said["bodies"]))]
    parts = [f"b{i}.q{j}" for i, some in enumerate(said["bodies"]) for j in range(len(some))]
    units = {"parts": parts, "bodies": bodies, "own": None}[case["units"]]
    schedule = fsdp.Schedule(None, case["prefetch"], case["keep"], case["debug"])
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, case["preset"])("data"), units=units, schedule=schedule)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1), buffers=fsdp.buffers(plain))
    again = _again(model, case["recomputes"])
    step_of = [T.forward_backward(one, lambda m, x, program: m(x, program)) for one in (again, model)]
    draws = any("drop" in str(program) for micros in case["steps"] for program in micros)
    beside = fsdp.shard(params, spec, fsdp.sgd(lr=0.1), buffers=fsdp.buffers(plain)) if draws else None
    optimizer, diverges = torch.optim.SGD(plain.parameters(), lr=0.1), False
    for step, micros in enumerate(case["steps"]):
        for k, program in enumerate(micros):
            x, more = _batch(case, step, k, rank), k < len(micros) - 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state, got = step_of[0](state, x, program, last_microbatch=not more)
                if beside is not None:
                    beside, loss = step_of[1](beside, x, program, last_microbatch=not more)
                else:
                    loss = _plain(plain, case, step, k, rank, program)
            diverges |= not loss.item() < LARGE
            if diverges:  # on this rank: the others may go on
                continue
            _same(got, loss, f"the loss of step {step}, microbatch {k}")
        state = fsdp.step(state)
        if beside is not None:
            beside = fsdp.step(beside)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found, wanted = fsdp.state_dict(state), plain.state_dict() if beside is None else fsdp.state_dict(beside)
        for name, want in () if diverges else wanted.items():
            _same(found[name], want, f"{name} after step {step}")
    return Verdict("right")


def _plain(plain: Model, case: Case, step: int, micro: int, rank: int, program: Ops) -> torch.Tensor:
    """The gradients of all ranks' batches, and this rank's loss and buffers."""
    world, held = case["world"], {name: b.clone() for name, b in plain.named_buffers()}
    for r in [r for r in range(world) if r != rank] + [rank]:
        for name, b in plain.named_buffers():
            b.data.copy_(held[name])
        loss: torch.Tensor = plain(_batch(case, step, micro, r), program)
        (loss / world).backward()
    return loss.detach()


def _again(model: Any, recomputes: list[Any]) -> Any:
    for how, path, save, move in recomputes:
        model = T.offload(model, path) if how == "offload" else T.remat(model, path, save=save, offload=move)
    return model


def _batch(case: Case, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + 1000 * step + 100 * micro + rank)
    return torch.randn(40, D, generator=generator, dtype=torch.float64)  # 1,280 bytes: what is moved has 1,024 or more


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    far = (got.detach().double() - want.detach().double()).abs().max().item() if got.numel() else 0.0
    if not far <= CLOSE * (1 + want.detach().abs().max().item()):
        raise Wrong(f"{what}: {far:.3g} from that of the plain module")


# ---------------------------------------------------------------- shrinking


def smaller(case: Case) -> list[Case]:
    """Simpler cases, the boldest first."""
    found: list[Case] = []
    steps = case["steps"]
    found += [{**case, "steps": steps[:k] + steps[k + 1 :]} for k in range(len(steps)) if len(steps) > 1]
    some = case["recomputes"]
    found += [{**case, "recomputes": some[:k] + some[k + 1 :]} for k in range(len(some))]
    found += [
        {**case, "recomputes": [*some[:k], [how, path, [], []], *some[k + 1 :]]}
        for k, (how, path, save, move) in enumerate(some)
        if save or move
    ]
    for k, micros in enumerate(steps):
        if len(micros) > 1:
            found.append({**case, "steps": [*steps[:k], micros[:1], *steps[k + 1 :]]})
        for less in _less(micros[0]):
            found.append({**case, "steps": [*steps[:k], [less] * len(micros), *steps[k + 1 :]]})
    plain = {"world": 1, "debug": False, "keep": None, "prefetch": 1, "preset": "zero3", "units": "parts"}
    found += [{**case, key: value} for key, value in plain.items() if case[key] != value]
    model = case["model"]
    found += [{**case, "model": {**model, key: []}} for key in ("tied", "frozen") if model[key]]
    return found


def _less(program: Ops) -> list[Ops]:
    """The program without one of its operations, or with one that is simpler."""
    found = [program[:n] + program[n + 1 :] for n in range(len(program)) if len(program) > 1]
    for n, op in enumerate(program):
        if op[0] == "checkpoint":
            found.append([*program[:n], *op[1], *program[n + 1 :]])
        elif op[0] == "body":
            found += [[*program[:n], ["body", op[1], ops], *program[n + 1 :]] for ops in _less(op[2])]
    return found
