"""specs: a random tree, random settings and a random program, on each rank; everything compared with the oracle."""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

from . import actor, oracle, programs, settings, trees
from .oracle import Oracle
from .verdict import Refused, Verdict, Wrong, documented

Case = dict[str, Any]
MUST_REFUSE = (
    "float16",
    "complex",
    "sparse",
    "number",
    "module",
    "no axis",
    "placement",
    "nothing matches",
)


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"specs:{seed}:{index}")
    world = settings.draw_world(rng, (1, 2, 2, 2, 2, 3, 3, 4, 4, 4))
    mesh = settings.draw_mesh(rng, world)
    case: Case = {"kind": "specs", "world": world, "mesh": mesh, "seed": rng.randint(0, 10**6), "models": []}
    if rng.random() < 0.03:
        case["refuse"] = rng.choice(MUST_REFUSE)
    for _ in range(2 if rng.random() < 0.08 else 1):
        while True:
            leaves = trees.draw(rng, world)
            said = settings.draw(rng, mesh, leaves)
            if _trains(leaves, said):
                break
        model = {"leaves": leaves, "settings": said, "own": rng.random() < 0.7}
        own = any(axis not in rule["data"] for _, rule in said["placement"] for axis, size in mesh if size > 1)
        if said["traced"]:
            model["program"] = [{"op": "traced", "steps": 2}]
            case["patience"] = 60
        else:
            model["program"] = programs.draw(rng, world, said, own)
        case["models"].append(model)
    case["turns"] = rng.randint(0, 99)
    return case


def _trains(leaves: list[dict[str, Any]], said: dict[str, Any]) -> bool:
    """Whether a leaf with elements has gradients."""
    paths = trees.paths_of(leaves)
    for i, leaf in enumerate(leaves):
        if leaf["same"] is not None:
            continue  # one with that which it is tied to
        ruled = oracle.first(said["trainable"], [paths[j] for j, o in enumerate(leaves) if j == i or o["same"] == i])
        if leaf["dtype"] in settings.FLOATS and not leaf["frozen"] and 0 not in leaf["shape"] and ruled is None:
            return True
    return False


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank."""
    mesh = fsdp.local_mesh(**dict(case["mesh"]))
    if "refuse" in case:
        return _must_refuse(case, mesh)
    players = []
    for i, model in enumerate(case["models"]):
        plain = Oracle(model, case["mesh"], case["seed"] + i)
        state = _state(model, plain, mesh, rank)
        if model["program"][0]["op"] == "traced":
            _traced(model, state, plain, rank)
        else:
            player = actor.Actor(model, state, plain, rank, f"{folder}/{i}")
            players.append(player.play(model["program"]))
    rng = Random(case["turns"])
    while players:
        i = rng.randrange(len(players))
        try:
            next(players[i])
        except StopIteration:
            del players[i]
        except fsdp.StaleStateError as error:
            if len(case["models"]) > 1 and "restart of its step" in str(error):  # ranks met for the other state
                raise Refused(error) from error
            raise
    return Verdict("right")


def _tensors(model: dict[str, Any], plain: Oracle, rank: int) -> list[Any]:
    made: list[Any] = []
    for leaf, path in zip(model["leaves"], trees.paths_of(model["leaves"]), strict=True):
        if leaf["same"] is not None:
            made.append(made[leaf["same"]])
            continue
        one = plain.owner[path]
        value = trees.laid_out(one.value[plain.group(one, rank)].to(one.dtype), leaf["form"])
        made.append(nn.Parameter(value, requires_grad=False) if leaf["frozen"] else value)
    return made


def _state(model: dict[str, Any], plain: Oracle, mesh: Any, rank: int) -> fsdp.State:
    params = trees.build(model["leaves"], _tensors(model, plain, rank))
    said = model["settings"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec = settings.spec_of(said, mesh, params)
            return fsdp.shard(params, spec, settings.optimizer_of(said["optimizer"]), seed=said["seed"])
    except Exception as error:
        if documented(error) and not isinstance(error, fsdp.CommError) and _awkward(model):
            raise Refused(error) from error
        raise


def _awkward(model: dict[str, Any]) -> bool:
    """Whether names or settings are such that the package may say no."""
    paths, said = trees.paths_of(model["leaves"]), model["settings"]
    odd = any(not part or not part.replace("_", "").isalnum() for path in paths for part in path.split("."))
    dotted = any("." in str(key) or not isinstance(key, str) for leaf in model["leaves"] for _, key in leaf["keys"])
    starts = [path.rsplit(".", i)[0] for path in paths for i in range(1, path.count(".") + 1)]
    return odd or dotted or said["units"] is not None or any(path in starts for path in paths)


def _traced(model: dict[str, Any], state: fsdp.State, plain: Oracle, rank: int) -> None:
    """Whole steps by T.compile: no votes, no checks inside; weights afterwards."""
    leaves, paths = model["leaves"], trees.paths_of(model["leaves"])
    places = [i for i, path in enumerate(paths) if plain.owner[path].trains]

    def whole_step(state: fsdp.State, given: list[torch.Tensor]) -> tuple[fsdp.State, torch.Tensor]:
        state, tree = fsdp.unshard(state)
        flat = [trees.find(tree, leaf, leaves) for leaf in leaves]
        grads: list[Any] = [None] * len(leaves)
        for i, grad in zip(places, given, strict=True):
            grads[i] = grad.to(flat[i].dtype)
        total = torch.stack([flat[i].double().sum() for i in places]).sum()
        return fsdp.step(fsdp.reduce(state, trees.build(leaves, grads))), total

    step = T.compile(whole_step, "aot_eager")
    for _ in range(model["program"][0]["steps"]):
        given = []
        for i in places:
            given.append(plain.gradient(paths[i], rank, (plain.steps, 0)))
        for other in range(len(plain.ranks)):
            for i in places:
                plain.reduced(paths[i], other, (plain.steps, 0))
        want = sum(float(plain.owner[paths[i]].value[plain.group(plain.owner[paths[i]], rank)].sum()) for i in places)
        state, got = step(state, given)
        if abs(float(got) - want) > 1e-2 * (1 + abs(want)):
            raise Wrong(f"a traced step saw weights that add up to {float(got)}, expected {want}")
        plain.step()
    tree = fsdp.full_params(state)
    for leaf, path in zip(leaves, paths, strict=True):
        plain.expect(path, rank, trees.find(tree, leaf, leaves), "main", "full_params after traced steps")


def _must_refuse(case: Case, mesh: Any) -> Verdict:
    what, params = case["refuse"], {"a": torch.ones(3), "b": {"c": torch.ones(2, 2)}}
    rules: Any = None
    axes = tuple(dict(case["mesh"]))
    try:
        if what in ("float16", "complex", "sparse", "number"):
            other = {"float16": torch.ones(2).half(), "complex": torch.ones(2) * 1j, "number": 2.0}
            params["x"] = torch.ones(2, 2).to_sparse() if what == "sparse" else other[what]
        elif what == "module":
            params = nn.Linear(2, 2)  # type: ignore[assignment]
        elif what == "no axis":
            rules = fsdp.zero3("elsewhere")
        elif what == "placement":
            rules = fsdp.Placement(weights=axes, grads=(), main=axes)
        else:
            rules = {"nobody": fsdp.ddp(*axes), "*": fsdp.zero3(*axes)}
        fsdp.shard(params, fsdp.Spec(mesh, rules), fsdp.sgd())
    except fsdp.FsdpError as error:
        return Verdict("refused", f"{type(error).__name__}: {str(error)[:200]}")
    return Verdict("accepted", f"shard of something that it must refuse: {what}", clean=False)


def without(case: Case, names: list[str]) -> Case:
    """The case without features that are known to fail, to see what else does: operations ("replace", "norm") and what
    they may have ("absent", "late", "skip")."""
    for model in case["models"]:
        ops = [op for op in model["program"] if op["op"] not in names]
        model["program"] = [{key: value for key, value in op.items() if key not in names} for op in ops]
    return case


# ---------------------------------------------------------------- shrinking


def _but_one(leaves: list[dict[str, Any]], k: int) -> list[dict[str, Any]]:
    """Without the leaf at place k, to which none is tied."""
    kept = leaves[:k] + leaves[k + 1 :]
    return [{**leaf, "same": leaf["same"] - 1} if (leaf["same"] or 0) > k else leaf for leaf in kept]


def smaller(case: Case) -> list[Case]:
    """Simpler cases, the boldest first; each is a copy."""
    found: list[Case] = []

    def but(i: int, **changes: Any) -> Case:
        models = [{**model, **changes} if j == i else model for j, model in enumerate(case["models"])]
        return {**case, "models": models}

    if len(case["models"]) > 1:
        found += [{**case, "models": [model]} for model in case["models"]]
    for i, model in enumerate(case["models"]):
        leaves, said, ops = model["leaves"], model["settings"], model["program"]
        for keep in (ops[: len(ops) // 2], *(ops[:k] + ops[k + 1 :] for k in range(len(ops)))):
            if any(op["op"] in ("micro", "traced") for op in keep):
                found.append(but(i, program=keep))
        for k in range(len(leaves)):
            if len(leaves) > 1 and not any(leaf["same"] == k for leaf in leaves):
                found.append(but(i, leaves=_but_one(leaves, k)))
        plain = {
            "precision": [], "units": None, "labels": [], "trainable": [], "average": "mean",
            "placement": said["placement"][-1:], "optimizer": {"kind": "sgd", "lr": 0.25, "decay": 0.0},
        }  # fmt: skip
        for key, value in plain.items():
            if said[key] != value:
                found.append(but(i, settings={**said, key: value}))
        schedule = said["schedule"]
        for key, value in (("keep", None), ("order", None), ("debug", False), ("prefetch", 1)):
            if schedule.get(key, value) != value:
                found.append(but(i, settings={**said, "schedule": {**schedule, key: value}}))
        if schedule["transport"] == "copy_engine":
            found.append(but(i, settings={**said, "schedule": {**schedule, "transport": "collective"}}))
        for k, op in enumerate(ops):
            for key in ("late", "skip", "shuffle", "pairs", "absent"):
                if op.get(key) is not None:
                    found.append(but(i, program=[*ops[:k], {n: v for n, v in op.items() if n != key}, *ops[k + 1 :]]))
        for k, leaf in enumerate(leaves):
            if leaf["form"] != "plain" or leaf["shape"] not in ([3], []):
                small = {**leaf, "form": "plain", "shape": [3]}
                if not any(other["same"] in (k,) for other in leaves) and leaf["same"] is None:
                    found.append(but(i, leaves=[*leaves[:k], small, *leaves[k + 1 :]]))
    return found
