"""Orbax: checkpoints of flax, nnx and linen, with what optax keeps; arrays are read by tensorstore.

_METADATA                               JSON: of each leaf the keys that lead to it, and what kind of value it is
manifest.ocdbt, d/, ocdbt.process_0/    arrays of zarr in one store, by their keys joined by dots
params.up.kernel/.zarray                or each in a folder of its own
3/default/_METADATA                     of a CheckpointManager: steps, and items in each

Leaves get names and layouts of torch's modules:

kernel [in, out]                        weight [out, in]; with other dims it stays: nothing says what they are
embedding, scale of a norm              weight
mean, var of a norm                     running_mean, running_var
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .._common.errors import CheckpointError
from .contents import Contents, Files, boxes

METADATA = "_METADATA"
ARRAYS = ("jax.Array", "np.ndarray", "scalar")
OPTIMIZERS = {"opt", "optim", "optimizer", "opt_state"}
SLOTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}  # of optax, and of torch.optim.AdamW
ROOTS = ("model", "state", "module")  # what often holds all weights
COLLECTIONS = ("batch_stats", "constants", "buffers")  # of linen, beside "params"
Keys = tuple[str, ...]


class Orbax:
    """A folder that a checkpointer wrote, with several items or one, or that of a CheckpointManager, of which the
    newest step is read."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and bool(_items(path))

    def read(self, path: Path) -> Contents:
        items = _items(path)
        arrays: dict[Keys, Array] = {}
        left: list[str] = []
        for item, folder in items.items():
            before = (item,) if len(items) > 1 else ()
            found, others = _arrays(folder)
            arrays |= {(*before, *keys): one for keys, one in found.items()}
            left += [".".join((*before, *keys)) for keys in others]
        kept = {keys: one for keys, one in arrays.items() if OPTIMIZERS & {*keys[:-1]}}
        slots, counts, read = _adam(path, kept)
        rest = {keys: one for keys, one in arrays.items() if keys not in kept}
        root = _root(path, rest, {leaf for some in slots.values() for leaf in some})
        weights = _below(root, rest)
        buffers: dict[Keys, Array] = {}
        for name in COLLECTIONS if root[-1:] == ("params",) else ():
            buffers |= _below((*root[:-1], name), rest)
        named = _as_torch(path, {**buffers, **weights})
        moments: dict[str, dict[str, Any]] = {}
        steps: dict[str, Any] = {}
        for slot, some in slots.items():
            for keys, (name, one) in _as_torch(path, some).items():
                moments.setdefault(name, {})[slot] = one
                if keys in counts:
                    steps[name] = counts[keys]
        read |= {id(one) for one in (*weights.values(), *buffers.values())}
        left += [".".join(keys) for keys, one in arrays.items() if id(one) not in read]
        hosts = [*next(iter(items.values())).glob("ocdbt.process_*")]
        return Contents(
            "Orbax", dict(named.values()), world=len(hosts) or None,
            buffers=frozenset(named[keys][0] for keys in buffers) or None, moments=moments, steps=steps,
            left=tuple(left),
        )  # fmt: skip


def _items(path: Path) -> dict[str, Path]:
    """Folders with metadata, by the names of items."""
    if (path / METADATA).is_file():
        return {"": path}
    found = {one.name: one for one in sorted(path.iterdir()) if (one / METADATA).is_file()}
    steps = [one for one in path.iterdir() if one.name.isdecimal() and one.is_dir()] if not found else []
    return _items(max(steps, key=lambda one: int(one.name))) if steps else found


def _below(root: Keys, arrays: dict[Keys, Array]) -> dict[Keys, Array]:
    """What lies below some keys, by the further ones; without generators of random numbers."""
    n = len(root)
    return {k[n:]: one for k, one in arrays.items() if k[:n] == root and len(k) > n and "rngs" not in k}


def _root(path: Path, rest: Collection[Keys], leaves: Collection[Keys]) -> Keys:
    """The keys below which the weights lie: those that the optimizer has, or as linen and nnx call them.

    Raises:
        CheckpointError: there are weights twice (averages, say), and no name says which.
    """
    every = dict.fromkeys(keys[:n] for keys in rest for n in range(len(keys)))
    fit = [root for root in every if leaves and all((*root, *leaf) in rest for leaf in leaves)]
    known = [root for root in fit if root[-1:] and root[-1] in ("params", *ROOTS)]
    if len(fit) == 1 or len(known) == 1:
        return fit[0] if len(fit) == 1 else known[0]
    if fit:
        names = " and ".join(repr(".".join(root)) for root in fit[:2])
        raise CheckpointError(f"{path} has weights below {names}, of which the optimizer may be. Save one of them.")
    for keys in rest:
        if "params" in keys[:-1]:
            return keys[: keys.index("params") + 1]
    root: Keys = ()
    while len({keys[len(root)] for keys in rest if len(keys) > len(root) + 1}) == 1:
        following = next(keys for keys in rest if len(keys) > len(root) + 1)[len(root)]
        if following not in ROOTS:
            break
        root = (*root, following)
    return root


Slots = dict[str, dict[Keys, "Array"]]


def _adam(path: Path, kept: dict[Keys, Array]) -> tuple[Slots, dict[Keys, Array], set[int]]:
    """Of what an optimizer keeps the moments, by slot and leaf, the counts of steps, by leaf; and what was read."""
    slots: Slots = {}
    counts: dict[Keys, Array] = {}
    read: set[int] = set()
    for keys, one in kept.items():
        at = next((i for i, key in enumerate(keys[:-1]) if key in SLOTS), None)
        if at is None:
            continue
        leaf, some = keys[at + 1 :], slots.setdefault(SLOTS[keys[at]], {})
        if leaf in some:
            raise CheckpointError(f"{path} has {keys[at]!r} of {'.'.join(leaf)!r} twice.")
        some[leaf] = one
        count = kept.get((*keys[:at], "count"))
        if count is not None:
            counts[leaf] = count
        read |= {id(one), id(count)}
    return slots, counts, read


def _as_torch(path: Path, arrays: dict[Keys, Array]) -> dict[Keys, tuple[str, Array]]:
    """Names and layouts as torch's modules have them.

    Raises:
        CheckpointError: two leaves would have one name.
    """
    beside: dict[Keys, set[str]] = {}
    for keys in arrays:
        beside.setdefault(keys[:-1], set()).add(keys[-1])
    found: dict[Keys, tuple[str, Array]] = {}
    taken: dict[str, Keys] = {}
    for keys, one in arrays.items():
        last, others = keys[-1], beside[keys[:-1]]
        if last == "kernel" and len(one.shape) == 2:
            last, one = "weight", replace(one, turned=True)
        elif last == "embedding" or (last == "scale" and keys[:-1] and others <= {"scale", "bias", "mean", "var"}):
            last = "weight"
        elif last in ("mean", "var") and others >= {"mean", "var"}:
            last = f"running_{last}"
        name = ".".join((*keys[:-1], last))
        if taken.setdefault(name, keys) != keys:
            raise CheckpointError(f"{path}: {'.'.join(keys)!r} and {'.'.join(taken[name])!r} are both {name!r} here.")
        found[keys] = name, one
    return found


# ---------------------------------------------------------------- arrays


@dataclass(frozen=True)
class Array:
    """An array in a store; turned: seen with its dims the other way round."""

    where: str
    store: Any
    dtype: torch.dtype
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.store.shape)
        return shape[::-1] if self.turned else shape

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        found = torch.empty(n, dtype=self.dtype, device="cpu")
        seen, at = self.store.T if self.turned else self.store, 0
        for begin, sizes in boxes(self.shape, first, first + n):
            box = tuple(slice(a, a + size) for a, size in zip(begin, sizes, strict=True))
            try:
                values = seen[box].read(order="C").result()
            except (ValueError, OSError) as error:
                raise CheckpointError(f"{self.where} is damaged: {str(error)[:300]}.") from None
            raw = torch.from_numpy(values.reshape(-1).view("u1")).view(self.dtype)
            found[at : at + raw.numel()] = raw
            at += raw.numel()
        return found


def _arrays(folder: Path) -> tuple[dict[Keys, Array], list[Keys]]:
    """The arrays of an item, open, and keys of what is none."""
    try:
        tensorstore: Any = import_module("tensorstore")
    except ImportError:
        raise CheckpointError(
            f"{folder} is of Orbax, whose arrays are read by tensorstore, which is not here: pip install tensorstore."
        ) from None
    try:
        about = json.loads((folder / METADATA).read_text())
        leaves = [
            (tuple(str(key["key"]) for key in one["key_metadata"]), str(one["value_metadata"]["value_type"]))
            for one in about["tree_metadata"].values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / METADATA} is damaged: {type(error).__name__}: {str(error)[:200]}.") from None
    names = {keys: ".".join(keys) for keys, kind in leaves if kind in ARRAYS}
    driver, in_one = "zarr3" if about.get("use_zarr3") else "zarr", bool(about.get("use_ocdbt"))
    opening = {}
    for keys, name in names.items():
        if not keys or "/" in name or name.startswith("."):
            raise CheckpointError(f"{folder / METADATA} names a leaf {name!r}, which lies elsewhere.")
        store: dict[str, Any] = {"driver": "file", "path": f"{folder.absolute()}/{'' if in_one else f'{name}/'}"}
        if in_one:
            store = {"driver": "ocdbt", "base": store, "path": f"{name}/"}
        spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}  # else what lacks would be zeros
        opening[keys] = tensorstore.open(spec, read=True, open=True)
    found, beside = {}, Counter(keys[:-1] for keys, _ in leaves)
    for keys, one in opening.items():
        where = f"{folder}: {names[keys]!r}"
        try:
            opened = one.result()
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{where} is damaged, or missing: {str(error)[:300]}.") from None
        dtype = getattr(torch, opened.dtype.name, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != opened.dtype.numpy_dtype.itemsize:
            raise CheckpointError(f"{where} is of {opened.dtype.name}, a dtype that torch has not.")
        alone = keys[-1] == "value" and beside[keys[:-1]] == 1 and len(keys) > 1  # as nnx has variables
        found[keys[:-1] if alone else keys] = Array(where, opened, dtype)
    return found, [keys for keys, kind in leaves if kind not in (*ARRAYS, "None", "Dict", "List")]
