"""DTensors: a weight of a module that `parallelize_module` has cut, from this rank's part of it, and how it lies.

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
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from .._common.calls import provide
from .._common.errors import SpecError, TreeError
from .._common.torch_names import func_interpreter
from .._common.tree import PathIndex, first_match
from .._nn.skeleton import is_dtensor, local_part
from .._spec.placement import zero3
from .._spec.spec import Spec
from .along import Along

__all__ = ["DTensorForm", "by_rules", "dtensor_form", "full_tensor", "with_dtensors"]


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


provide("axes", by_rules, dtensor_form, with_dtensors)
