"""Random settings: meshes, placements, precisions, units, labels, schedules, optimizers; and what the package makes of
them."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import torch

import functional_fsdp as fsdp

from .trees import escaped, paths_of

Settings = dict[str, Any]
PRESETS = ("ddp", "zero1", "zero2", "zero3")
FLOATS = ("float32", "bfloat16", "float64")


def draw_world(rng: Random, worlds: tuple[int, ...]) -> int:
    """How many ranks: one of these numbers, or of those of `--worlds`."""
    asked = os.environ.get("ATTACK_WORLDS", "")
    return rng.choice([*map(int, asked.split(","))] if asked else worlds)


def draw_mesh(rng: Random, world: int) -> list[list[Any]]:
    """Axes, outermost first: [name, ranks]. Also axes of one rank."""
    shapes: dict[int, list[list[int]]] = {
        1: [[1], [1, 1]],
        2: [[2], [2], [1, 2], [2, 1]],
        3: [[3], [3], [1, 3], [3, 1]],
        4: [[4], [2, 2], [2, 2], [1, 4], [4, 1]],
        8: [[8], [2, 4], [4, 2], [1, 8]],
    }
    sizes = rng.choice(shapes[world])
    return [["data", sizes[0]]] if len(sizes) == 1 else [["replica", sizes[0]], ["shard", sizes[1]]]


def draw(rng: Random, mesh: list[list[Any]], leaves: list[dict[str, Any]]) -> Settings:
    """Everything that `spec_of` and `optimizer_of` take."""
    paths = paths_of(leaves)
    traced = rng.random() < 0.003  # compiled, which takes long
    transport = "copy_engine" if not traced and rng.random() < 0.35 else "collective"
    labels = _rules(rng, paths, ("slow", "still"), 0.25)
    return {
        "placement": _placements(rng, mesh, paths),
        "precision": _precisions(rng, paths, leaves),
        "units": _units(rng, paths),
        "labels": labels,
        "trainable": _rules(
            rng, [p for p, leaf in zip(paths, leaves, strict=True) if not _whole(leaf)], (False,), 0.08
        ),
        "average": "sum" if rng.random() < 0.2 else "mean",
        "schedule": _schedule(rng, transport, traced),
        "traced": traced,
        "optimizer": _optimizer(rng, {label for _, label in labels}),
        "seed": rng.randint(0, 3),
    }


def _whole(leaf: dict[str, Any]) -> bool:
    return leaf["dtype"] not in FLOATS


def _placement(rng: Random, mesh: list[list[Any]]) -> dict[str, Any]:
    axes = [name for name, _ in mesh]
    if len(axes) == 2 and rng.random() < 0.5:
        return {"preset": rng.choice(("hsdp", "hfsdp")), "axes": axes, "data": axes}
    if rng.random() < 0.15:  # weights ⊆ grads ⊆ main ⊆ data
        chosen: dict[str, Any] = {"data": [a for a in axes if rng.random() < 0.9] or axes[:1]}
        for small, large in (("main", "data"), ("grads", "main"), ("weights", "grads")):
            chosen[small] = [a for a in chosen[large] if rng.random() < 0.7]
        return {"preset": None, **chosen}
    some = axes if rng.random() < 0.8 else [rng.choice(axes)]
    return {"preset": rng.choice(PRESETS), "axes": some, "data": some}


def _placements(rng: Random, mesh: list[list[Any]], paths: list[str]) -> list[list[Any]]:
    rules = [[pattern, _placement(rng, mesh)] for pattern in _patterns(rng, paths)] if rng.random() < 0.4 else []
    return [*rules, ["*", _placement(rng, mesh)]]


def _patterns(rng: Random, paths: list[str]) -> list[str]:
    """Patterns that match something: a path, a leading part of one, or what contains its last key."""
    found = []
    for _ in range(rng.randint(1, 2)):
        parts = rng.choice(paths).split(".")
        if rng.random() < 0.3:
            found.append(f"*{escaped(parts[-1])}*")
        else:
            found.append(escaped(".".join(parts[: rng.randint(1, len(parts))])))
    return list(dict.fromkeys(found))


def _rules(rng: Random, paths: list[str], given: tuple[Any, ...], share: float) -> list[list[Any]]:
    if not paths or rng.random() > share:
        return []
    return [[pattern, rng.choice(given)] for pattern in _patterns(rng, paths)]


def _precision(rng: Random) -> dict[str, Any]:
    said: dict[str, Any] = {}
    if rng.random() < 0.15:
        said["main"] = rng.choice(FLOATS)
    if rng.random() < 0.5:
        said["compute"] = rng.choice(("bfloat16", "bfloat16", "float32", "float64"))
    if rng.random() < 0.2:
        said["grads"] = rng.choice(FLOATS)
    if rng.random() < 0.25:
        said["wire"] = rng.choice(("bfloat16", "float32"))
    if rng.random() < 0.3:
        said["sum"] = rng.choice(("fp32", "fp32", "native"))
    if said.get("sum") == "fp32" and said.get("wire", said.get("compute", said.get("main"))) == "float64":
        said["wire"] = "float32"
    return said


def _precisions(rng: Random, paths: list[str], leaves: list[dict[str, Any]]) -> list[list[Any]]:
    if rng.random() < 0.45:
        return []
    patterns = _patterns(rng, paths) if rng.random() < 0.25 else []
    rules: list[list[Any]] = [[pattern, _precision(rng)] for pattern in [*patterns, "*"]]
    if any(leaf["dtype"] == "float64" for leaf in leaves):
        for _, said in rules:
            if said.get("sum") == "fp32":
                said["wire"] = said.get("wire", "float32")  # a float64 wire is refused, rightly
    return rules


def _units(rng: Random, paths: list[str]) -> Any:
    """None, a list of patterns or of groups of them, or names for some."""
    if rng.random() < 0.75:
        return None
    starts = list(dict.fromkeys(".".join(p.split(".")[: rng.choice((1, 1, 2, 3))]) for p in paths))
    rng.shuffle(starts)
    chosen: list[str] = []
    for start in starts[: rng.randint(1, 4)]:
        if not any(f"{start}.".startswith(f"{c}.") or f"{c}.".startswith(f"{start}.") for c in chosen):
            chosen.append(start)
    if len(chosen) > 1 and rng.random() < 0.3:
        return [[escaped(chosen[0]), escaped(chosen[1])], *map(escaped, chosen[2:])]
    if rng.random() < 0.25:
        return {f"u{i}" if rng.random() < 0.8 else chosen[i]: escaped(c) for i, c in enumerate(chosen)}
    return list(map(escaped, chosen))


def _schedule(rng: Random, transport: str, traced: bool) -> Settings:
    said: Settings = {"transport": transport, "prefetch": rng.choice((0, 1, 1, 1, 1, 2, 3))}
    if traced:
        return said
    draw = rng.random()
    if draw < 0.12:
        said["keep"] = "all"
    elif draw < 0.2:
        said["keep"] = rng.choice((0, 2000, 20_000))
    elif draw < 0.3:
        said["keep"] = {"seed": rng.randint(0, 99)}
    draw = rng.random()
    if draw < 0.05:
        said["order"] = "recorded"
    elif draw < 0.15:
        said["order"] = {"seed": rng.randint(0, 99)}
    if rng.random() < 0.15:
        said["debug"] = True
    return said


def _optimizer(rng: Random, labels: set[Any]) -> Settings:
    kind = rng.choice(("sgd", "sgd", "adamw", "adamw", "momentum", "nesterov", "pure"))
    said: Settings = {"kind": kind, "lr": 0.25 if kind not in ("adamw",) else 0.03125, "decay": 0.0}
    if kind != "pure":
        said["decay"] = rng.choice((0.0, 0.125))
        said["falls"] = rng.random() < 0.15  # lr is a function of the count
        if labels and rng.random() < 0.7:
            by_label = rng.choice(("lr", "decay"))
            if {"lr": "slow", "decay": "still"}[by_label] in labels:  # else it is refused as a misspelt one
                said["by_label"] = by_label
    return said


# ---------------------------------------------------------------- what the package makes of it


def placement_of(said: dict[str, Any]) -> fsdp.Placement:
    """The package's placement."""
    if said["preset"]:
        return getattr(fsdp, said["preset"])(*said["axes"])
    axes: dict[str, Any] = {kind: tuple(said[kind]) for kind in ("weights", "grads", "main", "data")}
    return fsdp.Placement(**axes)


def precision_of(said: dict[str, Any]) -> fsdp.Precision:
    """The package's precision."""
    return fsdp.Precision(**{k: v if k == "sum" else getattr(torch, v) for k, v in said.items()})


def schedule_of(said: Settings, units: list[str]) -> fsdp.Schedule:
    """The package's schedule; orders and sets of units are drawn here, where the units are known."""
    given: dict[str, Any] = {k: said[k] for k in ("prefetch", "debug") if k in said}
    keep, order = said.get("keep"), said.get("order")
    if isinstance(keep, dict):
        keep = [unit for unit in units if Random(f"{keep['seed']} {unit}").random() < 0.4]
    if isinstance(order, dict):
        shuffled = Random(order["seed"]).sample(units, len(units))
        order = [*shuffled, *reversed(shuffled)]
    return fsdp.Schedule(keep=keep, order=order, **given)


def spec_of(said: Settings, mesh: Any, params: Any) -> fsdp.Spec:
    """The package's spec."""
    units = said["units"]
    common: dict[str, Any] = {
        "placement": {pattern: placement_of(one) for pattern, one in said["placement"]},
        "precision": {pattern: precision_of(one) for pattern, one in said["precision"]} or None,
        "units": [tuple(u) if isinstance(u, list) else u for u in units] if isinstance(units, list) else units,
        "labels": dict(said["labels"]) or None,
        "trainable": dict(said["trainable"]) or None,
        "average": said["average"],
        "transport": said["schedule"]["transport"],
    }
    schedule = said["schedule"]
    names: list[str] = []
    if isinstance(schedule.get("keep"), dict) or isinstance(schedule.get("order"), dict):
        names = [unit.name for unit in fsdp.make_layout(params, fsdp.Spec(mesh, **common)).units]
    return fsdp.Spec(mesh, **common, schedule=schedule_of(schedule, names))


def rate(said: Settings, label: str, steps: int) -> float:
    """The learning rate of a label at a count of steps."""
    lr: float = said["lr"] * (0.5 if said.get("by_label") == "lr" and label == "slow" else 1.0)
    return lr / (1 + steps) if said.get("falls") else lr


def decay(said: Settings, label: str) -> float:
    """The weight decay of a label."""
    return 0.0 if said.get("by_label") == "decay" and label == "still" else float(said["decay"])


def optimizer_of(said: Settings) -> Any:
    """The package's optimizer."""

    def falling(start: float) -> Any:
        return (lambda count: start / (1 + count.double())) if said.get("falls") else start

    lr: Any = falling(said["lr"])
    if said.get("by_label") == "lr":
        lr = {"slow": falling(said["lr"] * 0.5), "default": lr}
    weight_decay: Any = {"still": 0.0, "default": said["decay"]} if said.get("by_label") == "decay" else said["decay"]
    kind = said["kind"]
    if kind == "adamw":
        return fsdp.adamw(lr=lr, weight_decay=weight_decay)
    if kind == "pure":

        def update(grads: Any, opt: Any, main: Any, count: torch.Tensor) -> Any:
            return torch.utils._pytree.tree_map(lambda p, g: p - said["lr"] * g, main, grads), opt

        return fsdp.Optimizer(lambda main: (), update)
    return fsdp.sgd(
        lr=lr, weight_decay=weight_decay, momentum=0.0 if kind == "sgd" else 0.5, nesterov=kind == "nesterov"
    )
