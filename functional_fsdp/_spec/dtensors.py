"""Rules for axes of the model's own, from the placements of leaves that are DTensors. Pure.

Shard(0) on mesh["tp"]        ("tp", 0)
Replicate() on mesh["tp"]     "tp": torch has made their gradients the same
no DTensor                    "tp", where nothing else is said of it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .._common.errors import SpecError
from .._common.tree import PathIndex
from .._nn.dtensors import is_dtensor
from .along import Along
from .placement import zero3
from .spec import Spec

__all__ = ["with_dtensors"]

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
