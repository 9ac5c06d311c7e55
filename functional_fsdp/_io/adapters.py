"""save_adapter: the leaves of an adapter, as PEFT keeps them in a file.

merged, save_merged: the base with an adapter in it, leaf by leaf, without adapters' names.

    W [n, m] ── unpacked, if it is packed ── + B [n, r] · A [r, m] · scale, in float32 ──▶ the base's name

A unit is whole at a time, and the adapter's matrices, which are small.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.calls import alone
from .._common.errors import SpecError, TreeError, as_path, expect
from .._common.tree import flatten
from .._state.state import State
from .._storage import whole_leaves
from .checkpoint import saving
from .folder import sync, write_file
from .formats.hugging_face import CONFIG, in_file, in_merged, parts_of_adapter
from .safetensors import Tensors, file_names, files_of, write_index
from .safetensors_file import DTYPES, create, entries, write_at
from .stream import Named, check_dtype, none_apart, stream

__all__ = ["merged", "save_adapter", "save_merged"]


@alone
@torch.no_grad()
def save_adapter(
    state: State,
    folder: str | os.PathLike[str],
    config: Any = None,
    *,
    adapter: str = "default",
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the leaves of a PEFT adapter to `folder`, as `PeftModel.from_pretrained` reads them. Never consumes it.

    The state is that of a model of `get_peft_model`: its leaves of LoRA, DoRA's vectors, those of embeddings, and
    modules that are saved whole, with their buffers. The base is not written, nor gathered. For weights with the
    adapter in them there is `save_merged`; of adapters that it does not know, PEFT's own, of a base that is not packed:
    `fsdp.as_module(model, state).merge_and_unload()`.

    Args:
        folder: appears when everything is on disk. All ranks must see it.
        config: of the adapter, `model.peft_config["default"]`; or a mapping, for `adapter_config.json`. None: written
            by you.
        adapter: its name in the model.
        dtype: of leaves in the file; None: that of `Precision.main`. Buffers have theirs.

    Returns:
        the folder.

    Memory: on the first rank the adapter, on the host; on the device the adapter's buckets one after another.

    Raises:
        TreeError: the state has no leaf of an adapter of this name. SpecError: a dtype that is not floating, no config;
        a mapping with what JSON has not. FileExistsError: the folder exists.
        StaleStateError: a state in the middle of a step. CheckpointError: ranks name different folders. OSError: what a
        rank met. If one rank raises, all do.

    Collective: every rank calls it; an all-gather for each bucket that has leaves of the adapter.

    Example: `fsdp.save_adapter(state, "tuned", model.peft_config["default"])`.
    """
    with saving("save_adapter", state, folder) as (joint, _, _, path, claim):
        named: dict[str, list[str]] = {}  # of each leaf the names in the file: of a tied one several
        for name, home in zip(state.layout.paths, state.layout.source, strict=True):
            named.setdefault(home, []).extend(one for one in (in_file(name, adapter),) if one)
        held: dict[str, torch.Tensor] = {}

        def begin() -> None:
            state._resting("save_adapter")
            none_apart(state, "save_adapter")
            check_dtype("save_adapter", dtype)
            if not (config is None or isinstance(config, Mapping) or hasattr(config, "save_pretrained")):
                raise SpecError(
                    f"save_adapter(config={config!r}): expected the adapter's config, as model.peft_config['default'], "
                    "or a mapping."
                )
            if not any(named.values()):
                raise TreeError(
                    f"save_adapter: no leaf of the state is of an adapter {adapter!r}; they are called "
                    f"{', '.join([*named][:3])}, ... Make the model by peft.get_peft_model, within init."
                )
            if claim is not None:
                claim.make()

        def write() -> None:
            if claim is None:
                return
            entries = create(
                path / "adapter_model.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in held.items()}
            )
            with open(path / "adapter_model.safetensors", "r+b") as file:
                for name, tensor in held.items():
                    write_at(file.fileno(), entries[name], 0, tensor.reshape(-1))
                os.fsync(file.fileno())
            if isinstance(config, Mapping):
                write_file(path / CONFIG, json.dumps({**config}, indent=2, default=_listed).encode())
            elif config is not None:
                config.save_pretrained(str(path))
            sync(path)
            claim.appear()

        joint(begin, "begin")
        if claim is not None:  # of modules that are saved whole
            for p, own in zip(*flatten(state.buffers)[:2], strict=True):
                held |= {one: own.detach().to("cpu", copy=True).contiguous() for one in (in_file(p, adapter),) if one}
        with state.version.lineage.looking(state):
            for name, buffer in state.main.items():
                wanted = [leaf.path for leaf in state.layout.buckets[name].leaves if named[leaf.path]]
                if wanted:
                    whole = whole_leaves(buffer, dtype)
                    if claim is not None:
                        for p in wanted:
                            held |= dict.fromkeys(named[p], whole[p].to("cpu", copy=True).contiguous())
        joint(write, "tensors")
    return as_path("folder", folder)


def _listed(one: Any) -> Any:
    """Sets, of which PEFT's configs have some, as lists."""
    if isinstance(one, set | frozenset):
        return sorted(one)
    raise SpecError(f"save_adapter: the config has a {type(one).__name__}, which JSON has not.")


class Merge(NamedTuple):
    """How the adapter of a module goes into its weight. a, b: paths of its matrices. scale: of their product.
    magnitude: path of DoRA's vector, or "". flipped: the weight is [inputs, outputs], as of an embedding."""

    a: str
    b: str
    scale: float
    magnitude: str
    flipped: bool


def merged(
    state: State,
    config: Any,
    *,
    adapter: str = "default",
    dtype: torch.dtype | None = None,
    rank: int | None = None,
) -> Iterator[tuple[str, Named]]:
    """The weights with a PEFT adapter in them, unit by unit, whole: W + B · A · scale. The state is not consumed.

    The state is that of a model of `get_peft_model`, or of one with its names: LoRA (and DoRA) of linears and
    embeddings, with `modules_to_save`. Packed bases are unpacked. Names are those of the model without an adapter.

    Args:
        config: of the adapter, `model.peft_config["default"]`, or a mapping, as `adapter_config.json`: `lora_alpha`,
            and where they are used `use_rslora`, `alpha_pattern`, `fan_in_fan_out`. Ranks are those of the matrices.
        adapter: its name in the model.
        dtype: of floating leaves; None: each leaf's own, of a packed one that of `Precision.compute`.
        rank: the only one that gets tensors; others take part, and get empty mappings. None: all ranks do.

    Yields:
        (unit, {name: tensor}), tensors of your own on the mesh's device. Buffers come at the end, as the unit "".

    Memory: a unit, whole, and of its largest leaf two more in float32; the adapter's matrices.

    Raises:
        TreeError: the state has no leaf of an adapter of this name, a matrix without its other one, or one that does
        not fit. SpecError: no `lora_alpha`; an adapter of convolutions, or with biases. Else as `stream`.

    Collective: every rank iterates to the end; an all-gather for each bucket of the adapter, then as `stream`.

    Example: `for unit, named in fsdp.merged(state, model.peft_config["default"], dtype=torch.bfloat16): ...`.
    """
    expect("merged(state)", state, State, "a State", TypeError)._valid("merged")
    check_dtype("merged", dtype)
    none_apart(state, "merged")
    merges = _merges("merged", state, config, adapter)
    units = stream(state, rank=rank)  # which checks it
    return _units(state, merges, adapter, dtype, units)


def _units(
    state: State, merges: Mapping[str, Merge], adapter: str, dtype: torch.dtype | None,
    units: Iterator[tuple[str, Named]],
) -> Iterator[tuple[str, Named]]:  # fmt: skip
    small = _matrices(state, {path for one in merges.values() for path in (one.a, one.b, one.magnitude)})
    for unit, leaves in units:
        found: Named = {}
        for path in [*leaves]:
            leaf, name = leaves.pop(path), in_merged(path, adapter)
            if name is not None:
                if path in merges:
                    leaf = _with_adapter(leaf, merges[path], small)
                found[name] = leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf
        yield unit, found


@alone
@torch.no_grad()
def _matrices(state: State, paths: set[str]) -> Named:
    """The adapter's leaves, whole, on every rank."""
    found: Named = {}
    with state.version.lineage.looking(state):
        state.version.lineage.touched()
        for name, buffer in state.main.items():
            wanted = [leaf.path for leaf in state.layout.buckets[name].leaves if leaf.path in paths]
            if wanted:
                whole = whole_leaves(buffer)
                found |= {path: whole[path].clone() for path in wanted}
    return found


@torch.no_grad()
def _with_adapter(leaf: torch.Tensor, how: Merge, small: Named) -> torch.Tensor:
    """A base's weight with the adapter in it, in its dtype; computed in float32 at least."""
    wide = torch.promote_types(leaf.dtype, torch.float32)
    product = small[how.b].to(wide) @ small[how.a].to(wide)
    whole = leaf.to(wide).add(product.t() if how.flipped else product, alpha=how.scale)
    if how.magnitude:  # DoRA: of each output
        norm = whole.norm(dim=0 if how.flipped else 1, keepdim=True)
        whole = whole * (small[how.magnitude].to(wide).view(norm.shape) / norm)
    return whole.to(leaf.dtype)


def _merges(what: str, state: State, config: Any, adapter: str) -> dict[str, Merge]:
    """By path of a base's weight, how the adapter goes into it."""

    def given(name: str, default: Any) -> Any:
        return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)

    alpha = given("lora_alpha", None)
    if alpha is None:
        raise SpecError(
            f"{what}(config={config!r}): it says no lora_alpha, by which the product is scaled. Give the adapter's "
            "config, as model.peft_config['default'], or a mapping."
        )
    at = state.layout.leaves
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    modules: dict[str, dict[str, str]] = {}
    for path in home:
        if (part := parts_of_adapter(path, adapter)) is not None:
            modules.setdefault(part[0], {})[part[1]] = path
    if not modules and all(in_file(path, adapter) is None for path in home):
        raise TreeError(
            f"{what}: no leaf of the state is of an adapter {adapter!r}; they are called {', '.join([*home][:3])}, ... "
            "Make the model by peft.get_peft_model, within init."
        )
    patterns = given("alpha_pattern", None) or {}
    found = {}
    for module, parts in modules.items():
        kind = "embedding" if any("embedding" in one for one in parts) else "linear"
        names = ("lora_embedding_A", "lora_embedding_B") if kind == "embedding" else ("lora_A.weight", "lora_B.weight")
        other = {*parts} - {*names, "lora_magnitude_vector.weight"}
        base = f"{module}.base_layer.weight"
        if other:
            raise SpecError(
                f"{what}: the adapter of {module!r} has {parts[min(other)]!r}, which is not merged here. Give the "
                "whole model to PEFT: fsdp.as_module(model, state).merge_and_unload()."
            )
        lacks = next((f"{module}.{name}" for name in names if name not in parts), None)
        if lacks is not None or base not in home:
            raise TreeError(
                f"{what}: the adapter of {module!r} has no {lacks or base!r} beside {next(iter(parts.values()))!r}."
            )
        a, b, weight = (tuple(at[home[path]].whole) for path in (parts[names[0]], parts[names[1]], base))
        flipped = kind == "embedding" or bool(given("fan_in_fan_out", False))
        shape = (b[0], a[-1]) if len(a) == len(b) == 2 and b[-1] == a[0] else ()
        magnitude = home[parts["lora_magnitude_vector.weight"]] if "lora_magnitude_vector.weight" in parts else ""
        if (shape[::-1] if flipped else shape) != weight:
            raise TreeError(
                f"{what}: {parts[names[1]]!r} {list(b)} · {parts[names[0]]!r} {list(a)} does not fit {base!r} "
                f"{list(weight)}; expected the matrices of a linear, or of an embedding. Give the whole model to PEFT: "
                "fsdp.as_module(model, state).merge_and_unload()."
            )
        named = module.removeprefix("base_model.model.")
        key = next((one for one in patterns if re.match(rf"(.*\.)?({one})$", named)), None)
        mine = alpha if key is None else patterns[key]
        scale = mine / (sqrt(a[0]) if given("use_rslora", False) else a[0])
        found[home[base]] = Merge(home[parts[names[0]]], home[parts[names[1]]], scale, magnitude, flipped)
    return found


@alone
@torch.no_grad()
def save_merged(
    state: State,
    folder: str | os.PathLike[str],
    config: Any,
    *,
    adapter: str = "default",
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
) -> Path:
    """Write the weights with a PEFT adapter in them to `folder`, as safetensors with an index. Never consumes it.

    What `merged` gives, under the names of the model without an adapter, as `from_pretrained` reads them beside its
    config.

    Args:
        folder: appears when everything is on disk.
        config, adapter, dtype: as of `merged`.
        max_shard_size: bytes of a file at most; a leaf is never cut.

    Returns:
        the folder.

    Memory: as `merged`; on the host of the first rank, which writes, a leaf.

    Raises:
        StaleStateError: a state in the middle of a step. FileExistsError: the folder exists. CheckpointError: ranks
        name different folders. OSError: what the first rank met. And as `merged`. If one rank raises, all do.

    Collective: every rank calls it; as `merged`.

    Example: `fsdp.save_merged(state, "whole", model.peft_config["default"], dtype=torch.bfloat16)`.
    """
    with saving("save_merged", state, folder) as (joint, _, _, path, claim):
        run = joint.run

        def begin() -> list[str]:
            state._resting("save_merged")
            check_dtype("save_merged", dtype)
            none_apart(state, "save_merged")
            files = files_of(_tensors(state, config, adapter, dtype), max_shard_size)
            names = file_names(len(files))
            if claim is not None:
                claim.make()
                for name, some in zip(names, files, strict=True):
                    create(path / name, some)
                if len(files) > 1:
                    write_index(path, names, files)
            return names

        wrong: list[BaseException] = []

        def complete() -> None:
            if wrong:
                raise wrong[0]
            if claim is not None:
                sync(path)
                claim.appear()

        names = joint(begin, "begin")[run.rank]
        for _, named in merged(state, config, adapter=adapter, dtype=dtype, rank=run.ranks[0]):
            try:  # the others gather on
                if claim is not None and not wrong:
                    _write(path, names, named)
            except OSError as error:
                wrong.append(error)
        joint(complete, "tensors")
    return as_path("folder", folder)


def _tensors(state: State, config: Any, adapter: str, dtype: torch.dtype | None) -> Tensors:
    """Dtypes and shapes of what is written."""
    _merges("save_merged", state, config, adapter)
    found: Tensors = {}
    for unit in state.layout.units:
        for bucket in unit.buckets:
            for leaf in bucket.leaves:
                own = bucket.main if leaf.form is None else leaf.form.dtype
                name = in_merged(leaf.path, adapter)
                if name is not None:
                    found[name] = (dtype if dtype is not None and own.is_floating_point else own), leaf.whole
    for path, held in zip(*flatten(state.buffers)[:2], strict=True):
        name = in_merged(path, adapter)
        if name is not None:
            kind = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            found[name] = kind, tuple(held.shape)
    unknown = next(((name, kind) for name, (kind, _) in found.items() if kind not in DTYPES.values()), None)
    if unknown is not None:
        raise SpecError(f"save_merged: {unknown[0]!r} is {unknown[1]}, which safetensors has not. Give dtype=.")
    return found


def _write(path: Path, names: list[str], named: Named) -> None:
    places = {name: place for file in names for name, place in entries(path / file).items() if name in named}
    for file in {place.path for place in places.values()}:
        with open(file, "r+b") as opened:
            for name, tensor in named.items():
                if places[name].path == file:
                    write_at(opened.fileno(), places[name], 0, tensor.to("cpu").contiguous().reshape(-1))
            os.fsync(opened.fileno())
