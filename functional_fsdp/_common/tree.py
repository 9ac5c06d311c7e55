"""Pytrees by path: flattening with dotted paths, the one pattern language, and registration with both pytree libraries.

A path is the keys from the root to a leaf, joined by dots: `blocks.0.attn.qkv.weight`. It reads the same for a flat
dict with dotted keys (what `functionalize` returns) and for nested dicts, lists, tuples and dataclasses. Leaves of one
tree that would read the same (`{0: x, "0": y}`) are also spelt out as Python would index them: `0.[0]` and `0.['0']`.

A pattern is a shell glob (`fnmatch`: `*` crosses dots). It matches a leaf when it matches the leaf's path or a leading
part of it, so `blocks.*` covers everything in the blocks, `*norm*` every leaf under anything called norm. A path, or a
leading part of it, always matches itself, whatever characters it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import optree

from .torch_names import pytree

__all__ = ["Paths", "bytes_text", "dotted", "first_match", "flatten", "match", "prefixes", "register", "table"]

Paths = tuple[str, ...]


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
