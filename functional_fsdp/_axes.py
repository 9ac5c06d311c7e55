"""Axes along which a model communicates itself (tensor, sequence, expert parallel): rules, cuts of leaves, DTensors.

    Along, alongs                     the rules of `Spec(own=)`
    Cut, cuts_of, cut_of, join        which part of a whole leaf a rank has
    DTensorForm, by_rules             weights of a module that `parallelize_module` has cut, and the rules for them

`Along`: how a leaf lies along a mesh axis of the model's own (tensor, sequence, expert parallel), as a value.

    Along("tp", 0)                 a slice along dim 0: [n / tp, m] of [n, m]
    Along("tp", 0, parts=3)        of a fused leaf [q; k; v] the rank's slice of each part, end to end
    Along("tp")                    the same on every rank; gradients are the same, too
    Along("tp", grads="sum")       the same on every rank; each rank has a summand of the gradient

Source: slices and equal leaves are what shard_map calls "varying" and "invariant" along an axis (JAX's documentation).

`Cut`: which part of a whole leaf a rank has, along mesh axes of the model's own, and how a layout has it.

whole [12, m], two ranks along "tp", parts (4, 1, 1)          q q q q q q q q | k k | v v
rank 0    [6, m]                                              q q q q         | k   | v
rank 1    [6, m]                                                      q q q q |   k |   v

`DTensorForm`: a weight of a module that `parallelize_module` has cut, from this rank's part of it, and how it lies.

    leaf         DTensor [n, m], Shard(0) on mesh["tp"]      whole in a state's files, [n / tp, m] in its buffers
    placeholder  has the DTensor's `Form`
    forward      the module's own code sees a DTensor again, made from the part that was gathered: nothing is sent
    backward     torch brings the gradient to the leaf's placements, and gives its part

And the rules for axes of the model's own that follow from the placements of such leaves:

    Shard(0) on mesh["tp"]        ("tp", 0)
    Replicate() on mesh["tp"]     "tp": torch has made their gradients the same
    no DTensor                    "tp", where nothing else is said of it

Source: torch's DTensor.from_local, whose gradient has the placements of the forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ._common.calls import provide
from ._common.errors import SpecError, TreeError, expect
from ._common.record import Collective
from ._common.torch_names import func_interpreter
from ._common.tree import PathIndex, first_match
from ._plan.layout import LeafInfo, Lies
from ._runtime.runtime import runtime_of
from ._spec.placement import Placement, zero3
from ._spec.precision import Codec
from ._spec.spec import Spec
from ._state.shard import is_dtensor, local_part
from ._storage import FlatBuffer, leaves_of

RULES = ("equal", "sum")


@dataclass(frozen=True)
class Along:
    """How a leaf lies along a mesh axis along which the model itself communicates, for `Spec(own=)`.

    Args:
        axis: of the mesh; no placement of the leaf averages over it.
        dim: the dim that is cut into one slice for each rank, in order of ranks; None: every rank has all of it.
        parts: of a fused leaf, how many parts lie along the dim, or their relative sizes, as (4, 1, 1) for queries,
            keys and values of grouped attention. Each is cut on its own; a rank has its slices end to end.
        grads: of a leaf that every rank has. "equal": each rank comes to the same gradient, and nothing is sent; in
            debug mode the first step compares them. "sum": each rank has a summand, as of a norm over tokens that are
            cut along the axis: they are added up, whatever `average` says of the data.

    Raises:
        SpecError: a rule that there is not, one for a leaf that is cut, parts of a leaf that is not, or of no size.

    >>> Along("tp", 0, parts=(4, 1, 1))
    Along('tp', 0, parts=(4, 1, 1))
    """

    axis: str
    dim: int | None = None
    parts: int | tuple[int, ...] = 1
    grads: str = "equal"

    def __post_init__(self) -> None:
        expect("Along(parts)", self.parts, (int, Iterable), "a number of parts, or their relative sizes")
        sizes = self.parts if isinstance(self.parts, int) else tuple(self.parts)
        object.__setattr__(self, "parts", sizes)
        if not isinstance(self.axis, str) or not isinstance(self.dim, int | None):
            raise SpecError(f"{self}: expected the name of a mesh axis, and a dim or None.")
        every = (sizes,) if isinstance(sizes, int) else sizes
        if not every or any(not isinstance(n, int) or n < 1 for n in every):
            raise SpecError(f"{self}: expected a number of parts, or their relative sizes, from 1 on.")
        if self.dim is None and sizes != 1:
            raise SpecError(f"{self}: it has parts and no dim, along which they lie. Say which.")
        if self.grads not in RULES:
            raise SpecError(f"{self!r}: expected grads to be one of {', '.join(map(repr, RULES))}.")
        if self.dim is not None and self.grads != "equal":
            raise SpecError(f"{self}: a rule for gradients of a leaf that is cut, of which each rank has its own.")

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative sizes of the parts."""
        return (1,) * self.parts if isinstance(self.parts, int) else self.parts

    def __repr__(self) -> str:
        said = [repr(self.axis)] + ([] if self.dim is None else [repr(self.dim)])
        said += [f"parts={self.parts!r}"] * (self.parts != 1) + [f"grads={self.grads!r}"] * (self.grads != "equal")
        return f"Along({', '.join(said)})"

    def __str__(self) -> str:
        if self.dim is None:
            rule = {"equal": "gradients already equal", "sum": "gradients summed"}
            return f"equal along {self.axis}, {rule[self.grads]}"
        parts = "" if self.parts == 1 else f", each of {self.parts} parts"
        return f"cut along {self.axis} in dim {self.dim}{parts}"


def alongs(pattern: str, value: Any, axes: Mapping[str, int]) -> tuple[Along, ...]:
    """What `Spec(own=)` says of a pattern, as one for each axis: "tp", ("tp", 0), an Along, or a list of these.

    Raises:
        SpecError: something else; an axis that the mesh does not have, or that is there twice.
    """
    some = value if isinstance(value, list) or (isinstance(value, tuple) and not _pair(value)) else [value]
    found = tuple(_one(pattern, one) for one in some)
    names = [one.axis for one in found]
    for name in names:
        if name not in axes:
            raise SpecError(
                f"Spec(own): {pattern!r} names the axis {name!r}, which the mesh does not have. Its axes are "
                f"{', '.join(map(repr, axes))}."
            )
        if names.count(name) > 1:
            raise SpecError(f"Spec(own): {pattern!r} names the axis {name!r} twice. Say once how leaves lie along it.")
    return found


def _pair(value: Iterable[Any]) -> bool:
    return [type(one) for one in value] == [str, int]


def _one(pattern: str, value: Any) -> Along:
    if isinstance(value, Along):
        return value
    if isinstance(value, str):
        return Along(value)
    if isinstance(value, tuple) and _pair(value):
        return Along(*value)
    raise SpecError(
        f"Spec(own): {pattern!r} maps to {value!r}; expected 'tp' for a leaf that is equal along the axis, ('tp', 0) "
        "for one that is cut along dim 0, an Along, or a list of these."
    )


provide("axes", alongs)


class Cut(NamedTuple):
    """A leaf is cut along a mesh axis of so many ranks: of each part along `dim` a rank has a slice.

    sizes: elements of the parts along `dim`, before this cut.
    """

    axis: str
    ranks: int
    dim: int
    sizes: tuple[int, ...]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """(start, count) along `dim` of what a rank has of each part."""
        found, at = [], 0
        for size in self.sizes:
            found.append((at + rank * (size // self.ranks), size // self.ranks))
            at += size
        return found


Cuts = tuple[Cut, ...]


def cuts_of(
    path: str, shape: Sequence[int], alongs: Sequence[Along], sizes: Mapping[str, int]
) -> tuple[Cuts, list[int]]:
    """The cuts of a leaf, and the shape that a rank then has.

    Raises:
        SpecError: no such dim; parts that do not divide.
    """
    local, found = list(shape), []
    for one in alongs:
        if one.dim is None:
            continue
        if not -len(local) <= one.dim < len(local):
            raise SpecError(
                f"Spec(own): {path!r} is {list(shape)} and has no dim {one.dim}, along which {one!r} cuts it. Give one "
                f"of {len(local)} dims."
            )
        dim = one.dim % len(local)
        total, ranks, n = local[dim], sizes[one.axis], sum(one.shares)
        parts = tuple(total // n * share for share in one.shares)
        if total % n or any(part % ranks for part in parts):
            what = f"{list(parts)} elements of its parts" if len(parts) > 1 and not total % n else f"{total} elements"
            raise SpecError(
                f"Spec(own): {path!r} is {list(shape)}, and {one!r} cuts the {what} along dim {dim} for {ranks} ranks, "
                f"which does not divide{f' into parts {one.shares}' if total % n else ''}. Choose another dim or other "
                "parts, or pad the leaf."
            )
        found.append(Cut(one.axis, ranks, dim, parts))
        local[dim] = total // ranks
    return tuple(found), local


def part_shape(whole: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Of a rank's part, from the leaf."""
    shape = list(whole)
    for cut in cuts:
        shape[cut.dim] //= cut.ranks
    return tuple(shape)


def whole_shape(local: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """Of the leaf, from a rank's part."""
    shape = list(local)
    for cut in cuts:
        shape[cut.dim] *= cut.ranks
    return tuple(shape)


def cut_of(whole: torch.Tensor, cuts: Cuts, coordinate: Mapping[str, int]) -> torch.Tensor:
    """A rank's part of a whole leaf: a view, where it is one."""
    for cut in cuts:
        spans = cut.spans(coordinate[cut.axis])
        parts = [whole.narrow(cut.dim, start, count) for start, count in spans]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    return whole


def join(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """What ranks have along one cut, in their order, as it was before the cut."""
    dim, each = cut.dim, [size // cut.ranks for size in cut.sizes]
    by_part = [part.split(each, dim) for part in parts]
    return torch.cat([one[k] for k in range(len(each)) for one in by_part], dim)


Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def boxes(whole: Sequence[int], cuts: Cuts, coordinate: Mapping[str, int]) -> list[Box]:
    """What a rank has, as boxes: where each begins in the whole leaf, where in the rank's part, and its size. Of a leaf
    without elements the first rank has one, so that it is there."""
    zero = (0,) * len(whole)
    if 0 in whole:
        return [] if any(coordinate[cut.axis] for cut in cuts) else [(zero, zero, part_shape(whole, cuts))]
    found: list[Box] = [(zero, zero, tuple(whole))]
    for cut in cuts:
        dim, at, again = cut.dim, 0, []
        for start, count in cut.spans(coordinate[cut.axis]):
            for there, here, size in found:
                a, b = max(start, here[dim]), min(start + count, here[dim] + size[dim])
                if a < b:
                    again.append((
                        _put(there, dim, there[dim] + a - here[dim]), _put(here, dim, at + a - start),
                        _put(size, dim, b - a),
                    ))  # fmt: skip
            at += count
        found = again
    return found


def _put(numbers: tuple[int, ...], i: int, n: int) -> tuple[int, ...]:
    return (*numbers[:i], n, *numbers[i + 1 :])


def lie(
    leaf: LeafInfo, placement: Placement, some: Sequence[Along], packing: Codec | None, spec: Spec
) -> tuple[Placement, Lies, Cuts, tuple[int, ...]]:
    """The placement of a leaf with the axes along which its gradients are added up, how it lies, its cuts, and the
    shape of a rank's part.

    Args:
        some: its rules. packing: the codec in which it is stored, gathered or sent, if there is one.

    Raises:
        SpecError: its placement averages over an axis that a rule names; an axis of the model's own that no rule names;
            a codec.
    """
    if some and packing is not None:
        raise SpecError(
            f"Spec(own): {leaf.path!r} is {some[0]}, and its precision has the codec {packing}, which "
            "does not know of axes of the model's own. Leave one of the two out."
        )
    for one in some:
        if one.axis in placement.data:
            raise SpecError(
                f"Spec(own): {leaf.path!r} is {one}, and its placement, {placement}, averages over {one.axis!r}. Give "
                f"the placement the other axes, or leave the rule out: what is averaged over {one.axis!r} is equal "
                "along it."
            )
    named = {*placement.data, *(one.axis for one in some)}
    lacks = next((axis for axis in spec.own_axes if axis not in named), None)
    if lacks is not None:
        raise SpecError(
            f"Spec(own): nothing says how {leaf.path!r} lies along {lacks!r}, along which other leaves have rules. "
            f"Give it one, as {{'*': {lacks!r}}} at the end for leaves that are equal along it."
        )
    equal = [one for one in some if one.dim is None]
    summed = tuple(one.axis for one in equal if one.grads == "sum")
    if summed:
        placement = replace(placement, data=(*summed, *placement.data))
    lies = Lies(
        tuple(one.axis for one in some if one.dim is not None and spec.axes[one.axis] > 1),
        tuple(one.axis for one in equal if one.grads == "equal"),
        summed,
    )
    cuts, shape = cuts_of(leaf.path, leaf.shape, some, spec.axes)
    return placement, lies, cuts, tuple(shape)


def joined_leaves(buffer: FlatBuffer, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The leaves of a buffer by path, whole, those that are cut joined; see `whole_leaves`, which calls this."""
    bucket = buffer.bucket
    run = runtime_of(buffer.mesh)
    every = buffer.gather(buffer.local.new_empty(bucket.numel, dtype=dtype or buffer.local.dtype))
    for axis in reversed(bucket.cut):
        mine, every = every, every.new_empty(run.sizes[axis] * every.numel())
        run.now(Collective("all_gather", axis, every.numel(), every.dtype, "", "side", bucket.name), every, mine)
    ranks = prod(run.sizes[axis] for axis in bucket.cut)
    parts = [leaves_of(bucket, part) for part in every.view(ranks, bucket.numel)]
    found = {}
    for leaf in bucket.leaves:
        some = [part[leaf.path] for part in parts]
        for cut in reversed(leaf.cuts):
            some = [join(some[at : at + cut.ranks], cut) for at in range(0, len(some), cut.ranks)]
        found[leaf.path] = some[0]
    return found


provide("axes", cuts_of, cut_of, whole_shape, lie)


class DTensorForm(NamedTuple):
    """How a DTensor lies on its mesh, without its values.

    Attributes:
        shape, stride: of the whole leaf. part: the shape that this rank has.
        summed: axes along which each rank's gradient is to stay a summand.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    part: torch.Size
    summed: tuple[str, ...] = ()

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The DTensor of this rank's part, or of the whole leaf, differentiable. A DTensor stays as it is."""
        if is_dtensor(weight):
            return weight
        if func_interpreter() is not None:
            raise TreeError(
                "the model has DTensors, which torch.func does not know (grad, vjp, jvp, vmap). Use T.forward_backward "
                "or, of weights that you have gathered, T.vjp."
            )
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if weight.shape != self.part:
            every: Any = DTensor.from_local(weight, self.mesh, [Replicate()] * len(self.placements), run_check=False)
            return every.redistribute(placements=self.placements)
        how: dict[str, Any] = {"run_check": False, "shape": self.shape, "stride": self.stride}
        if self.summed:
            names = self.mesh.mesh_dim_names
            grads = [Partial() if n in self.summed else p for n, p in zip(names, self.placements, strict=True)]
            if not _takes_grad_placements():
                made: torch.Tensor = _Summed.apply(weight, grads, lambda t: self._replace(summed=())(t))
                return made
            how["grad_placements"] = grads
        return DTensor.from_local(weight, self.mesh, self.placements, **how)


@cache
def _parameters() -> frozenset[str]:
    from torch.distributed.tensor import DTensor

    return frozenset(signature(DTensor.from_local).parameters)


def _takes_grad_placements() -> bool:
    """Whether torch's own from_local says how gradients are to lie, as it does not in torch 2.11."""
    return "grad_placements" in _parameters()


_takes_grad_placements._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Summed(torch.autograd.Function):
    """A part as a DTensor, whose gradient has placements of its own."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, grads: Any, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        ctx.grads = grads
        return made(weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(placements=ctx.grads).to_local(), None, None


def by_rules(form: DTensorForm | None, own: Any, path: str) -> DTensorForm | None:
    """The form of a leaf whose rules, of `Spec.own`, may say that gradients of what is equal are summands."""
    if form is None:
        return None
    summed = [one.axis for one in first_match(own, (path,)) or () if one.grads == "sum"]
    pairs = zip(form.mesh.mesh_dim_names or (), form.placements, strict=False)
    return form._replace(summed=tuple(axis for axis, placed in pairs if placed.is_replicate() and axis in summed))


def dtensor_form(t: Any) -> DTensorForm:
    """The form of a DTensor."""
    return DTensorForm(t.device_mesh, tuple(t.placements), t.shape, t.stride(), local_part(t).shape)


def full_tensor(t: Any) -> Any:
    """A DTensor as a plain tensor, differentiable; anything else itself. Collective, where it is cut or partial."""
    return t.full_tensor() if is_dtensor(t) else t


Own = tuple[Along, ...]


def with_dtensors(spec: Spec, paths: Sequence[str], leaves: Sequence[Any]) -> Spec:
    """The spec with a rule for each leaf that is a DTensor, and for the others along the same axes. A default placement
    leaves these axes out.

    Raises:
        SpecError: a DTensor that is on an axis which the mesh does not have, or on other ranks; that is neither cut
            evenly nor equal along it; of which a rule says something else.
    """
    lie = {path: _lies(spec, path, t) for path, t in zip(paths, leaves, strict=True) if is_dtensor(t)}
    if not lie:
        return spec
    axes = tuple(axis for axis in spec.axes if any(one.axis == axis for own in lie.values() for one in own))
    if spec.placements == (("*", zero3(*spec.axes)),) and not {*axes} & {*spec.own_axes}:
        spec = spec.with_placement(zero3(*(axis for axis in spec.axes if axis not in (*axes, *spec.own_axes))))
    index = PathIndex(paths)
    said = {path: spec.own[n] for path, n in zip(paths, index.first_rules(spec.own), strict=True) if n is not None}
    for path, own in lie.items():
        if path in said:
            lie[path] = _agreed(path, own, *said[path])
    want = {path: said[path][1] for path in said} | lie
    for path in paths:
        if path not in want:
            averaged = spec.placement_of(path).data
            want[path] = tuple(Along(axis) for axis in axes if axis not in averaged)
    rest = (("*", tuple(map(Along, axes))),) if "*" not in dict(spec.own) else ()
    short = tuple(dict.fromkeys((re.sub(r"(?<![^.])\d+(?![^.])", "*", p), own) for p, own in lie.items()))
    exact = tuple((path, own) for path, own in want.items() if path in lie or (own and path not in said))
    few = tuple(rule for rule in short if rest and rule[1] != rest[0][1])
    for rules in (spec.own, (*few, *spec.own, *rest), (*short, *spec.own, *rest), (*exact, *spec.own)):
        found = [() if n is None else rules[n][1] for n in index.first_rules(rules)]
        if found == [*map(want.get, paths)]:
            break
    return spec if rules == spec.own else spec.with_own(rules)


def _lies(spec: Spec, path: str, t: Any) -> Own:
    """How one DTensor lies, as rules."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = t.device_mesh, t.placements
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    said = f"the leaf {path!r} is a DTensor of shape {tuple(t.shape)} by {[*map(str, placements)]} on {mesh}"
    lacks = [name for name in names if name not in spec.axes]
    if lacks:
        raise SpecError(
            f"{said}: the mesh of the spec has no axis {lacks[0]!r}. Its axes are {', '.join(map(repr, spec.axes))}. "
            "Give parallelize_module a slice of the spec's mesh, as mesh['tp']."
        )
    if isinstance(spec.mesh, DeviceMesh):
        ranks = spec.mesh[names].mesh.tolist() if _ordered(names, spec) else None
        if ranks != mesh.mesh.tolist():
            raise SpecError(
                f"{said}: it lies on the ranks {mesh.mesh.tolist()}, and the mesh of the spec has {ranks} along "
                f"{', '.join(map(repr, names))}. Give parallelize_module a slice of the spec's mesh, as mesh['tp']."
            )
    found, shape = [], [*t.shape]
    for name, placed in zip(names, placements, strict=True):
        if type(placed) is Replicate:
            found.append(Along(name))
            continue
        if type(placed) is not Shard:
            raise SpecError(
                f"{said}: along {name!r} it is {placed}; expected Shard or Replicate. Bring it to one of them first: "
                "t.redistribute(placements=[Replicate()])."
            )
        if shape[placed.dim] % spec.axes[name]:
            raise SpecError(
                f"{said}: {shape[placed.dim]} elements along dim {placed.dim} are cut for {spec.axes[name]} ranks "
                f"along {name!r}, which have uneven parts. Pad the leaf, or leave it out of the plan."
            )
        shape[placed.dim] //= spec.axes[name]
        found.append(Along(name, placed.dim))
    return tuple(found)


def _ordered(names: Sequence[str], spec: Spec) -> bool:
    return [axis for axis in spec.axes if axis in names] == [*names]


def _agreed(path: str, own: Own, pattern: str, rules: Own) -> Own:
    """A DTensor's rules, with what a rule of the spec says of its gradients."""
    lies, more = {one.axis: one for one in own}, []
    for rule in rules:
        there = lies.get(rule.axis)
        if there is None:
            more.append(rule)
        elif (there.dim, 1) == (rule.dim, rule.parts):
            lies[rule.axis] = rule
        elif pattern != "*":
            raise SpecError(
                f"Spec(own): {pattern!r} says of {path!r} that it is {rule}, and it is a DTensor that is {there}. "
                "Leave the rule out."
            )
    return (*lies.values(), *more)


provide("axes", with_dtensors)
