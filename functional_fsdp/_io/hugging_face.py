"""conversions_of: what transformers says of the files of a model, as values.

    registered for Mixtral    WeightRenaming(".block_sparse_moe.", ".mlp.")
                              WeightConverter([".experts.*.w1.weight", ".experts.*.w3.weight"], ".experts.gate_up_proj",
                                              [MergeModulelist(dim=0), Concatenate(dim=1)])
    of a leaf [8, 2 n, m]     Concatenated([Stacked(["....block_sparse_moe.experts.0.w1.weight", ...]),
                                            Stacked(["....block_sparse_moe.experts.0.w3.weight", ...])], dim=1)

transformers goes from names in files to leaves, and back when it saves. Names here are by that way back. What it does
to tensors is followed from the last operation to the first, with the shape that each of them makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn as nn

from .._common.errors import SpecError
from .conversions import Concatenated, Conversion, Sliced, Stacked, Transposed

__all__ = ["conversions_of"]

Shape = tuple[int, ...]


def conversions_of(model: nn.Module) -> dict[str, Conversion]:
    """What `convert=` needs for a model of transformers: {path: which leaves of its released files hold the leaf}.

    Experts of Mixtral are stacked in memory, `gate_up_proj` [experts, 2 n, m], and apart in files, `w1.weight` [n, m].
    Leaves whose names and shapes in files are those in memory are left out.

    Args:
        model: a transformers model, on any device, or its skeleton, as `functionalize` and `init` return it. It is only
            looked at. Files are taken to be as its `save_pretrained` writes them; where older ones hold a leaf
            transposed, say so: `{**fsdp.conversions_of(model), path: fsdp.Transposed(path, 1, 2)}`.

    Returns:
        conversions of parameters and persistent buffers, for `load_weights`, `save_safetensors` and `init`; further
        paths of tied leaves are among them.

    Raises:
        SpecError: no model of transformers, a transformers without such conversions (before 5), or one that Stacked,
            Concatenated, Transposed and Sliced cannot say, as it changes numbers or their order within a row.

    Collective: none.

    Example: `state, model = fsdp.init(make, spec, optimizer, weights="mixtral/", convert=fsdp.conversions_of)`.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError:
        raise SpecError(
            "conversions_of: transformers is not installed. Install it, or write convert= by hand."
        ) from None
    if not isinstance(model, PreTrainedModel):
        raise SpecError(
            f"conversions_of: got a {type(model).__name__}; expected a PreTrainedModel of transformers, or its "
            "skeleton. For another module write convert= by hand."
        )
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming
    except ImportError:
        import transformers

        raise SpecError(
            f"conversions_of: transformers {transformers.__version__} keeps no conversions where they are looked for; "
            "expected 5 or later. Upgrade it, or write convert= by hand."
        ) from None
    said = getattr(model, "_weight_conversions", None)  # of a model that from_pretrained made: what it went by
    if said is None:  # a prefix in files or none: only files say
        said = [
            one for one in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(one, PrefixChange)
        ]
    back = [(one, one.reverse_transform()) for one in reversed(said)]
    renamings = [inverse for _, inverse in back if isinstance(inverse, WeightRenaming)]
    converters = [pair for pair in back if isinstance(pair[1], WeightConverter)]
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters(remove_duplicate=False)}
    kept = {*model.state_dict(keep_vars=True)}
    shapes |= {path: tuple(b.shape) for path, b in model.named_buffers(remove_duplicate=False) if path in kept}

    def in_file(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    found: dict[str, Conversion] = {}
    for path in sorted(shapes, key=_natural):
        said_of: Conversion | None = None
        for converter, inverse in converters:
            name, pattern = inverse.rename_source_key(path)
            if pattern is not None:
                said_of = _Making(
                    model,
                    shapes,
                    in_file,
                    path,
                    name,
                    pattern,
                    inverse.target_patterns,
                    inverse.source_patterns,
                    converter.operations,
                ).all()
                break
        found[path] = in_file(path) if said_of is None else said_of
    return {path: one for path, one in found.items() if one != path}


def _natural(name: str) -> list[Any]:
    """Layers in the order of their numbers, as transformers goes through names."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)]


class _Making(NamedTuple):
    """How transformers makes a leaf in memory.

    Attributes:
        name, pattern: what its way back makes of the leaf's path, and by which of `leaves`.
        files, leaves: patterns of names in files and in memory.
        operations: from files to leaves.
    """

    model: Any
    shapes: dict[str, Shape]
    in_file: Callable[[str], str]
    path: str
    name: str
    pattern: str
    files: list[str]
    leaves: list[str]
    operations: list[Any]

    def all(self) -> Conversion:
        if self.files[0] not in self.name:
            raise self.refused(f"a name {self.name!r} that is not made of {self.files[0]!r}")
        return self.of([*self.operations], self.shapes[self.path], self.files)

    def of(self, operations: list[Any], shape: Shape, patterns: list[str]) -> Conversion:
        """What has this shape after the operations, from files of these patterns."""
        if not operations:
            if len(patterns) != 1 or "*" in patterns[0]:
                raise self.refused(f"several leaves {patterns[0]!r} that nothing puts together")
            return self.in_file(self.name.replace(self.files[0], patterns[0], 1).replace("*", "0"))
        *before, last = operations
        kind = type(last).__name__
        dim = last.dim % len(shape) if isinstance(getattr(last, "dim", None), int) and shape else 0
        if kind == "MergeModulelist" and len(patterns) == 1 and "*" in patterns[0]:
            inner = shape[:dim] + shape[dim + 1 :]
            return Stacked((self.of(before, inner, [one]) for one in _counted(patterns[0], shape[dim])), dim)
        if kind == "Concatenate":
            number = getattr(last, "num_shards_attribute", None)
            if number is not None:
                patterns = _counted(patterns[0], getattr(self.model.config.get_text_config(), number))
            inner = (*shape[:dim], shape[dim] // len(patterns), *shape[dim + 1 :])
            return Concatenated((self.of(before, inner, [one]) for one in patterns), dim)
        if kind == "Transpose":
            i, j = last.dim0 % len(shape), last.dim1 % len(shape)
            if getattr(last, "check_dims", False):  # transposed in some files; those that it writes are not
                return self.of(before, shape, patterns)
            order = [*shape]
            order[i], order[j] = order[j], order[i]
            return Transposed(self.of(before, tuple(order), patterns), i, j)
        if kind in ("Chunk", "Split"):
            sizes = self.sizes(kind, dim, getattr(last, "num_shards_attribute", None))
            index = self.leaves.index(self.pattern)
            inner = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
            return Sliced(self.of(before, inner, patterns), sum(sizes[:index]), sum(sizes), dim)
        raise self.refused(kind)

    def sizes(self, kind: str, dim: int, number: str | None) -> list[int]:
        """Of the leaves in memory that a leaf of the file is cut into, along `dim`."""
        if number is not None:
            raise self.refused(f"{kind} into as many leaves as {number} says")
        own = self.shapes[self.path][dim]
        if kind == "Chunk":
            return [own] * len(self.leaves)
        others = [self.path.replace(self.pattern, other, 1) for other in self.leaves]
        if any(other not in self.shapes for other in others):
            raise self.refused(f"{kind} into {', '.join(others)}, which the model has not all")
        return [self.shapes[other][dim] for other in others]

    def refused(self, what: str) -> SpecError:
        return SpecError(
            f"conversions_of: transformers makes {self.path!r} of {', '.join(self.files)} by {self.operations}; "
            f"expected MergeModulelist, Concatenate, Transpose, Chunk and Split, met {what}. Save the files with "
            "save_pretrained(save_original_format=False), which needs no conversion, or write convert= by hand."
        )


def _counted(pattern: str, count: int) -> list[str]:
    return [pattern.replace("*", str(k), 1) for k in range(count)]
