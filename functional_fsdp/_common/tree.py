"""Pytrees by path: flattening with dotted paths, the one pattern language, and registration with both pytree libraries.

A path is the keys from the root to a leaf, joined by dots: `blocks.0.attn.qkv.weight`. It reads the same for a flat
dict with dotted keys (what `functionalize` returns) and for nested dicts, lists, tuples and dataclasses. Leaves of one
tree that would read the same (`{0: x, "0": y}`) are also spelt out as Python would index them: `0.[0]` and `0.['0']`.

A pattern is a shell glob (`fnmatch`: `*` crosses dots). It matches a leaf when it matches the leaf's path or a leading
part of it, so `blocks.*` covers everything in the blocks, `*norm*` every leaf under anything called norm. A path, or a
leading part of it, always matches itself, whatever characters it has.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase, translate
from functools import cached_property
from typing import Any, TypeVar

import optree

from .errors import TreeError
from .torch_names import pytree

Paths = tuple[str, ...]
SPECIAL = "*?[]"  # what is not literal in a pattern


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Values by key, keys as they first come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _key(entry: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def flatten(tree: Any) -> tuple[Paths, list[Any], pytree.TreeSpec]:
    """The dotted paths, the leaves and the structure of `tree`, in torch's pytree order.

    >>> flatten({"a": [1, 2]})[:2]
    (('a.0', 'a.1'), [1, 2])
    """
    pairs, treedef = pytree.tree_flatten_with_path(tree)
    return dotted([keys for keys, _ in pairs]), [leaf for _, leaf in pairs], treedef


def dotted(keys: list[Any]) -> Paths:
    """Dotted paths; those that several leaves would have are also spelt out, so that patterns still match them. Which
    ones they are does not depend on the order."""
    paths = [".".join(map(_key, one)) for one in keys]
    spelt: set[int] = set()
    while len(paths) > len(set(paths)):
        often = Counter(paths)
        more = {i for i, path in enumerate(paths) if often[path] > 1} - spelt
        if not more:  # keys that Python writes alike
            break
        for i in more:
            paths[i] += f".{pytree.keystr(keys[i])}"
        spelt |= more
    return tuple(paths)


def refuse_surrogates(what: str, names: Iterable[str]) -> None:
    """Raise TreeError for a name that is no Unicode text: neither digests of ranks nor files can have it."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise TreeError(f"{what} is called {name!r}, which is no Unicode text. Give it another name.") from None


def prefixes(path: str) -> Iterable[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    parts = path.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def first_match(rules: Iterable[tuple[str, Any]], paths: Iterable[str]) -> Any:
    """The value of the first rule whose pattern matches any of a leaf's paths, or None."""
    paths = tuple(paths)
    return next((value for pattern, value in rules if any(match(pattern, path) is not None for path in paths)), None)


def match(pattern: str, path: str) -> str | None:
    """The shortest leading part of `path` that `pattern` matches, or None.

    >>> match("blocks.*", "blocks.0.mlp.weight"), match("*.bias", "head.weight")
    ('blocks.0', None)
    """
    return next((prefix for prefix in prefixes(path) if prefix == pattern or fnmatchcase(prefix, pattern)), None)


class PathIndex:
    """Paths that are asked for what many patterns match in them. A pattern costs what it may match: paths that begin
    with the pattern's text up to its first special character, or that end, in a leading part, with its text after the
    last one; all of them only if it has neither.

    >>> PathIndex(["a.0.w", "a.1.w", "b"]).hits("a.*")
    {0: 'a.0', 1: 'a.1'}
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    @cached_property
    def _below(self) -> dict[str, list[int]]:
        """By leading part of a path, which paths begin with it."""
        return grouped((prefix, i) for i, path in enumerate(self.paths) for prefix in prefixes(path))

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._below)

    @cached_property
    def _reversed(self) -> list[str]:
        return sorted(prefix[::-1] for prefix in self._below)

    def hits(self, pattern: str) -> dict[int, str]:
        """By number of a path, in order, the shortest leading part of it that the pattern matches."""
        if pattern == "*":
            return {i: path.partition(".")[0] for i, path in enumerate(self.paths)}
        found: dict[int, str] = {}
        for prefix in sorted(self._matching(pattern), key=len):
            for i in self._below[prefix]:
                found.setdefault(i, prefix)
        return dict(sorted(found.items()))

    def _matching(self, pattern: str) -> set[str]:
        """The leading parts that a pattern matches."""
        itself = {pattern} if pattern in self._below else set()
        marks = [i for i, letter in enumerate(pattern) if letter in SPECIAL]
        if not marks:
            return itself
        head, tail = pattern[: marks[0]], pattern[marks[-1] + 1 :]
        if len(head) >= len(tail):
            some = _beginning(self._sorted, head)
        else:
            some = [prefix[::-1] for prefix in _beginning(self._reversed, tail[::-1])]
        matches = re.compile(translate(pattern)).match
        return itself | {prefix for prefix in some if matches(prefix)}

    def any(self, pattern: str) -> bool:
        """Whether a pattern matches any path."""
        return bool(self.paths) if pattern == "*" else bool(self._matching(pattern))

    def first_rules(self, rules: Sequence[tuple[str, Any]]) -> list[int | None]:
        """For each path the number of the first rule whose pattern matches it."""
        found: list[int | None] = [None] * len(self.paths)
        left = len(found)
        for number, (pattern, _) in enumerate(rules):
            for i in self.hits(pattern) if left else ():
                if found[i] is None:
                    found[i] = number
                    left -= 1
        return found


def _beginning(some: list[str], text: str) -> list[str]:
    """Of sorted texts those that begin with this one."""
    first = bisect_left(some, text)
    return some[first : bisect_left(some, True, first, key=lambda one: not one.startswith(text))]


def register(
    cls: type, flatten_fn: Callable[[Any], tuple[tuple[Any, ...], Any]], keys: Paths, unflatten_fn: Callable[..., Any]
) -> None:
    """Register `cls` with optree (global namespace) and with torch.utils._pytree, children named `keys`.

    `flatten_fn(x) -> (children, context)` and `unflatten_fn(context, children) -> x`.
    """

    def with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten_fn(x)
        return [(pytree.GetAttrKey(k), c) for k, c in zip(keys, children, strict=True)], context

    def with_entries(x: Any) -> tuple[tuple[Any, ...], Any, Paths]:
        return (*flatten_fn(x), keys)

    pytree.register_pytree_node(
        cls,
        lambda x: (list(flatten_fn(x)[0]), flatten_fn(x)[1]),
        lambda children, context: unflatten_fn(context, tuple(children)),
        flatten_with_keys_fn=with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    everywhere = getattr(optree.registry, "__GLOBAL_NAMESPACE")
    optree.register_pytree_node(cls, with_entries, unflatten_fn, namespace=everywhere)


def bytes_text(n: float) -> str:
    """Bytes for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Aligned text columns: the first to the left, numbers-like ones to the right."""
    lines = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = [i > 0 and all(line[i][:1].isdigit() or line[i] == "-" for line in lines[1:]) for i in range(len(widths))]

    def draw(line: list[str]) -> str:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([draw(lines[0]), "  ".join("-" * w for w in widths), *map(draw, lines[1:])])
