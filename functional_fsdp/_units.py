"""Units: which leaves are gathered and reduced together. Pure functions of paths, sizes and the spec's patterns.

model.embed.weight          model.embed        the largest part that contains no block
model.blocks.0.attn.qkv     model.blocks.0     the outermost repeated blocks (an integer in the path)
model.blocks.0.mlp.up       model.blocks.0
model.blocks.1.attn.qkv     model.blocks.1
model.norm.weight           model.norm         the largest part that contains no block
head.proj.weight            head               the same
head.weight = model.embed   (no unit)          a tied leaf is a unit of its own, called by its first path
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch.nn as nn

from ._errors import SpecError
from ._tree import bytes_text, match, prefixes

__all__ = ["find_units", "relative_keys", "units"]


def units(model: nn.Module, *types: type) -> list[str]:
    """The paths of the outermost submodules of `model` that are of one of `types`, for `Spec(units=...)`.

    Raises:
        SpecError: if there is none, naming the types that the model has.

    >>> units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear)
    ['0', '2']
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if path and isinstance(module, types) and not any(path.startswith(f + ".") for f in found):
            found.append(path)
    if not found:
        names = sorted({type(m).__name__ for m in model.modules()})
        wanted = ", ".join(t.__name__ for t in types)
        raise SpecError(f"units(model, {wanted}): the model has no such submodule. It has {', '.join(names)}.")
    return found


def find_units(
    paths: Sequence[str],
    nbytes: Sequence[int],
    tied: Sequence[str],
    patterns: Any,
    where: str = "Spec(units)",
    aliases: Sequence[str] = (),
) -> dict[str, list[int]]:
    """Group leaves into units: `{unit: indices of leaves}`, in order of first appearance.

    Args:
        paths: the leaves' paths; `nbytes` their sizes; `tied`: those that are units of their own.
        patterns: None, or the frozen form of `Spec(units=...)`.

    Raises:
        SpecError: a pattern that matches nothing, or a leaf that belongs to two units.
    """
    owner: dict[int, str] = {}
    above: set[str] = set()  # paths that have a block below them
    free = [i for i, path in enumerate(paths) if path not in tied]

    def claim(i: int, unit: str) -> None:
        if owner.setdefault(i, unit) != unit:
            raise SpecError(
                f"{where}: the leaf {paths[i]!r} is in two units, {owner[i]!r} and {unit!r}. "
                f"A leaf belongs to one unit: make the patterns disjoint."
            )

    if patterns is None:
        for i in free:
            block = next((p for p in prefixes(paths[i]) if p.rsplit(".", 1)[-1].isdigit()), None)
            if block and block != paths[i]:
                claim(i, block)
                above.update(_ancestors(block))
    else:
        for name, group in patterns:
            named = name or ("+".join(group) if isinstance(group, tuple) else None)
            for pattern in group if isinstance(group, tuple) else (group,):
                hits = [(i, match(pattern, paths[i])) for i in range(len(paths))]
                if all(prefix is None for _, prefix in hits) and all(match(pattern, a) is None for a in aliases):
                    raise SpecError(
                        f"{where}: the pattern {pattern!r} matches nothing. Paths look like {', '.join(paths[:4])}, ..."
                    )
                for i, prefix in hits:
                    if prefix is not None and paths[i] not in tied:
                        claim(i, named or prefix)
                        above.update(_ancestors(prefix))
    blocks = set(owner.values())
    for i in free:
        if i in owner:
            continue
        owner[i] = next(prefix for prefix in prefixes(paths[i]) if prefix not in above)
        if owner[i] in {name for name, _ in patterns or ()}:
            raise SpecError(
                f"{where}: the name {owner[i]!r} is also the unit of {paths[i]!r}, which no pattern covers. "
                f"Choose another name for the unit."
            )
    for i, path in enumerate(paths):
        if path in tied:
            owner[i] = path

    found: dict[str, list[int]] = {}
    for i in range(len(paths)):
        found.setdefault(owner[i], []).append(i)
    sizes = {unit: sum(nbytes[i] for i in leaves) for unit, leaves in found.items()}
    largest_leaf = {unit: max(nbytes[i] for i in leaves) for unit, leaves in found.items()}
    rest = {  # what naming a block type could split: not one big leaf, as embeddings and heads are
        unit: size for unit, size in sizes.items()
        if unit not in blocks and unit not in tied and 4 * largest_leaf[unit] < 3 * size
    }  # fmt: skip
    if blocks and rest and max(rest.values()) > max(sizes[unit] for unit in blocks):
        largest, left = max(blocks, key=lambda unit: sizes[unit]), max(rest, key=lambda unit: rest[unit])
        warnings.warn(
            f"What no block covers ({left!r}, {bytes_text(rest[left])}) outweighs the largest unit, {largest!r} "
            f"({bytes_text(sizes[largest])}). If a block type was forgotten, name it: Spec(units=['blocks.*', ...]); "
            f"if not, name {left!r} there too.",
            stacklevel=2,
        )
    return found


def _ancestors(path: str) -> list[str]:
    return list(prefixes(path))[:-1]


def relative_keys(unit: str, paths: Sequence[str]) -> list[str]:
    """The keys of a unit's weights: paths relative to the unit's name, as its module would call them.

    >>> relative_keys("blocks.0", ["blocks.0.attn.weight"]), relative_keys("wpe", ["wpe"])
    (['attn.weight'], ['wpe'])
    """
    if all(path.startswith(unit + ".") for path in paths):
        return [path[len(unit) + 1 :] for path in paths]
    if list(paths) == [unit]:
        return [unit.rsplit(".", 1)[-1]]
    return list(paths)
