"""Views of buckets by label and by leaf, in lists: what a kernel takes that updates many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._common.torch_names import foreach_add_
from .._runtime.given import Leaves
from .optimizer import Tree

__all__ = ["Group", "Lists", "count_missed", "groups_of"]

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
