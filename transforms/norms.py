"""Norms of gradients, what is not finite among them, and clipping.

Norms and products of trees of FlatBuffers (gradients, main weights): each element once, whatever the placement.

global_norm    state                        one number, of all gradients
norms          state, tree                  one a leaf, or one a unit
dot            state, tree, tree            one number
wire_error     state                        two a leaf, of what gradient wires in a codec owe to it

Gradients that are not finite: found on the device, on every rank alike, and steps that are skipped for them.

Clipping: gradients cut down to a norm, exact over all shards, or to a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, prod
from numbers import Real
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from functional_fsdp import (
    FlatBuffer,
    FsdpError,
    Partial,
    ScheduleError,
    Sharded,
    SpecError,
    State,
    TreeError,
    finish_reductions,
    pmax,
    replace_extras,
)
from functional_fsdp._seams import clear_padding, expect, torch_private
from functional_fsdp.extend import (
    all_reduce,
    by_unit,
    change,
    leaf_shards,
    over_shards,
    ranks_of,
    refuse,
    shards,
    total,
    traced_as,
)

Buffers = Mapping[str, FlatBuffer]  # by bucket


def check_tree(state: State, tree: Any, what: str, names: Iterable[str]) -> None:
    """Raise TreeError unless `tree` has a buffer like that of the main weights for each of these buckets.

    Args:
        what: the function, and what the tree is to it, for errors.
    """
    for name in names:
        want, got = state.main.get(name), tree.get(name) if isinstance(tree, Mapping) else None
        if want is not None and want.local.dtype is torch.uint8 and want.bucket.packed:
            raise TreeError(
                f"{what} has the bucket {name!r}, whose leaves are packed ({want.bucket.leaves[0].path!r}): bytes are "
                "no numbers of theirs. Leave it out: {name: state.main[name] for name in state.layout.trainable}."
            )
        if want is None:
            raise TreeError(f"{what} has the bucket {name!r}; the state has {', '.join(map(repr, state.main))}.")
        if not isinstance(got, FlatBuffer) or got.local.shape != want.local.shape or got.states != want.states:
            text = f"{tuple(got.local.shape)} elements, {got.states}" if isinstance(got, FlatBuffer) else f"{got!r}"
            raise TreeError(
                f"{what} has {text} for the bucket {name!r}; expected {tuple(want.local.shape)} elements, "
                f"{want.states}. Give whole gradients, fsdp.finish_reductions(state).grads, or the `main` of "
                "a state of the same layout."
            )


def widest(*trees: Buffers) -> torch.dtype:
    """The dtype to compute with: float32, or float64 if one of their buffers is."""
    dtype = torch.float32
    for tree in trees:
        for buffer in tree.values():
            dtype = torch.promote_types(dtype, buffer.local.dtype)
    return dtype


@torch.no_grad()
def global_norm(state: State, ord: float = 2) -> tuple[State, torch.Tensor]:
    """The norm of all gradients, a tensor [] (float32, or float64 if they are): shards -> one number.

    Each element is counted once, however it is sharded or replicated; tied leaves are one. Ranks that train apart
    (along an axis that no placement names) have a norm of their own. It does not wait for the device.

    Args:
        ord: 2, Euclidean; 1, the sum of the absolute values; or inf, the largest of them. A NaN makes any of them NaN.

    Raises:
        ScheduleError: the state has no gradients. SpecError: another `ord`.

    Collective: what `finish_reductions` issues; one all-reduce of a few numbers for each axis that shards gradients.

    Example: `state, norm = T.global_norm(state)`.
    """
    _check_ord("global_norm", ord)
    state = finish_reductions(state)
    dtype = widest(state.grads)
    values = {
        axes: _joined(_powers(state, [buffer.local for buffer in buffers], ord, dtype), ord)
        for axes, buffers in shards(state).items()
    }
    if ord == inf:
        return state, torch.stack([*over_shards(state, values, "max").values()]).amax()
    return state, _root(total(state, values), ord)


@torch.no_grad()
def norms(
    state: State, tree: Buffers | None = None, ord: float = 2, *, by: Literal["leaf", "unit"] = "leaf"
) -> tuple[State, dict[str, torch.Tensor]]:
    """The norm of each leaf, or of each unit: `state, {path or unit: tensor []}`. It does not wait for the device.

    Args:
        tree: `{bucket: FlatBuffer}`, sharded as main weights: `state.main`, or what an optimizer keeps for it; it may
            lack buckets. None: the gradients of the state, finished.
        ord: 2, 1 or inf, as for `global_norm`.
        by: "leaf" or "unit".

    Returns:
        the state, and norms in the order of the tree, float32 or wider, the same on every rank. Tied leaves are one,
        under the first of their paths. Where ranks have leaves of their own (experts), a path is those of all ranks
        together.

    Raises:
        ScheduleError: the state has no gradients, and there is no `tree`. TreeError: a tree of another layout,
        sharded otherwise, or with leaves that are packed. SpecError: another `ord` or `by`.

    Collective: one all-reduce for each axis that shards something, of the numbers of all leaves together; without
    `tree` what `finish_reductions` issues.

    Example, a ratio as LAMB takes it:
        >>> state, loss = forward_backward(state, batch)
        >>> state, of_grads = T.norms(state)
        >>> state, of_weights = T.norms(state, state.main)
        >>> ratio = of_weights["head.weight"] / of_grads["head.weight"]
    """
    _check_ord("norms", ord)
    if by not in ("leaf", "unit"):
        raise SpecError(f"norms(by={by!r}): expected 'leaf' or 'unit'.")
    if tree is None:
        state = finish_reductions(state)
        tree = state.grads
    elif not isinstance(tree, Mapping) or not tree:
        raise TreeError(f"norms: the tree is {tree!r:.500}; expected {{bucket: FlatBuffer}}, as state.main.")
    else:
        check_tree(state, tree, "norms: the tree", tree)
    names: dict[Any, list[str]] = {}
    values: dict[Any, torch.Tensor] = {}
    dtype = widest(tree)
    for axes, buffers in shards(state, tree).items():
        parts = [
            (buffer.bucket.unit if by == "unit" else leaf.path, local)
            for buffer in buffers
            for leaf, _, local in leaf_shards(buffer)
        ]
        names[axes] = [name for name, _ in parts]
        values[axes] = _powers(state, [local for _, local in parts], ord, dtype)
    found: dict[str, list[torch.Tensor]] = {}
    for axes, numbers in over_shards(state, values, "max" if ord == inf else "sum").items():
        for name, number in zip(names[axes], numbers.unbind(), strict=True):
            found.setdefault(name, []).append(number)
    order = [unit.name for unit in state.layout.units] if by == "unit" else dict.fromkeys(state.layout.source)
    return state, {name: _root(_joined(torch.stack(found[name]), ord), ord) for name in order if name in found}


@torch.no_grad()
def dot(state: State, a: Buffers, b: Buffers) -> tuple[State, torch.Tensor]:
    """The sum of the products of the elements of two trees, each element once: `state, product`, a tensor [].

    It does not wait for the device. For a moment there is the product of a bucket's shards beside them. What
    `tree_map(torch.randn_like, state.main)` puts between leaves does not count.

    Args:
        a, b: `{bucket: FlatBuffer}`, sharded as main weights: gradients that are whole, `state.main`, what `T.hvp`
            returns. A frozen bucket that only one of them has counts as zero there, as in gradients.

    Returns:
        the state, and the product in float32, or in float64 if one of them is, the same on every rank.

    Raises:
        TreeError: a tree of another layout, sharded otherwise, or with leaves that are packed.

    Collective: one all-reduce of a few numbers for each axis that shards something.

    Example, how the loss changes along the weights:
        >>> state, loss = forward_backward(state, batch)
        >>> state = fsdp.finish_reductions(state)
        >>> state, product = T.dot(state, state.grads, state.main)
    """
    expect("dot(state)", state, State, "a State", TypeError)
    for name, tree in (("a", a), ("b", b)):
        if not isinstance(tree, Mapping):
            raise TreeError(f"dot: {name} is a {type(tree).__name__}; expected {{bucket: FlatBuffer}}, as state.main.")
        check_tree(state, tree, f"dot: {name}", {**state.layout.trainable, **tree})
    both = [name for name in a if name in b]
    dtype = widest(a, b)
    values = {}
    for axes, buffers in shards(state, {name: a[name] for name in both}).items():
        values[axes] = torch.stack([_product(x, b[x.bucket.name], dtype) for x in buffers]).sum()
    return state, total(state, values)


def _product(a: FlatBuffer, b: FlatBuffer, dtype: torch.dtype) -> torch.Tensor:
    """The sum over this rank's elements of leaves: []."""
    each = a.but(a.local.to(dtype).mul(b.local))
    clear_padding([each])
    return each.local.sum()


def _check_ord(what: str, ord: float) -> None:
    if isinstance(ord, bool | torch.Tensor) or ord not in (1, 2, inf):
        raise SpecError(f"{what}(ord={ord!r}): expected 1, 2 or math.inf.")


def _powers(state: State, tensors: Sequence[torch.Tensor], ord: float, dtype: torch.dtype) -> torch.Tensor:
    """Of each tensor the sum of the powers |x| ** ord, or for infinity the largest |x|: [n]. Of empty ones 0."""
    zero = torch.zeros((), dtype=dtype, device=state.count.device)
    found = [zero] * len(tensors)
    alike: dict[torch.dtype, list[int]] = {}  # as one call for many takes them
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            alike.setdefault(tensor.dtype, []).append(i)
    for kind, which in alike.items():
        some = [tensors[i] if kind.is_floating_point else tensors[i].to(dtype) for i in which]
        for i, norm in zip(which, torch_private.foreach_norm(some, ord, dtype=dtype), strict=True):
            found[i] = norm
    stacked = torch.stack(found)
    return stacked.square() if ord == 2 else stacked


def _joined(powers: torch.Tensor, ord: float) -> torch.Tensor:
    """One of several: [n] -> []."""
    return powers.amax() if ord == inf else powers.sum()


def _root(power: torch.Tensor, ord: float) -> torch.Tensor:
    return power.sqrt() if ord == 2 else power


class WireError(NamedTuple):
    """What is left of a leaf's gradients for the next step.

    Attributes:
        bias: float32 [], its mean over elements and ranks.
        norm: float32 [], its Euclidean norm over elements and ranks.
    """

    bias: torch.Tensor
    norm: torch.Tensor


@torch.no_grad()
def wire_error(state: State) -> dict[str, WireError]:
    """The bias and the norm of `state.residual`, by leaf: what packing has lost of gradients so far, and the next step
    adds. It does not wait for the device, nor consume the state.

    Returns:
        {path: (bias, norm)}, of leaves whose precision has `feedback=True`. Along axes that are not packed a rank's
        errors are those of the sum over these. All zero before the first step, and where
        there is one rank, which sends nothing.

    Raises:
        ScheduleError: no leaf has feedback.

    Collective: one all-reduce of two numbers a leaf for each axis of the data. Every rank calls it.

    Example: `print(T.wire_error(state)["blocks.0.up.weight"].norm)`.
    """
    expect("wire_error(state)", state, State, "a State", TypeError)
    if not state.residual:
        raise ScheduleError(
            "wire_error: no leaf of this state keeps what its wire loses. Give its precision a codec and feedback: "
            "Precision(wire=fsdp.fp8_block, feedback=True)."
        )
    shards = [shard for buffer in state.residual.values() for shard in leaf_shards(buffer)]
    found = [torch.stack((x.sum(), x.square().sum())) for x in (shard.local.to(torch.float32) for shard in shards)]
    ranks = torch.ones((), dtype=torch.float32, device=state.count.device)
    *sums, count = all_reduce(state, [*found, ranks], "sum", what="wire errors")
    parts = [_held(buffer, state.spec.axes) for buffer in state.residual.values() for _ in buffer.bucket.leaves]
    each = zip(shards, sums, parts, strict=True)
    return {
        leaf.path: WireError(one[0] * cut / count / max(leaf.numel, 1), (one[1] / same).sqrt())
        for (leaf, _, _), one, (cut, same) in each
    }


def _held(buffer: FlatBuffer, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Among how many ranks a buffer is cut, and how many hold the same."""
    kinds = {axis: placed for axis, placed in buffer.states if placed is not Partial}
    cut = prod(sizes[axis] for axis, placed in kinds.items() if placed is Sharded)
    return cut, prod(sizes[axis] for axis in kinds) // cut


@torch.no_grad()
def any_nonfinite(state: State) -> tuple[State, torch.Tensor]:
    """Whether any gradient of any rank is inf or NaN: a bool tensor [], the same on every rank. No host sync.

    Ranks that train apart (along an axis that no placement names) have an answer of their own.

    Raises:
        ScheduleError: the state has no gradients.

    Collective: as `global_norm`, and of equal leaves along axes of the model's own, too.
    """
    state = finish_reductions(state)
    counts: dict[tuple[str, ...], torch.Tensor] = {}
    own = state.spec.own_axes  # along these ranks ask each other of equal leaves, too: a fault may be one rank's
    for axes, buffers in shards(state).items():
        filled = [buffer.local for buffer in buffers if buffer.local.numel()]
        largest = torch_private.foreach_norm(filled, float("inf")) if filled else []
        flags = torch.stack([*largest, torch.zeros((), device=state.count.device)]).isfinite().logical_not()
        axes = (*axes, *(axis for axis in own if axis not in axes))
        counts[axes] = counts.get(axes, 0.0) + flags.sum().float()
    return state, total(state, counts) > 0


def skip_nonfinite(step: Callable[..., State]) -> Callable[[State], State]:
    """A step that changes nothing when a gradient is not finite, on any rank: no weight, no moment, no count.

    Args:
        step: `fsdp.step`, or a function that takes `skip=` as it does.

    Returns:
        `f(state) -> state`. How many steps were skipped is counted in `state.extras["skipped"]`, an int64 tensor [].

    Nothing waits for the device: it decides there. Ranks that train apart skip steps of their own. What a forward made
    of the buffers stays, as under torch's GradScaler: a BatchNorm that has seen a NaN keeps it.

    Collective: as `any_nonfinite` and `step`.

    Example:
        >>> step = T.skip_nonfinite(fsdp.step)
        >>> state, loss = forward_backward(state, batch)
        >>> state = step(state)
    """

    expect("skip_nonfinite(step)", step, Callable, "a function, as fsdp.step")

    def stepped(state: State) -> State:
        state, bad = any_nonfinite(state)
        extras: Mapping[str, Any] = state.extras
        before = extras.get("skipped")
        zero = torch.zeros((), dtype=torch.int64, device=state.count.device)
        with torch.no_grad():
            skipped = (zero if before is None else before) + bad
        return replace_extras(step(state, skip=bad), skipped=skipped)

    return stepped


class Nonfinite(NamedTuple):
    """Elements of a leaf's gradient that are not finite, and how many: of what `rank` holds, or of what it gave."""

    leaf: str
    unit: str
    rank: int
    elements: int


class NonfiniteError(FsdpError, FloatingPointError):
    """A gradient that is inf or NaN, before it is reduced; or, where `what` says so, what was made of reduced ones.
    `found` says where: the same on every rank."""

    def __init__(self, found: list[Nonfinite], what: str = "") -> None:
        self.found, self.what = found, what
        some = "; ".join(f"rank {n.rank}, unit {n.unit!r}, leaf {n.leaf!r}: {n.elements:,} elements" for n in found[:5])
        if not found:
            some = "no element is, so the norm is too large for its dtype"
        where, first = f"{what}, of the rank that holds it", ""
        if not what:
            where = "before the reduction"
            first = (
                " The first named came first in that rank's backward; if its loss is not finite, look in the forward."
            )
        super().__init__(
            f"gradients are not finite {where}: {some}{' and more' if len(found) > 5 else ''}.{first} The state before "
            "the step is valid."
        )

    def __reduce__(self) -> Any:
        return NonfiniteError, (self.found, self.what)


@torch.no_grad()
def find_nonfinite(state: State, grads: Any = None, unit: str | None = None) -> tuple[State, list[Nonfinite]]:
    """Which gradients are inf or NaN: leaf, unit, and rank. Waits for the device: for debugging.

    Args:
        grads: what is going to be given to `reduce`, and `unit` as there: the rank is the one whose gradient is bad.
            None: the gradients that the state has, reduced; a bad one is bad wherever it went, so the rank is the one
            whose shard it is. In the third way: `T.forward_backward(..., find_nonfinite=True)`.

    Returns:
        the state, and the findings, the same list on every rank.

    Raises:
        ScheduleError: the state has no gradients, and none were given. TreeError: as `reduce`.

    Collective: a gather of the findings on the host, and without `grads` what `finish_reductions` issues.

    Example: `state, found = T.find_nonfinite(state)`.
    """
    if grads is not None:
        watch = NonfiniteWatch(state)
        for name, values in by_unit(state, "find_nonfinite", grads, unit).items():
            watch.look(name, values)
        return state, watch.found()
    state = finish_reductions(state)
    ranks = ranks_of(state)
    mine = []
    for buffer in state.grads.values():
        for leaf, _, local in leaf_shards(buffer):
            count = int(local.isfinite().logical_not().sum()) if local.numel() else 0
            if count:
                mine.append(Nonfinite(leaf.path, buffer.bucket.unit, ranks.rank, count))
    return state, [one for found in ranks.everyone(mine, "elements that are not finite") for one in found]


class NonfiniteWatch:
    """Gradients of this rank's backward, unit by unit: counts stay on the device until `found` asks for them."""

    def __init__(self, state: State) -> None:
        self.layout = state.layout
        self.ranks = ranks_of(state)
        self.counts: list[tuple[str, str, torch.Tensor]] = []  # unit, leaf, elements

    def look(self, unit: str, grads: Sequence[torch.Tensor | None]) -> None:
        """A unit's gradients, as `Unit.paths`, before they are reduced."""
        for path, grad in zip(self.layout.by_name[unit].paths, grads, strict=False):
            if grad is not None and grad.numel():
                self.counts.append((unit, path, grad.detach().isfinite().logical_not().sum()))

    def found(self) -> list[Nonfinite]:
        """What every rank has seen. Collective; waits for the device."""
        counts = [count for *_, count in self.counts]
        numbers = torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []
        rank = self.ranks.rank
        mine = [Nonfinite(leaf, unit, rank, n) for (unit, leaf, _), n in zip(self.counts, numbers, strict=True) if n]
        return [one for found in self.ranks.everyone(mine, "elements that are not finite") for one in found]


@torch.no_grad()
def clip_by_global_norm(
    state: State, max_norm: float | torch.Tensor, ord: float = 2, *, error_if_nonfinite: bool = False
) -> tuple[State, torch.Tensor]:
    """Scale all gradients by min(1, max_norm / norm). Returns the norm before: `state, norm`, as a tensor [].

    The rule is torch.nn.utils.clip_grad_norm_'s (with its 1e-6 beside the norm), over all shards. The gradients are
    changed in place; use the returned state.

    Args:
        ord: 2, 1 or inf, as for `global_norm`.
        error_if_nonfinite: raise `NonfiniteError` on every rank, naming leaves, if the norm is inf or NaN; nothing is
            scaled then, and the state before the step is as good as before. The host reads the norm: it waits for the
            device, at each call. `T.skip_nonfinite` decides on the device.

    Raises:
        SpecError: a `max_norm` that is no number of at least 0 (the value of a tensor [] is not looked at); another
        `ord`. ScheduleError: the state has no gradients; `error_if_nonfinite` in a compiled step. NonfiniteError: see
        there.

    Collective: as `global_norm`.

    Example: `state, norm = T.clip_by_global_norm(state, 1.0)`.
    """
    _limit("clip_by_global_norm", "a norm", max_norm)
    state, norm = global_norm(state, ord)
    if error_if_nonfinite:
        state = _finite(state, norm)

    def scale() -> None:
        by = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for buffers in shards(state).values():
            for dtype, some in _by_dtype(buffers).items():
                torch_private.foreach_mul_(some, by.to(torch.promote_types(torch.float32, dtype)))

    return change(state, "clip_by_global_norm()", scale, max_norm, keeps_zeros=True), norm


def _limit(verb: str, what: str, given: Any) -> None:
    good = not given.dim() if isinstance(given, torch.Tensor) else isinstance(given, Real) and float(given) >= 0
    if not good:
        refuse("SpecError", f"{verb}({given!r}): expected {what} of at least 0.")


def _waits(state: State, norm: torch.Tensor) -> NoReturn:
    refuse(
        "ScheduleError",
        "clip_by_global_norm(error_if_nonfinite=True) reads the norm on the host, which a compiled step cannot. Leave "
        "it out; T.skip_nonfinite(fsdp.step) decides on the device.",
    )


@traced_as(_waits)
def _finite(state: State, norm: torch.Tensor) -> State:
    """Raise NonfiniteError on every rank if this norm of the gradients is inf or NaN on any of them."""
    if alone := [axis for axis in state.spec.axes if axis not in state.spec.data]:  # norms of their own
        state, norm = pmax(state, norm, alone)
    if not norm.isfinite():
        state, found = find_nonfinite(state)
        raise NonfiniteError(found, f"(clip_by_global_norm: their norm is {norm.item()})")
    return state


@torch.no_grad()
def clip_by_value(state: State, max_value: float) -> State:
    """Clamp each element of the gradients to [-max_value, max_value], in place; use the returned state.

    Raises:
        SpecError: a `max_value` that is no number of at least 0. ScheduleError: the state has no gradients.

    Collective: what `finish_reductions` issues.

    Example: `state = T.clip_by_value(state, 0.5)`.
    """
    _limit("clip_by_value", "a value", max_value)
    state = finish_reductions(state)

    def clamp() -> None:
        for buffers in shards(state).values():
            for some in _by_dtype(buffers).values():
                torch_private.foreach_clamp_min_(some, -max_value)
                torch_private.foreach_clamp_max_(some, max_value)

    return change(state, "clip_by_value()", clamp, max_value, keeps_zeros=True)


def _by_dtype(buffers: Iterable[FlatBuffer]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Local tensors apart by dtype, as one call for many takes them; empty ones left out."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.local.numel():
            found.setdefault(buffer.local.dtype, []).append(buffer.local)
    return found
