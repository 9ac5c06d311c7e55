"""Where a State comes from: `shard` takes a pytree of whole parameters and keeps this rank's slices of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from ._entry import outside_inference
from ._errors import SpecError, TreeError
from ._flat import FlatBuffer, make_room
from ._layout import Layout, LeafInfo, plan_layout
from ._optim import as_optimizer
from ._route import states_of
from ._runtime import Runtime, runtime_of
from ._spec import FLOATS, Spec
from ._state import Ledger, State, Token
from ._transport import settled
from ._tree import flatten
from ._weights import keeps_copy, refresh

__all__ = ["build", "describe", "layout", "shard"]

Fetch = Callable[[Any], Any]


def describe(tree: Any) -> tuple[list[LeafInfo], tuple[str, ...], pytree.TreeSpec]:
    """What a layout needs to know of the leaves: tied ones once, with aliases; and the tree's paths and structure.

    Raises:
        TreeError: a leaf that is no tensor, or of a kind that cannot be sharded.
    """
    if isinstance(tree, nn.Module):
        raise TreeError(
            f"the tree of parameters is a module ({type(tree).__name__}). Split it: params, model = "
            f"functionalize(module), then shard(params, spec); or build it as shards: init(make, spec)."
        )
    paths, leaves, treedef = flatten(tree)
    if not paths:
        raise TreeError("the tree of parameters has no leaves.")
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise TreeError(f"two leaves have the path {twice!r}: their keys read alike. Rename one of them.")
    infos: dict[Any, LeafInfo] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(
                f"the leaf {path!r} is a {type(leaf).__name__}; expected a tensor. Keep what is not a parameter out of "
                "the tree."
            )
        if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.is_sparse or leaf.is_quantized or leaf.is_complex():
            raise TreeError(
                f"the leaf {path!r} is a {type(leaf).__name__} of layout {leaf.layout} and dtype {leaf.dtype}; "
                "expected a plain, dense, real "
                f"tensor. Convert it first (a DTensor: .full_tensor())."
            )
        if leaf.dtype is torch.float16:
            raise SpecError(
                f"the leaf {path!r} is float16, which needs loss scaling. Convert it: leaf.bfloat16() or leaf.float()."
            )
        if leaf.dtype.is_floating_point and leaf.dtype not in FLOATS:
            raise SpecError(
                f"the leaf {path!r} is {leaf.dtype}; expected one of {', '.join(map(str, FLOATS))}, or integers."
            )
        key = _identity(leaf, path)
        if key in infos:
            first = infos[key]
            infos[key] = LeafInfo(first.path, first.shape, first.dtype, first.trainable, (*first.aliases, path))
        else:
            trainable = leaf.requires_grad if isinstance(leaf, nn.Parameter) else True
            infos[key] = LeafInfo(path, tuple(leaf.shape), leaf.dtype, trainable)
    return list(infos.values()), paths, treedef


def _identity(leaf: torch.Tensor, path: str) -> Any:
    """Equal for two leaves that are the same tensor, or views of the same bytes in the same way."""
    if leaf.device.type == "meta":
        return id(leaf)
    if not leaf.numel():
        return path
    return (leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)


def layout(params: Any, spec: Spec) -> Layout:
    """The layout that `shard(params, spec)` would use; `params` may be on the meta device. Pure, needs no process
    group.

    >>> print(layout({"w": torch.empty(1000, 1000, device="meta")}, Spec({"data": 1024})).padding() < 0.05)
    True
    """
    infos, paths, _ = describe(params)
    return plan_layout(infos, spec, paths)


@outside_inference
def shard(params: Any, spec: Spec, optimizer: Any = None, *, buffers: Any = (), seed: int = 0) -> State:
    """Shard a pytree of whole parameters: leaves of global shape -> flat shards [n / ranks].

    Args:
        params: a pytree of tensors, the same on every rank (the parameters of `functionalize`, or any dicts, lists,
            ...). They are copied, never changed. The same tensor at two paths is tied: stored once, handed out at both.
        spec: placement, precision, units.
        optimizer: an `(init, update)` pair, as `adamw(lr=3e-4)`; None for inference.
        buffers: tensors by path that ride along (`State.buffers`): `buffers(module)` for what a module has. Copied.
        seed: what `State.rng` starts from.

    Returns:
        a State between steps, on the mesh's device.

    Raises:
        TreeError: a leaf that is no plain tensor; ranks whose trees or values differ, naming the first leaf that does.
        SpecError: whatever is wrong with units, patterns or dtypes.

    Collective: a check that ranks agree (bytes, not weights); an all-gather where a placement keeps a compute copy.

    Example:
        >>> from functional_fsdp import adamw, local_mesh, shard
        >>> state = shard({"w": torch.ones(4, 4)}, Spec(local_mesh()), adamw(lr=1e-3))
        >>> state.units
        ('w',)
    """
    infos, paths, treedef = describe(params)
    _, leaves, _ = flatten(params)
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf.device.type == "meta":
            raise TreeError(
                f"shard: the leaf {path!r} is on the meta device and has no values. Use init(lambda: Model(...), "
                "spec), which materialises one unit at a time."
            )
    spec, plan = settled(spec, infos, paths)
    run = runtime_of(spec.mesh)
    values = {path: leaf.detach() for path, leaf in zip(paths, leaves, strict=True)}
    _agree(
        run,
        [f"{i.path} {i.shape} {i.dtype} {i.aliases}" for i in infos],
        plan.hash,
        "shard: ranks have different trees",
    )
    own = [tuple(a for a in run.sizes if a not in spec.placement_of(i.path, *i.aliases).data) for i in infos]
    _agree(run, _checksums([i.path for i in infos], values), "", "shard: ranks have different values", own)
    return build(plan, spec, optimizer, treedef, lambda unit: values, buffers=_on(run, buffers), seed=seed)


def _on(run: Runtime, tree: Any) -> Any:
    """Copies of the tensors, on the mesh's device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(run.device), tree)


def build(
    plan: Layout, spec: Spec, optimizer: Any, treedef: pytree.TreeSpec, fetch: Fetch, *, buffers: Any, seed: int
) -> State:
    """Assemble a State from a layout; `fetch(unit)` gives the unit's whole leaves by path, one unit at a time."""
    run = runtime_of(spec.mesh)
    optimizer = as_optimizer(optimizer)
    make_room([bucket.nbytes("main") for bucket in plan.buckets.values()], run.device)
    main = {
        name: FlatBuffer(
            torch.zeros(bucket.numel // bucket.slices("main"), dtype=bucket.main, device=run.device),
            bucket,
            states_of(bucket, "main"),
            spec.mesh,
        )
        for name, bucket in plan.buckets.items()
    }
    with torch.no_grad():
        for unit in plan.units:
            values = fetch(unit)
            for bucket in unit.buckets:
                _fill(main[bucket.name], values)
            del values
        weights: dict[str, FlatBuffer] = {}
        for name, bucket in plan.buckets.items():
            if keeps_copy(bucket):
                n = bucket.numel // bucket.slices("weights")
                local = torch.empty(n, dtype=bucket.compute, device=run.device)
                weights[name] = FlatBuffer(local, bucket, states_of(bucket, "weights"), spec.mesh)
                refresh(main[name], weights[name])
        opt = optimizer.init({name: main[name] for name in plan.trainable}) if optimizer else ()
    ledger = Ledger(run, plan, spec)
    ledger.enroll()
    count = torch.zeros((), dtype=torch.int64, device=run.device)
    rng = torch.tensor(seed, dtype=torch.int64)
    static = (spec, plan, optimizer, treedef, Token(ledger, 0))
    return State(main, weights or (), (), opt, buffers, count, rng, (), *static).prepared()


def _fill(buffer: FlatBuffer, values: Any) -> None:
    """Copy what of the leaves lies in this rank's part of a bucket. Never builds the whole bucket."""
    start, stop = buffer.span()
    for leaf in buffer.bucket.leaves:
        a, b = max(leaf.offset, start), min(leaf.offset + leaf.numel, stop)
        if a < b:
            flat = values[leaf.path].detach().reshape(-1)
            buffer.local[a - start : b - start].copy_(flat[a - leaf.offset : b - leaf.offset])


def _checksums(paths: Sequence[str], values: dict[str, torch.Tensor]) -> list[str]:
    """A sum over the bits of each leaf: equal values give equal sums on every rank."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [values[p].reshape(-1).view(views[values[p].element_size()]).sum(dtype=torch.int64).cpu() for p in paths]
    numbers = torch.stack(sums).tolist()
    return [f"{path} checksum {number}" for path, number in zip(paths, numbers, strict=True)]


def _agree(run: Runtime, lines: list[str], extra: str, what: str, own: Sequence[tuple[str, ...]] = ()) -> None:
    """Raise TreeError on every rank, naming the first line that differs, unless all ranks have the same lines.

    own: for each line the mesh axes along which ranks may differ (experts, of which each has its own).
    """
    if run.size == 1:
        return
    digest = (len(lines), hashlib.sha256("\n".join([*lines, extra]).encode()).hexdigest())
    if len(set(run.everyone(digest))) == 1:
        return
    everyone, places = run.everyone(lines), run.everyone(run.coordinate)
    for i in range(max(map(len, everyone))):
        seen: dict[Any, tuple[int, str]] = {}
        for rank, (theirs, at) in enumerate(zip(everyone, places, strict=True)):
            line = theirs[i] if i < len(theirs) else "nothing"
            where = tuple(at[axis] for axis in own[i]) if i < len(own) else ()
            first, expected = seen.setdefault(where, (rank, line))
            if line != expected:
                raise TreeError(
                    f"{what}. The first leaf that differs: rank {run.ranks[first]} has {expected}, rank "
                    f"{run.ranks[rank]} has {line}. Build the same parameters on every rank (seed them alike, or use "
                    "init)."
                )
    if not any(own):
        raise TreeError(f"{what}: the leaves agree, the specs do not. Build the same Spec on every rank.")
