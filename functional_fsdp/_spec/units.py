"""Units: which leaves are gathered and reduced together. Pure functions of paths, sizes and the spec's patterns.

model.embed.weight          model.embed        the largest part that contains no block
model.blocks.0.attn.qkv     model.blocks.0     the outermost repeated blocks (an integer in the path)
model.blocks.0.mlp.up       model.blocks.0
model.blocks.1.attn.qkv     model.blocks.1
model.stem.0.weight         model.stem         small numbered layers, joined (a convolution and a norm)
model.stem.1.weight         model.stem
model.norm.weight           model.norm         the largest part that contains no block
head.proj.weight            head               the same
head.weight = model.embed   (no unit)          a tied leaf is a unit of its own, called by its first path

What is found so may be a container: `nn.Sequential(backbone, head)`, a list of towers, stages of blocks, blocks whose
names are no numbers. A unit is looked into if it holds more than a third of all bytes, or more than a quarter and no
part beside it has its form. If parts that repeat in it (siblings of one form: the same names of leaves, of as many
dims) hold a third of its bytes or more, the largest leaf aside, it is divided: into the outermost numbered parts in it,
or, where those are little, into the parts that hold modules. What comes of that is looked at in the same way.

0.layers.0.attn.qkv         0.layers.0         a numbered part of a container, as if that were the model
1.weight                    1
features.block1.conv.weight features.block1    a part that holds modules, among others of its form

A unit is called by the part of the tree that it is, by its leaf if that is tied, or as the spec says. Two units never
have one name: where a tied leaf has the name of a part, the part is called `part.*`; a name that the spec chose, and
that the tree has already, is refused.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch.nn as nn

from .._common.errors import SpecError, expect
from .._common.tree import PathIndex, bytes_text, grouped, prefixes
from .settings import describe_settings, opaque_settings

ByName = Callable[[str], str | None]
LARGE, ALONE = 3, 4  # one part in so many of all bytes: a unit of more is looked into; so is one like no other, of more
MOST = 2  # one part in so many of all bytes: of a unit of more that cannot be divided there is a warning
SMALL = 1 << 20  # bytes: not if it is smaller than this
LAYERS = 4  # so many numbered layers of one form count as what repeats, though they hold no modules
NUMBER = re.compile("([0-9]+)")
DEEP = 100  # keys in a path that are looked at for their order


class UnitsBy:
    """`Spec(units=function)`: equal to another one whose function is written the same and closes over the same."""

    __slots__ = ("function", "hidden", "lines")

    def __init__(self, function: ByName) -> None:
        self.function = function
        self.lines = tuple(describe_settings(function))
        self.hidden = tuple(opaque_settings(function, "function"))

    def __call__(self, path: str) -> str | None:
        return self.function(path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnitsBy):
            return NotImplemented
        return self.function is other.function or (self.lines == other.lines and not self.hidden)

    def __hash__(self) -> int:
        return hash(self.lines)

    def __reduce__(self) -> Any:
        return UnitsBy, (self.function,)

    def __fsdp_settings__(self) -> ByName:
        return self.function

    def __repr__(self) -> str:
        hidden = f" (ranks cannot compare {', '.join(self.hidden)})" if self.hidden else ""
        return f"by the {self.lines[0]}{hidden}"


def freeze_units(units: Any) -> Any:
    """What `Spec(units=...)` keeps: lists and mappings of patterns as nested tuples, `(name or None, (pattern, ...))`
    each; a function as `UnitsBy`."""
    if units is None or isinstance(units, UnitsBy):
        return units
    if isinstance(units, str):
        raise SpecError(f"Spec(units={units!r}): expected a list of patterns, as [{units!r}], or a mapping of names.")
    if isinstance(units, type):
        raise SpecError(f"Spec(units={units!r}): expected patterns of paths, not a class. {_remedy(units)}")
    if callable(units):
        return UnitsBy(units)
    expect("Spec(units)", units, Mapping | Iterable, "a list of patterns, as ['blocks.*'], or a mapping of names")
    pairs = [*units.items()] if isinstance(units, Mapping) else [(None, patterns) for patterns in units]
    for _, patterns in pairs:
        several = isinstance(patterns, Iterable) and not isinstance(patterns, str | type)
        for pattern in patterns if several else (patterns,):
            if not isinstance(pattern, str):
                raise SpecError(f"Spec(units): {pattern!r} is no pattern. {_remedy(pattern)}")
    return tuple(
        (name, (p,) if isinstance(p, str) and name is not None else p if isinstance(p, str) else tuple(p))
        for name, p in pairs
    )


def _remedy(pattern: Any) -> str:
    if isinstance(pattern, type) and issubclass(pattern, nn.Module):
        return (
            "Patterns are texts, matched against the paths of leaves. For the modules of a class: "
            f"Spec(units=fsdp.units(model, {pattern.__name__}))."
        )
    return "Patterns are texts, matched against the paths of leaves, as 'blocks.*'."


class Group(NamedTuple):
    """The leaves of a unit, by index. `inside`: what their paths begin with, if they do."""

    name: str
    inside: str
    members: list[int]


class _Owner(NamedTuple):
    """What a unit is, which no other one is: a part of the tree, a tied leaf, or what the spec calls by a name."""

    kind: str  # "part", "leaf" or "name"
    name: str


def find_units(
    paths: Sequence[str],
    nbytes: Sequence[int],
    tied: Sequence[str],
    patterns: Any,
    dims: Sequence[int],
    index: PathIndex | None = None,
) -> list[Group]:
    """Group leaves into units, in order of first appearance. No two have the same name.

    Args:
        paths: the leaves' paths; `nbytes` their sizes; `tied`: those that are units of their own.
        patterns: None, the frozen form of `Spec(units=...)`, or a function from paths to names.
        dims: how many dims each leaf has.
        index: of the paths, and of aliases after them, which patterns may match, too.

    Raises:
        SpecError: a pattern that matches nothing, a leaf that belongs to two units, or a name that the tree has.
    """
    alone = set(tied)
    owner: dict[int, _Owner] = {i: _Owner("leaf", path) for i, path in enumerate(paths) if path in alone}
    free = [i for i in range(len(paths)) if i not in owner]
    above: set[str] = set()  # paths that have a block below them

    def claim(i: int, unit: _Owner, prefix: str) -> None:
        if owner.setdefault(i, unit) != unit:
            raise SpecError(
                f"Spec(units): the leaf {paths[i]!r} is in two units, {owner[i].name!r} and {unit.name!r}. "
                f"A leaf belongs to one unit: make the patterns disjoint."
            )
        above.update(_ancestors(prefix))

    if patterns is None:
        for i, block in _found(paths, nbytes, dims, free).items():
            claim(i, _Owner("part", block), block)
    elif callable(patterns):
        for i in free:
            name = patterns(paths[i])
            if name is not None:
                where = f"Spec(units): what the function gave for the leaf {paths[i]!r}"
                expect(where, name, str, "the name of its unit, or None for what is to be grouped as without it")
                claim(i, _Owner("name", name), paths[i])
    else:
        index = index or PathIndex(paths)
        for name, group in patterns:
            named = "+".join(group) if name is None and isinstance(group, tuple) else name
            for pattern in group if isinstance(group, tuple) else (group,):
                hits = index.hits(pattern)
                if not hits:
                    raise SpecError(
                        f"Spec(units): the pattern {pattern!r} matches nothing. Paths look like "
                        f"{', '.join(paths[:4])}, ..."
                    )
                for i, prefix in hits.items():
                    if i < len(paths) and paths[i] not in alone:
                        claim(i, _Owner("part", prefix) if named is None else _Owner("name", named), prefix)
    blocks = set(owner.values())
    for i in free:
        if i not in owner:
            owner[i] = _Owner("part", _largest_part(paths[i], above))

    found = grouped((owner[i], i) for i in range(len(paths)))
    names = _names(list(found), {unit: paths[members[0]] for unit, members in found.items()})
    groups = [Group(names[unit], unit.name, members) for unit, members in found.items()]
    parts = {names[unit] for unit in found if unit.kind == "part" and unit not in blocks}
    _weigh(groups, nbytes, {names[unit] for unit in blocks if unit.kind != "leaf"}, parts, patterns is None)
    return groups


def _largest_part(path: str, above: Container[str]) -> str:
    """The largest part with a leaf of no block that contains no block. `above`: the paths that have one below them."""
    return next((prefix for prefix in prefixes(path) if prefix not in above), path)


def _found(paths: Sequence[str], nbytes: Sequence[int], dims: Sequence[int], free: Sequence[int]) -> dict[int, str]:
    """For leaves in a block, by index, which one: numbered parts, and what containers are divided into."""
    blocks = _blocks(paths, nbytes, free)
    total = sum(nbytes)
    tree: _Tree | None = None
    seen: set[str] = set()
    while True:
        above = {prefix for block in set(blocks.values()) for prefix in _ancestors(block)}
        members = grouped((blocks[i] if i in blocks else _largest_part(paths[i], above), i) for i in free)
        sizes = {part: sum(nbytes[i] for i in some) for part, some in members.items() if part not in seen}
        large = [part for part, size in sizes.items() if size * ALONE > total and len(members[part]) > 1]
        if not large:
            return blocks
        tree = tree or _Tree(paths, nbytes, dims)
        for part in large:
            seen.add(part)
            if sizes[part] * LARGE > total or not tree.like_another(part):
                inside = _divided(part, paths, nbytes, members[part], tree)
                if inside:
                    blocks = {i: block for i, block in blocks.items() if block != part} | inside


def _divided(
    part: str, paths: Sequence[str], nbytes: Sequence[int], members: Sequence[int], tree: _Tree
) -> dict[int, str]:
    """The blocks in a container, by leaf. None if it is no container."""
    beside = tree.size[part] - max(nbytes[i] for i in members)  # an embedding may outweigh all else
    if 3 * tree.repeated(part) < beside:
        return {}
    depth = part.count(".") + 1
    numbered = _blocks(paths, nbytes, members, depth)
    if 3 * sum(nbytes[i] for i in numbered) >= beside:
        return numbered
    child = {i: ".".join(paths[i].split(".", depth + 1)[: depth + 1]) for i in members}
    return {i: name for i, name in child.items() if name in tree.deep}


class _Tree:
    """What is where below each path: parts, bytes and forms.

    Attributes:
        parts: for each path the paths of the parts in it that hold leaves. size: its bytes.
        form: equal numbers for equal names of leaves, of as many dims. deep: the paths that hold modules.
    """

    def __init__(self, paths: Sequence[str], nbytes: Sequence[int], dims: Sequence[int]) -> None:
        self.size: Counter[str] = Counter()
        below: dict[str, dict[str, int]] = {}  # the leaves in each path itself
        self.parts: dict[str, dict[str, None]] = {"": {}}
        for path, size, dim in zip(paths, nbytes, dims, strict=True):
            above = ""
            for prefix in prefixes(path):
                self.size[prefix] += size
                if prefix not in (path, above):  # a name may be empty, as the root's is
                    self.parts.setdefault(above, {})[prefix] = None
                    above = prefix
            below.setdefault(above, {})[path.rsplit(".", 1)[-1]] = dim
        self.deep = {path for path, parts in self.parts.items() if parts}
        self.whole = sum(nbytes)
        self.form: dict[str, int] = {}
        known: dict[Any, int] = {}
        for path in sorted(self.size, key=lambda path: (not path, -path.count("."))):  # parts first, the root last
            if path in below or path in self.parts:
                inside = [(part.rsplit(".", 1)[-1], self.form[part]) for part in self.parts.get(path, ())]
                form = (*sorted(inside), *sorted(below.get(path, {}).items()))
                self.form[path] = known.setdefault((len(inside), form), len(known))

    def like_another(self, part: str) -> bool:
        """Whether a part beside it has its form."""
        beside = self.parts.get(part.rpartition(".")[0], {})
        return any(other != part and self.form[other] == self.form[part] for other in beside)

    def repeated(self, part: str) -> int:
        """Bytes of what repeats in it: modules, or at least `LAYERS` numbered layers of what is most of the model."""
        found, left = 0, [part]
        layers = MOST * self.size[part] > self.whole
        while left:
            forms = grouped((self.form[inside], inside) for inside in self.parts.get(left.pop(), ()))
            for alike in forms.values():
                numbered = layers and len(alike) >= LAYERS and all(one.rsplit(".", 1)[-1].isdigit() for one in alike)
                if (len(alike) > 1 and alike[0] in self.deep) or numbered:
                    found += sum(self.size[one] for one in alike)
                else:
                    left += alike
        return found


def _blocks(paths: Sequence[str], nbytes: Sequence[int], free: Sequence[int], depth: int = 0) -> dict[int, str]:
    """For leaves below an integer in the path, by index, the block that they are in. depth: keys of the path of a
    container, in which all of these lie; it is none itself.

    A numbered layer that holds its leaves itself (a convolution, a norm) is small beside others where layers differ: it
    joins the largest part above that holds no larger blocks and is no larger itself than the largest block of all.
    """

    def inside(path: str) -> Iterator[str]:
        return islice(prefixes(path), depth, None)

    numbered = {i: next((p for p in inside(paths[i]) if p.rsplit(".", 1)[-1].isdigit()), paths[i]) for i in free}
    blocks = {i: block for i, block in numbered.items() if block != paths[i]}
    size: Counter[str] = Counter()
    for i in free:
        for prefix in inside(paths[i]):
            size[prefix] += nbytes[i]
    named = set(blocks.values())
    deep = {block for i, block in blocks.items() if "." in paths[i][len(block) + 1 :]}  # they hold modules
    around = {prefix for block in deep for prefix in inside(block)}
    layers = Counter(part for block in named - deep for part in inside(block) if part != block)
    largest = max((size[block] for block in named), default=0)
    joins = {part for part, count in layers.items() if count > 1 and part not in around and size[part] <= largest}
    joined = {block: next((part for part in inside(block) if part in joins), block) for block in named}
    return {i: joined[block] for i, block in blocks.items()}


def _names(units: Sequence[_Owner], first: dict[_Owner, str]) -> dict[_Owner, str]:
    """A name for each unit, no two alike. `first`: a leaf of each."""
    taken = {unit.name: unit for unit in units if unit.kind != "part"}
    names: dict[_Owner, str] = {}
    for unit in units:
        other = taken.get(unit.name, unit)
        if other != unit and "name" in (unit.kind, other.kind):
            tree, chosen = (unit, other) if other.kind == "name" else (other, unit)
            why = "which no pattern covers" if tree.kind == "part" else "a tied leaf, which is a unit of its own"
            raise SpecError(
                f"Spec(units): the name {chosen.name!r} is also the unit of {first[tree]!r}, {why}. "
                f"Choose another name for the unit of {first[chosen]!r}."
            )
        names[unit] = unit.name
    for unit in units:
        if unit.kind == "part" and unit.name in taken:  # of a tied leaf
            names[unit] = f"{unit.name}.*"
            while names[unit] in {name for one, name in names.items() if one != unit}:
                names[unit] += "*"
    return names


def _weigh(groups: Sequence[Group], nbytes: Sequence[int], blocks: set[str], parts: set[str], found: bool) -> None:
    """Warn where a block type seems to have been forgotten, and where one unit is most of the model.

    Args:
        blocks: the units that the spec names, or that were found from the paths; `parts`: the others, tied ones aside.
        found: they were found.
    """
    sizes = {group.name: sum(nbytes[i] for i in group.members) for group in groups}
    largest_leaf = {group.name: max(nbytes[i] for i in group.members) for group in groups}
    # what naming a block type could split: not one big leaf, as embeddings and heads are
    could = {unit for unit in sizes if 4 * largest_leaf[unit] < 3 * sizes[unit]}
    rest = {unit: sizes[unit] for unit in sizes if unit in parts and unit in could}
    total = sum(nbytes)
    heavy = [unit for unit in could if MOST * sizes[unit] > total and sizes[unit] >= SMALL]
    most = [unit for unit in heavy if found or unit in rest]
    if most:
        (unit,) = most
        warnings.warn(
            f"The unit {unit!r} has {sizes[unit] / total:.0%} of all bytes ({bytes_text(sizes[unit])} of "
            f"{bytes_text(total)}), which are gathered and reduced at once, as nothing was found that repeats in it. "
            f"Divide it: Spec(units=['{unit}.*', ...]), with a pattern for each kind of block in it, or "
            "Spec(units=fsdp.units(model, Block)); or name it there, if it is to be one unit.",
            stacklevel=3,
        )
    elif blocks and rest and max(rest.values()) > max(sizes[unit] for unit in blocks):
        largest, left = max(blocks, key=lambda unit: sizes[unit]), max(rest, key=lambda unit: rest[unit])
        warnings.warn(
            f"What no block covers ({left!r}, {bytes_text(rest[left])}) outweighs the largest unit, {largest!r} "
            f"({bytes_text(sizes[largest])}). If a block type was forgotten, name it: Spec(units=['blocks.*', ...]); "
            f"if not, name {left!r} there too.",
            stacklevel=3,
        )


def _ancestors(path: str) -> list[str]:
    return list(prefixes(path))[:-1]


def relative_keys(inside: str, paths: Sequence[str]) -> list[str]:
    """The keys of a unit's weights: paths relative to what the unit is, as its module would call them.

    >>> relative_keys("blocks.0", ["blocks.0.attn.weight"]), relative_keys("wpe", ["wpe"])
    (['attn.weight'], ['wpe'])
    """
    if all(path.startswith(inside + ".") for path in paths):
        return [path[len(inside) + 1 :] for path in paths]
    if list(paths) == [inside]:
        return [inside.rsplit(".", 1)[-1]]
    return list(paths)


def in_order_of_use(paths: Sequence[str]) -> list[int]:
    """The paths by index as a forward uses them: as the tree has them, but numbered parts by their numbers where the
    tree has them sorted as texts, as libraries that sort keys leave them.

    >>> [f"h.{i}.w" for i in in_order_of_use(["h.0.w", "h.1.w", "h.10.w", "h.2.w"])]  # which is the third?
    ['h.0.w', 'h.1.w', 'h.3.w', 'h.2.w']
    """
    parts = [path.split(".") for path in paths]
    sorted_tree = list(paths) == sorted(paths)

    def arranged(some: list[int], depth: int) -> list[int]:
        if len(some) < 2 or depth > DEEP:
            return some
        runs = [
            (name, arranged(list(run), depth + 1) if name is not None else list(run))
            for name, run in groupby(some, lambda i: parts[i][depth] if depth < len(parts[i]) else None)
        ]
        series = grouped((tuple(NUMBER.split(name)[::2]), k) for k, (name, _) in enumerate(runs) if name is not None)
        new = list(runs)
        for places in series.values():
            names = [str(runs[k][0]) for k in places]
            by_number = sorted(places, key=lambda k: _numbers(str(runs[k][0])))
            if names == sorted(names) and len(set(names)) == len(names) and (len(names) > 2 or sorted_tree):
                for k, source in zip(places, by_number, strict=True):
                    new[k] = runs[source]
        return [i for _, run in new for i in run]

    return arranged(list(range(len(paths))), 0)


def _numbers(name: str) -> list[tuple[int, str]]:
    """The numbers in a name, for comparisons: 2 before 10."""
    return [(len(digits.lstrip("0")), digits.lstrip("0")) for digits in NUMBER.split(name)[1::2]]
