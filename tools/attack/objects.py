"""objects: a random model whose forward reaches weights, numbers and tensors by a random nest of Python objects, in a
random way of a step, against the plain module; a loop may change what is in a nest between steps.

    ["list", "weak", "slots"], "weight"    held[0] is a list of a weak reference to an object with the weight

A nest that leads to a weight leads to that of the state. A change of a number or a tensor is followed, or refused. What
leads to a weight from a global or a class is refused.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from .verdict import Refused, Verdict, Wrong

Case = dict[str, Any]
D = 4
CLOSE = 1e-9
WAYS = ("driven", "driven", "second order", "bound", "apply")


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held

    def get(self) -> Any:
        return self.held


class Slots:
    __slots__ = ("__weakref__", "held")

    def __init__(self, held: Any) -> None:
        self.held = held


class Words(dict[str, Any]):
    pass


Named = namedtuple("Named", "held other")


def local_of(value: Any) -> Any:
    made = threading.local()
    made.held = value
    return made


def array_of(value: Any) -> Any:
    made = np.empty(2, dtype=object)
    made[0] = value
    return made


def _held(it: Any) -> Any:
    return it.held


def _first(it: Any) -> Any:
    return it[0]


def _item(it: Any) -> Any:
    return it["held"]


def _called(it: Any) -> Any:
    return it()


def _cached(it: Any) -> Any:
    it.cache_clear()
    return it()


def _any(it: Any) -> Any:
    return next(iter(it))


#: how a value is held, and how it is read again
NESTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda v: [v, 1], _first),
    "tuple": (lambda v: (v, 1), _first),
    "deque": (lambda v: deque([v, 1]), _first),
    "dict": (lambda v: {"held": v}, _item),
    "ordered": (lambda v: OrderedDict(held=v), _item),
    "default": (lambda v: defaultdict(int, held=v), _item),
    "words": (lambda v: Words(held=v), _item),
    "proxied": (lambda v: types.MappingProxyType({"held": v}), _item),
    "named": (lambda v: Named(v, 1), _held),
    "space": (lambda v: types.SimpleNamespace(held=v), _held),
    "object": (Plain, _held),
    "slots": (Slots, _held),
    "local": (local_of, _held),
    "method": (lambda v: Plain(v).get, _called),
    "partial": (lambda v: functools.partial(_itself, v), _called),
    "closure": (lambda v: lambda: v, _called),
    "argument": (lambda v: lambda it=v: it, _called),
    "cached": (lambda v: functools.cache(lambda: v), _cached),
    "items": (lambda v: {"held": v}.get, lambda it: it("held")),
    "array": (array_of, _first),
}
#: the same for values that may be led to weakly; somebody else keeps them
WEAK: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weak": (weakref.ref, _called),
    "weak values": (lambda v: weakref.WeakValueDictionary(held=v), _item),
    "weak keys": (lambda v: weakref.WeakKeyDictionary({v: 1}), _any),
    "weak set": (lambda v: weakref.WeakSet([v]), _any),
    "weak method": (lambda v: weakref.WeakMethod(v.get), lambda it: it().__self__),
    "weak proxy": (lambda v: [weakref.proxy(v)], _first),
}
PUT: dict[str, Callable[[Any, Any], None]] = {
    **dict.fromkeys(("list", "deque", "array"), lambda it, v: it.__setitem__(0, v)),
    **dict.fromkeys(("dict", "ordered", "default", "words"), lambda it, v: it.__setitem__("held", v)),
    **dict.fromkeys(("space", "object", "slots", "local"), lambda it, v: setattr(it, "held", v)),
}
LED = {"weak": ("object", "slots", "closure"), "weak method": ("object",), "weak keys": ("object", "slots")}


def _itself(value: Any) -> Any:
    return value


REGISTRY: dict[str, Any] = {}


class Model(nn.Module):
    """Two parts, a parameter of its own, and nests of objects that its forward reads."""

    keeper: Any = None

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.ones(D))
        self.nests, self.outside = case["nests"], case["outside"]
        self.strong: list[Any] = []  # what is led to weakly
        self.held = [self.nest(path, leaf) for path, leaf in self.nests]

    def nest(self, path: list[str], leaf: str) -> Any:
        value: Any = {
            "weight": self.w, "part": self.b, "model": self, "number": 2.0, "tensor": torch.full((D,), 2.0).double(),
        }[leaf]  # fmt: skip
        for kind in reversed(path):
            if kind in WEAK:
                self.strong.append(value)
            value = (WEAK | NESTS)[kind][0](value)
        return value

    def found(self, i: int, deep: int) -> Any:
        """What is in a nest, after so many objects."""
        value = self.held[i]
        path = self.nests[i][0]
        for kind, before in zip(path[:deep], ["", *path], strict=False):
            it = before == "weak method"  # it led to this object itself
            value = value.held if it else (WEAK | NESTS)[kind][1](value)
        return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        for i, (path, leaf) in enumerate(self.nests):
            value = self.found(i, len(path))
            if leaf == "part":
                x = x + torch.tanh(value(x))
            elif leaf == "model":
                x = x + torch.tanh(x @ value.b.weight) * value.w
            else:
                x = x * value
        if self.outside == "global":
            x = x * REGISTRY["model"].w
        elif self.outside == "class":
            x = x * type(self).keeper.w
        return self.b(x) * self.w


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"objects:{seed}:{index}")
    nests: list[Any] = []
    for _ in range(rng.randint(1, 4)):
        leaf = rng.choice(("weight", "weight", "part", "model", "number", "number", "tensor"))
        path = [rng.choice([*NESTS]) for _ in range(rng.randint(1, 4))]
        for k in reversed(range(len(path))):
            if rng.random() < 0.25:
                led = path[k + 1] if k + 1 < len(path) else "object" if leaf in ("part", "model") else ""
                kinds = [kind for kind in WEAK if led in LED.get(kind, ("object", "slots"))]
                kinds = [kind for kind in kinds if kind != "weak method" or k + 1 < len(path)]
                if kinds:
                    path[k] = rng.choice(kinds)
        nests.append([path, leaf])
    return {
        "kind": "objects", "world": 1, "seed": rng.randint(0, 10**6), "nests": nests, "way": rng.choice(WAYS),
        "copies": rng.choice((0, 0, 1, 2)), "steps": rng.randint(1, 3), "keeps": rng.random() < 0.5,
        "change": rng.choice((None, 0, 1)) if any(_able(nest) for nest in nests) else None,
        "which": rng.randint(0, 10), "outside": rng.choice(("", "", "", "", "", "global", "class")),
        "preset": rng.choice(("zero3", "zero2", "ddp")),
    }  # fmt: skip


def _able(nest: Any) -> bool:
    """Whether a loop can change what is in this nest."""
    return nest[1] in ("number", "tensor") and (nest[0][-1] in PUT or nest[1] == "tensor")


def change(model: Any, i: int) -> None:
    """As a loop would, between steps."""
    path, leaf = model.nests[i]
    if leaf == "tensor":
        model.found(i, len(path)).mul_(0.5)
    else:
        PUT[path[-1]](model.found(i, len(path) - 1), 3.0)


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank."""
    REGISTRY.clear()
    Model.keeper = None

    def made() -> Model:
        torch.manual_seed(case["seed"])
        return Model(case).double()

    plain, module = made(), made()
    if case["outside"]:
        REGISTRY["model"] = Model.keeper = module
        try:
            fsdp.functionalize(module)
        except fsdp.TreeError:
            return Verdict("refused", notes={"end": "outside"})
        return Verdict("accepted", f"what leads to weights from a {case['outside']} was taken")
    params, model = fsdp.functionalize(module)
    for _ in range(case["copies"]):
        model = fsdp.functionalize(model)[1]
    spec = fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, case["preset"])("data"))
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    if not case["keeps"]:
        del module, params
    way = case["way"]
    run: Any = T.apply(model, loss_fn) if way == "apply" else T.forward_backward(
        model, loss_fn, second_order=way == "second order"
    )  # fmt: skip
    able = [i for i, nest in enumerate(case["nests"]) if _able(nest)]
    for step in range(case["steps"] + 1):
        changed = case["change"] is not None and step > case["change"]
        if case["change"] is not None and step == case["change"] + 1:
            for one in (plain, model):
                change(one, able[case["which"] % len(able)])
        x = torch.randn(3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        want = loss_fn(plain, x)
        try:
            if way == "apply":
                got = run(state, x)[1]
            elif way == "bound":
                state, weights = fsdp.unshard(state)
                grads, got = torch.func.grad_and_value(lambda p, x: loss_fn(fsdp.bind(model, p), x))(weights, x)
                state = fsdp.reduce(state, grads)
            else:
                state, got = run(state, x)
        except fsdp.SpecError as error:
            if changed:
                raise Refused(error) from error
            raise
        _same(got, want, f"the loss of step {step}")
        if way == "apply":
            continue
        state = fsdp.step(state)
        grads = torch.autograd.grad(want, [*plain.parameters()])
        with torch.no_grad():
            for p, g in zip(plain.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
    now = dict(plain.named_parameters())
    for path, weight in fsdp.full_params(state).items():
        _same(weight, now[path], f"the weight {path!r}")
    return Verdict("right", notes={"end": "end"})


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    far = (got.detach() - want.detach()).abs().max().item()
    if not far <= CLOSE * (1 + want.detach().abs().max().item()):
        raise Wrong(f"{what} is {far:.3g} from that of the plain module")


def smaller(case: Case) -> list[Case]:
    """Simpler cases, the boldest first."""
    nests = case["nests"]
    found = [{**case, "nests": [nest]} for nest in nests if len(nests) > 1 and (case["change"] is None or _able(nest))]
    for i, (path, leaf) in enumerate(nests):
        for k in range(len(path) - 1):
            if path[k] not in WEAK and (k == 0 or path[k - 1] not in WEAK):
                less = [path[:k] + path[k + 1 :], leaf]
                found.append({**case, "nests": [*nests[:i], less, *nests[i + 1 :]]})
    for key, value in (("copies", 0), ("steps", 1), ("keeps", True), ("preset", "zero3"), ("way", "driven")):
        if case[key] != value:
            found.append({**case, key: value})
    return found
