"""Settings that users give to optimizers, as a learning rate: one for all leaves, or one for each label; each a number,
or a function of the count.
And views of buckets by label and by leaf, in lists: what a kernel takes that updates many tensors at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch

from .._common.errors import SpecError
from .._common.torch_names import foreach_add_
from .._runtime.given import Leaves
from .optimizer import Tree

__all__ = [
    "Group", "Lists", "Setting", "at", "by_label", "check_settings", "count_missed", "first_of", "fixed",
    "groups_of", "labels_in", "number", "numbers", "pair_of", "tensors",
]  # fmt: skip

Lists = list[list[torch.Tensor]]
Group = tuple[str, torch.dtype]  # a label, and the dtype of main weights: fused kernels take one at a time


def groups_of(given: Leaves, *trees: Tree) -> dict[Group, Lists]:
    """{group: [views of tree 0, views of tree 1, ...]} over all buckets, of leaves that got a gradient; empty views
    left out. The dtype is that of tree 0."""
    groups: dict[Group, Lists] = {}
    for name in trees[0]:
        some = given.get(name)
        for labelled in zip(*(tree[name].by_label(some) for tree in trees), strict=True):
            label, first = labelled[0]
            if first.numel():
                lists = groups.setdefault((label, first.dtype), [[] for _ in trees])
                for views, (_, view) in zip(lists, labelled, strict=True):
                    views.append(view)
    return groups


def count_missed(counts: list[tuple[torch.Tensor, Sequence[bool]]], skip: torch.Tensor | None) -> None:
    """One more step for each leaf that got no gradient in it, unless the step is skipped."""
    edges = [(local, i, j) for local, given in counts for i, j in _runs(given)]
    if edges:
        by: Any = 1 if skip is None else (~skip).to(edges[0][0].dtype)
        foreach_add_([local[i:j] for local, i, j in edges], by)


def _runs(given: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs [i, j) of False."""
    begins = [i for i, on in enumerate(given) if not on and (i == 0 or given[i - 1])]
    ends = [i + 1 for i, on in enumerate(given) if not on and (i + 1 == len(given) or given[i + 1])]
    return [*zip(begins, ends, strict=True)]


R = TypeVar("R")
Number = float | Callable[[torch.Tensor], torch.Tensor]
Setting = Number | Mapping[str, Number]


def by_label(name: str, value: Any, label: str) -> Any:
    """The value for a label, where there are several."""
    if not isinstance(value, Mapping):
        return value
    if label not in value and "default" not in value:
        keys = " or ".join(dict.fromkeys((repr(label), "'default'")))
        raise SpecError(f"{name}={dict(value)}: nothing for the label {label!r}. Add a number under {keys}.")
    return value[label] if label in value else value["default"]


def at(name: str, value: Any, label: str, count: torch.Tensor) -> Any:
    """The number for a label at this step; of a pair both."""
    found = by_label(name, value, label)
    if isinstance(found, tuple):
        return tuple([one(count) if callable(one) else one for one in found])
    return found(count) if callable(found) else found


def first_of(value: Any) -> float:
    """What a number, a tensor or a function of the count is before the first step, found on the host."""
    with torch.device("cpu"):
        return float(value(torch.zeros((), dtype=torch.int64, device="cpu")) if callable(value) else value)


def fixed(rules: R, names: Sequence[str], count: torch.Tensor, labels: Iterable[str]) -> R:
    """The same rules, where settings with these names have what their functions say of this count, by label."""
    found = copy.copy(rules)
    for name in names:
        value = getattr(rules, name)
        each = isinstance(value, Mapping)
        now = {label: at(name, value, label, count) for label in labels} if each else at(name, value, "", count)
        object.__setattr__(found, name, now)  # they are frozen
    return found


def tensors(*found: Any) -> bool:
    """Whether some of these numbers, or of pairs of them, are tensors: what kernels want as numbers, then, they get
    by a wait for the device, or not at all."""
    flat = [one for value in found for one in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(one, torch.Tensor) for one in flat)


def number(where: str, value: Any, below: float = math.inf) -> None:
    """Refuse what is no finite number in [0, below)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        least = "a number in [0, 1)" if below == 1 else "a finite number of at least 0"
        raise SpecError(f"{where} is {value!r}; expected {least}.")


def _changes(value: Any) -> bool:
    """Whether it may be another in each step: a function, or a tensor []."""
    return callable(value) or (isinstance(value, torch.Tensor) and not value.dim())


def numbers(where: str, value: Any) -> None:
    """The same of a setting that may be given by label, and by functions and tensors, which may change."""
    if isinstance(value, Mapping):
        for label, one in value.items():
            numbers(f"{where} for the label {label!r}", one)
    elif not _changes(value):
        number(where, value)


def pair_of(where: str, value: Any) -> Any:
    """Betas as a tuple, or as tuples by label."""
    if isinstance(value, Mapping):
        return {label: pair_of(f"{where} for the label {label!r}", one) for label, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise SpecError(f"{where} is {value!r}; expected a pair of numbers, as (0.9, 0.999).")
    for k, beta in enumerate(value):
        if not _changes(beta):
            number(f"{where}[{k}]", beta, 1)
    return tuple(value)


def check_settings(main: Tree, **settings: Any) -> None:
    """Refuse settings that say nothing for a label, on every rank and before any weight has changed."""
    for label in dict.fromkeys(label for buffer in main.values() for label, _, _ in buffer.bucket.labels):
        for name, value in settings.items():
            by_label(name, value, label)


def labels_in(name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """(setting, labels) of an optimizer's settings that are given by label."""
    for setting, value in settings.items():
        if isinstance(value, Mapping):
            yield f"{name}({setting})", [*value]
