"""differ: ranks that differ in one setting, value or order. An error of the package on every rank, and soon.

A case names what differs; one rank does the other thing. What may differ (leaves and buffers that each rank has for
itself) is tried too, and has to work.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import functional_fsdp as fsdp

from .verdict import PATIENCE, Refused, Verdict, Wrong, documented, judged

Case = dict[str, Any]
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3")


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    from . import differ_verbs  # noqa: F401 (it has the rest of the differences)

    rng = Random(f"differ:{seed}:{index}")
    world = rng.choice((2, 2, 2, 3, 4))
    return {
        "kind": "differ", "world": world, "what": rng.choice(sorted(DIFFERENCES)), "who": rng.randrange(world),
        "preset": rng.choice(PRESETS), "transport": "copy_engine" if rng.random() < 0.25 else "collective",
        "seed": rng.randint(0, 10**6), "patience": 15,
    }  # fmt: skip


def smaller(case: Case) -> list[Case]:
    """Simpler cases."""
    plain = {"world": 2, "transport": "collective", "preset": "zero3"}
    return [{**case, key: value, "who": min(case["who"], 1)} for key, value in plain.items() if case[key] != value]


class Settings:
    """What every rank does, before one of them changes something. A leaf or setting a line."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.folder = case, folder
        generator = torch.Generator().manual_seed(case["seed"])
        self.params: dict[str, Any] = {
            "blocks": [{"w": torch.randint(-9, 9, (6, 6), generator=generator).float()} for _ in range(2)],
            "order": torch.randperm(50, generator=generator),
            "head": {"w": torch.randn(7, generator=generator), "b": torch.randn(3, generator=generator)},
        }
        self.placement: Any = getattr(fsdp, case["preset"])("data")
        self.precision: dict[str, Any] = {}
        self.transport: str = case["transport"]
        self.schedule: dict[str, Any] = {}
        self.spec: dict[str, Any] = {"labels": {"*b*": "slow"}}
        self.adamw: dict[str, Any] = {"lr": 0.01, "weight_decay": {"slow": 0.0, "default": 0.1}}
        self.optimizer: Callable[[], Any] = lambda: fsdp.adamw(**self.adamw)
        self.shard: dict[str, Any] = {"seed": 1, "buffers": {"mean": torch.zeros(4), "n": torch.tensor(3)}}
        self.mesh: Callable[[], Any] = fsdp.local_mesh
        self.after: Callable[[fsdp.State], Any] = train
        self.may = False  # this may differ
        self.slow = False  # ranks call other verbs, which only a timeout can end

    def state(self) -> fsdp.State:
        spec = fsdp.Spec(
            self.mesh(), self.placement, precision=fsdp.Precision(**self.precision),
            schedule=fsdp.Schedule(**self.schedule), transport=self.transport, **self.spec,
        )  # fmt: skip
        return fsdp.shard(self.params, spec, self.optimizer(), **self.shard)


def train(state: fsdp.State, steps: int = 2) -> None:
    """Some steps; afterwards ranks compare their weights, by other means than the package's."""
    for step in range(steps):
        state, params = fsdp.unshard(state)
        scale = 1 + dist.get_rank() + step
        grads = torch.utils._pytree.tree_map(lambda t, by=scale: t * by if t.is_floating_point() else None, params)
        state = fsdp.step(fsdp.reduce(state, grads))
    whole = torch.cat([t.double().reshape(-1) for t in torch.utils._pytree.tree_leaves(fsdp.full_params(state))])
    every = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(every, whole)
    if not all(torch.equal(whole, other) for other in every):
        raise Wrong("after two steps ranks have different whole parameters")


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank."""
    from . import differ_verbs  # noqa: F401

    warnings.simplefilter("ignore")
    settings = Settings(case, folder)
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
    fsdp.local_mesh()
    dist.barrier()
    change = DIFFERENCES[case["what"]]
    change(settings, rank == case["who"], rank)
    begun = time.monotonic()
    try:
        settings.after(settings.state())
    except (Wrong, Refused):
        raise
    except Exception as error:
        seconds = time.monotonic() - begun
        known = documented(error, OSError, TypeError) if not settings.may else False
        if known and (settings.slow or not (isinstance(error, fsdp.CommError) and seconds > 0.7 * PATIENCE)):
            said = f"{type(error).__name__}: {str(error)[:200]}"
            clean = not isinstance(error, fsdp.CommError)  # the same ranks go on with other states
            return Verdict("refused", said, {"end": "refused"}, clean)
        verdict = judged(error, seconds, 0.7 * PATIENCE)
        return Verdict(verdict.column, f"{case['what']}: {verdict.text}", clean=False)
    if settings.may:
        return Verdict("right", "", {"end": "right"})
    return Verdict("accepted", f"{case['what']} on rank {case['who']}: no error on this rank", clean=False)


# ---------------------------------------------------------------- what differs

Change = Callable[[Settings, bool, int], None]
DIFFERENCES: dict[str, Change] = {}


def difference(fn: Change) -> Change:
    DIFFERENCES[fn.__name__.replace("_", " ")] = fn
    return fn


def setting(name: str, part: str, key: str, value: Any) -> None:
    """One key of one part of the settings has another value on one rank."""

    def change(s: Settings, me: bool, rank: int) -> None:
        if me:
            getattr(s, part)[key] = value

    DIFFERENCES[name] = change


setting("prefetch", "schedule", "prefetch", 2)
setting("keep", "schedule", "keep", "all")
setting(
    "order", "schedule", "order", ["head", "blocks.0", "blocks.1", "order", "order", "blocks.1", "blocks.0", "head"]
)
setting("recorded", "schedule", "order", "recorded")
setting("debug", "schedule", "debug", True)
setting("average", "spec", "average", "sum")
setting("labels", "spec", "labels", {"*w*": "slow"})
setting("units", "spec", "units", [("blocks.0", "blocks.1"), "head"])
setting("trainable", "spec", "trainable", {"head": False})
setting("wire", "precision", "wire", torch.bfloat16)
setting("sum", "precision", "sum", "fp32")
setting("compute", "precision", "compute", torch.bfloat16)
setting("grads", "precision", "grads", torch.float64)
setting("lr", "adamw", "lr", 0.02)
setting("betas", "adamw", "betas", (0.8, 0.99))
setting("eps", "adamw", "eps", 1e-4)
setting("decay", "adamw", "weight_decay", {"slow": 0.0, "default": 0.2})
setting("seed", "shard", "seed", 2)
setting("buffer value", "shard", "buffers", {"mean": torch.ones(4), "n": torch.tensor(3)})
setting("buffer shape", "shard", "buffers", {"mean": torch.zeros(5), "n": torch.tensor(3)})
setting("buffer missing", "shard", "buffers", {"mean": torch.zeros(4)})
setting("buffer dtype", "shard", "buffers", {"mean": torch.zeros(4).double(), "n": torch.tensor(3)})


@difference
def one_value(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["head"]["w"][3] += 0.5


@difference
def permuted(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["order"] = s.params["order"].flip(0)


@difference
def transposed(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["blocks"][0]["w"] = s.params["blocks"][0]["w"].t().contiguous()


@difference
def leaves_exchanged(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["blocks"].reverse()


@difference
def shape(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["head"]["b"] = torch.zeros(4)


@difference
def dtype(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["head"]["b"] = s.params["head"]["b"].double()


@difference
def leaf_missing(s: Settings, me: bool, rank: int) -> None:
    if me:
        del s.params["head"]["b"]


@difference
def leaf_order(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params = dict(reversed(s.params.items()))


@difference
def frozen(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.params["head"]["w"] = torch.nn.Parameter(s.params["head"]["w"], requires_grad=False)


@difference
def tied(s: Settings, me: bool, rank: int) -> None:
    for block in s.params["blocks"]:
        block["w"] = torch.ones(6, 6)
    if me:
        s.params["blocks"][1]["w"] = s.params["blocks"][0]["w"]


@difference
def placement(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.placement = fsdp.zero2("data") if s.case["preset"] != "zero2" else fsdp.zero3("data")


@difference
def transport(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.transport = "copy_engine" if s.case["transport"] == "collective" else "collective"


@difference
def optimizer(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.optimizer = lambda: fsdp.sgd(lr=0.01)


@difference
def no_optimizer(s: Settings, me: bool, rank: int) -> None:
    if me:
        s.optimizer = lambda: None


@difference
def lr_function(s: Settings, me: bool, rank: int) -> None:
    """The same code, another number in its closure."""
    slope = 0.02 if me else 0.01
    s.adamw["lr"] = lambda count: slope / (1 + count)


@difference
def momentum(s: Settings, me: bool, rank: int) -> None:
    s.optimizer = lambda: fsdp.sgd(lr=0.01, momentum=0.5 if me else 0.9)


@difference
def raises_before(s: Settings, me: bool, rank: int) -> None:
    """One rank's tree is one that shard refuses."""
    if me:
        s.params["head"]["b"] = "no tensor"
