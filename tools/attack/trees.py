"""Random pytrees of leaves: nested, with awkward keys, tied, frozen, empty, without dims, of many dtypes and strides.

A leaf is {"keys": [[container, key], ...], "shape", "dtype", "frozen", "same": index of the leaf that it is tied to,
"form": how it lies in memory}; containers are "d" (dict), "l" (list), "t" (tuple), "o" (OrderedDict). A tree is a list
of leaves, from which `build` makes the nested value.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from random import Random
from typing import Any

import torch

Leaf = dict[str, Any]
NASTY = (
    *("a.b", "a", "w:0", "w", "0", "1", "10", "2", " ", "*", "[x]", "?", "ünï", "x" * 40, "a:1", "None", "a-b"),
    *("blocks", "_", "w:0:1", "a+b", "main", "opt", "__class__", "\n", "%s", "{x}", "\\", "/", ".."),
)
SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (1,), (2,), (3, 5), (7,), (0,), (0, 3), (2, 3, 4), (128,), (127,), (129,), (16, 16), (1, 1)),
    *((255,), (33, 17), (640,), (1023,), (512, 4), (4097,)),
)
DTYPES = ("float32",) * 14 + ("float64",) * 3 + ("bfloat16",) * 3 + ("int64", "int32", "bool", "uint8", "int8")


def draw(rng: Random, world: int) -> list[Leaf]:
    """A random tree."""
    style = rng.choice(("model", "model", "flat", "nested", "nasty"))
    leaves: list[Leaf] = []
    one_dtype = rng.choice(DTYPES[:20]) if rng.random() < 0.6 else ""

    def add(keys: list[list[Any]]) -> None:
        shape = _shape(rng, world)
        dtype = one_dtype if one_dtype and rng.random() < 0.93 else rng.choice(DTYPES)
        form = rng.choice(("plain",) * 6 + ("transposed", "strided", "slice"))
        leaf = {"keys": keys, "shape": list(shape), "dtype": dtype, "frozen": rng.random() < 0.08, "same": None}
        leaves.append({**leaf, "form": form})

    if style == "model":
        for key in rng.sample(("embed", "norm", "head", "scale"), rng.randint(0, 3)):
            add([["d", key]] if rng.random() < 0.5 else [["d", key], ["d", "weight"]])
        kind = rng.choice("lldt")
        parts = rng.sample(("weight", "bias", "norm", "gate"), rng.randint(1, 3))
        for i in range(rng.choice((1, 2, 3, 4, 12)) if kind == "d" else rng.randint(1, 5)):
            for part in parts:
                add([["d", "blocks"], [kind, str(i) if kind == "d" else i], ["d", part]])
    elif style == "flat":
        for i in range(rng.randint(1, 6)):
            add([["d", rng.choice((f"l{i}", f"blocks.{i}.w", f"part.{i}", f"enc.l{i}.weight"))]])
    else:
        keys = NASTY if style == "nasty" else ("a", "b", "c", "w", "0", "weight", "bias")
        for _ in range(rng.randint(1, 7)):
            depth = rng.choice((1, 1, 2, 2, 3))
            path: list[list[Any]] = [[rng.choice("ddo"), rng.choice(keys)] for _ in range(depth)]
            if rng.random() < 0.15:
                path[-1] = ["d", rng.randint(0, 3)]  # an integer key
            add(path)
    _beside(rng, leaves)
    leaves = _possible(leaves)
    if not any(leaf["dtype"] in ("float32", "float64", "bfloat16") and not leaf["frozen"] for leaf in leaves):
        leaves[0] |= {"dtype": "float32", "frozen": False}
    for i in range(1, len(leaves)):
        if rng.random() < 0.06:
            j = rng.randrange(i)
            if leaves[j]["same"] is None and torch.Size(leaves[j]["shape"]).numel():
                leaves[i] |= {"same": j, **{key: leaves[j][key] for key in ("shape", "dtype", "frozen", "form")}}
    return leaves


def _shape(rng: Random, world: int) -> tuple[int, ...]:
    if rng.random() < 0.2:  # about what the ranks' slices are
        return (max(0, 128 * world * rng.randint(1, 3) + rng.randint(-2, 2)),)
    if rng.random() < 0.02:
        return (rng.randint(20_000, 60_000),)
    return rng.choice(SHAPES)


def _beside(rng: Random, leaves: list[Leaf]) -> None:
    """Now and then a leaf with a name that a planner might give to a part of another one."""
    nested = [leaf for leaf in leaves if len(leaf["keys"]) > 1]
    if nested and rng.random() < 0.08:
        top = rng.choice(nested)["keys"][0]
        inside = [leaf for leaf in nested if leaf["keys"][0] == top]
        if len(inside) > 1:
            inside[0]["dtype"], inside[1]["dtype"] = "float32", "bfloat16"
        leaf = {"keys": [["d", f"{top[1]}:{rng.randint(0, 1)}"]], "shape": [3], "dtype": "float32", "frozen": False}
        leaves.append({**leaf, "same": None, "form": "plain"})


def _possible(leaves: list[Leaf]) -> list[Leaf]:
    """Without those whose container and key clash with an earlier leaf's, or that have an earlier leaf's path."""
    kinds: dict[tuple[Any, ...], str] = {}
    taken: set[tuple[Any, ...]] = set()
    kept, paths = [], set()
    for leaf in leaves:
        steps = [(kind, key) for kind, key in leaf["keys"]]
        keys = tuple(key for _, key in steps)
        path = ".".join(map(str, keys))
        above = [keys[:i] for i in range(len(keys))]
        clash = any(kinds.get(place, steps[i][0]) != steps[i][0] for i, place in enumerate(above))
        if clash or path in paths or keys in kinds or any(place in taken for place in above):
            continue
        kinds |= {place: steps[i][0] for i, place in enumerate(above)}
        taken.add(keys)
        paths.add(path)
        kept.append(leaf)
    return kept


# ---------------------------------------------------------------- values


def values(leaf: Leaf, number: int, salt: int = 0) -> torch.Tensor:
    """A leaf's values: multiples of 1/8 below 4, exact in every floating dtype; `salt` makes others."""
    dtype = getattr(torch, leaf["dtype"])
    generator = torch.Generator().manual_seed(zlib.crc32(f"{leaf['keys']} {number} {salt}".encode()))
    whole = torch.randint(-31, 32, leaf["shape"], generator=generator)
    if dtype is torch.bool:
        return whole > 0
    return (whole / 8).to(dtype) if dtype.is_floating_point else whole.abs().to(dtype)


def laid_out(value: torch.Tensor, form: str) -> torch.Tensor:
    """The same values, lying in memory in another way."""
    if form == "transposed" and value.dim() >= 2:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "strided" and value.dim() >= 1:
        wide = value.new_zeros(*value.shape[:-1], 2 * value.shape[-1])
        wide[..., ::2] = value
        return wide[..., ::2]
    if form == "slice":
        wide = value.new_zeros(value.numel() + 3)
        wide[2 : 2 + value.numel()] = value.reshape(-1)
        return wide[2 : 2 + value.numel()].view(value.shape)
    return value


def path_of(leaf: Leaf, leaves: list[Leaf]) -> str:
    """The dotted path of a leaf: keys, and in lists and tuples places."""
    return paths_of(leaves)[leaves.index(leaf)]


def paths_of(leaves: list[Leaf]) -> list[str]:
    """All paths. Lists and tuples are numbered by what is in them, whatever their keys say."""
    orders: dict[tuple[Any, ...], list[Any]] = {}
    found = []
    for leaf in leaves:
        keys, said = [key for _, key in leaf["keys"]], []
        for i, (kind, key) in enumerate(leaf["keys"]):
            order = orders.setdefault(tuple(keys[:i]), [])
            if key not in order:
                order.append(key)
            said.append(str(order.index(key) if kind in "lt" else key))
        found.append(".".join(said))
    return found


def build(leaves: list[Leaf], tensors: list[Any]) -> Any:
    """The nested value with these leaves."""
    return _nest([(leaf["keys"], tensor) for leaf, tensor in zip(leaves, tensors, strict=True)])


def _nest(items: list[tuple[list[Any], Any]]) -> Any:
    if not items[0][0]:
        return items[0][1]
    groups: dict[Any, list[tuple[list[Any], Any]]] = {}
    for keys, value in items:
        groups.setdefault(keys[0][1], []).append((keys[1:], value))
    inside = {key: _nest(group) for key, group in groups.items()}
    kind = items[0][0][0][0]
    if kind in "lt":
        return list(inside.values()) if kind == "l" else tuple(inside.values())
    return OrderedDict(inside) if kind == "o" else inside


def find(tree: Any, leaf: Leaf, leaves: list[Leaf]) -> Any:
    """The value at a leaf's place in a tree of this structure."""
    orders: dict[tuple[Any, ...], list[Any]] = {}
    for other in leaves:
        keys = [key for _, key in other["keys"]]
        for i, key in enumerate(keys):
            order = orders.setdefault(tuple(keys[:i]), [])
            if key not in order:
                order.append(key)
    keys = [key for _, key in leaf["keys"]]
    for i, (kind, key) in enumerate(leaf["keys"]):
        tree = tree[orders[tuple(keys[:i])].index(key) if kind in "lt" else key]
    return tree


def escaped(text: str) -> str:
    """A pattern that matches this text only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
