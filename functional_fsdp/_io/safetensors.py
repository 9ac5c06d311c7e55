"""Files of safetensors, as Hugging Face and PEFT have them.

save_safetensors: the weights as Hugging Face's files, each rank writing its runs at their places.

folder/                                  appears by one rename, when everything is on disk
  model-00001-of-00003.safetensors       the first rank writes headers and makes room; then all ranks write
  model.safetensors.index.json           which leaf is in which file

save_adapter: the leaves of an adapter, as PEFT keeps them in a file.

merged, save_merged: the base with an adapter in it, leaf by leaf, without adapters' names.

    W [n, m] ── unpacked, if it is packed ── + B [n, r] · A [r, m] · scale, in float32 ──▶ the base's name

A unit is whole at a time, and the adapter's matrices, which are small.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from math import sqrt
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.calls import alone
from .._common.errors import SpecError, TreeError, as_path, expect
from .._common.tree import flatten
from .._export import looking, whole_leaves
from .._runtime.agreement import Topic, agree
from .._runtime.runtime import runtime_of
from .._state.state import State
from .checkpoint import saving
from .conversions import Conversions, checked, part_of, same_conversions
from .folder import DTYPES, Claim, Entry, check_shared, create, entries, sync, write_at, write_file
from .manifest import buffers_of, parts_of, place_at, refuse_packed
from .pieces import Piece, blocks, pieces
from .stream import Named, check_dtype, none_apart, stream
from .torch_files import CONFIG, in_file, in_merged, parts_of_adapter

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Files = list[Tensors]
Pieces = dict[str, list[Piece]]
Plan = tuple[Pieces, int]  # of each leaf, and how many files


@alone
@torch.no_grad()
def save_safetensors(
    state: State,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5_000_000_000,
    convert: Conversions | None = None,
) -> Path:
    """Write the weights to `folder` as safetensors with an index, as `from_pretrained` reads them. Never consumes it.

    Names are those of the leaves and buffers, or what `convert` says; a tied leaf is written once, by its first path.

    Args:
        folder: appears when everything is on disk. All ranks must see it.
        dtype: of floating leaves in the files; None: that of `Precision.main`.
        max_shard_size: bytes of a file at most; a leaf of the file is never cut.
        convert: {path: which leaves of the file hold the leaf} where that is not one of its name; see `load_weights`.
            With `conversions_of(model)` files are those that save_pretrained writes. Of a transposed leaf a rank writes
            a run for each row of the file.

    Returns:
        the folder.

    Memory: on the host 16 Mi elements a rank, on the device as much for a transposed leaf; nothing is gathered.

    Raises:
        StaleStateError: a state in the middle of a step. SpecError: a dtype that safetensors has not, experts of
            which ranks have their own, a conversion of no leaf, one that does not fit its leaf, several that leave room
            in a leaf of the file, or ranks that were given different ones. FileExistsError: the folder exists.
            CheckpointError: ranks name different folders, or do not see the same. OSError: what a rank met. If one
            rank raises, all do.

    Collective: every rank calls it; exchanges on the host.

    Example: `fsdp.save_safetensors(state, "mixtral-tuned", dtype=torch.bfloat16, convert=fsdp.conversions_of(model))`.
    """
    with saving("save_safetensors", state, folder) as (joint, _, _, path, claim):
        run = joint.run

        def begin() -> tuple[Plan, list[Topic]]:
            state._resting("save_safetensors")
            cuts = checked(convert, (*state.layout.paths, *flatten(state.buffers)[0]))
            parts, tensors = _tensors(state, dtype, cuts)
            files = files_of(tensors, max_shard_size)
            if claim is not None:
                _begin_files(claim, files)
            return (parts, len(files)), [same_conversions(cuts)]

        def write() -> None:
            check_shared("save_safetensors", path, run.ranks, run.rank)
            _write(state, path, *plan)

        def complete() -> None:
            if claim is not None:
                claim.appear()

        plan = agree(joint, "begin", begin)
        joint(write, "weights")
        joint(complete, "end")
    return as_path("folder", folder)


def _tensors(state: State, dtype: torch.dtype | None, convert: Conversions) -> tuple[Pieces, Tensors]:
    """The pieces of each leaf and buffer, and the leaves of the files: in the tree's order, then those of buffers."""
    if dtype is not None and (dtype not in DTYPES.values() or not dtype.is_floating_point):
        raise SpecError(f"save_safetensors(dtype={dtype}): expected a floating dtype that safetensors has, or None.")
    run = runtime_of(state.spec.mesh)
    at = {leaf.path: (leaf, bucket) for bucket in state.layout.buckets.values() for leaf in bucket.leaves}
    leaves: Tensors = {}
    for path in state.layout.paths:
        if path in at:
            leaf, bucket = at[path]
            refuse_packed("save_safetensors", leaf)
            own = [*bucket.unlike(run.sizes)]
            if own:
                raise SpecError(
                    f"save_safetensors: ranks along {own} have {path!r} of their own, and a file has one leaf of a "
                    "name. Save a checkpoint, which has all of them."
                )
            leaves[path] = (dtype if dtype and bucket.main.is_floating_point else bucket.main), leaf.whole
    for path, held in buffers_of(state).items():
        if path in leaves:
            raise SpecError(f"save_safetensors: a parameter and a buffer are both called {path!r}. Rename one of them.")
        leaves[path] = held.dtype, tuple(held.shape)
    parts = {path: pieces(path, shape, convert.get(path, path)) for path, (_, shape) in leaves.items()}
    tensors: Tensors = {}
    owners: dict[str, list[tuple[str, Piece]]] = {}
    for path, some in parts.items():
        for piece in some:
            said = leaves[path][0], piece.shape
            if tensors.setdefault(piece.name, said) != said:
                kind, shape = tensors[piece.name]
                raise SpecError(
                    f"save_safetensors: {piece.name!r} is {kind} {list(shape)} by other leaves and {said[0]} "
                    f"{list(said[1])} by {path!r}. Say of all of them one shape; if their dtypes differ, give dtype=."
                )
            where = owners.setdefault(piece.name, [])
            where += [(path, piece)]
            twice = [other for other, before in where[:-1] if piece.meets(before)]
            if twice:
                raise SpecError(
                    f"save_safetensors: {twice[0]!r} and {path!r} have the same elements of {piece.name!r}. Give each "
                    "leaf a name, or a slice, of its own by convert=."
                )
    for name, (_, shape) in tensors.items():
        filled, whole = sum(piece.numel for _, piece in owners[name]), torch.Size(shape).numel()
        if filled != whole:
            raise SpecError(
                f"save_safetensors: {name!r} has {whole} elements as {list(shape)}, and leaves fill {filled} of them. "
                "Say by convert= which leaves have the others."
            )
    unknown = [(name, kind) for name, (kind, _) in tensors.items() if kind not in DTYPES.values()]
    if unknown:
        raise SpecError(f"save_safetensors: {unknown[0][0]!r} is {unknown[0][1]}, which safetensors has not.")
    for path, (leaf, _) in at.items():
        if leaf.cuts:
            mine = part_of(convert.get(path, path), leaf.whole, leaf.cuts, run.coordinate)
            parts[path] = pieces(path, leaf.shape, mine)
    return parts, tensors


def files_of(tensors: Tensors, most: int) -> Files:
    """What goes into which file, in that order."""
    expect("max_shard_size", most, Real, "a number of bytes")
    files: Files = [{}]
    size = 0
    for name, (kind, shape) in tensors.items():
        n = torch.Size(shape).numel() * kind.itemsize
        if files[-1] and size + n > most:
            files.append({})
            size = 0
        files[-1][name] = (kind, shape)
        size += n
    return files


def file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _begin_files(claim: Claim, files: Files) -> None:
    """The first rank's: make the folder, in it the files with room for their tensors, and the index of several."""
    claim.make()
    names = file_names(len(files))
    for name, some in zip(names, files, strict=True):
        create(claim.path / name, some)
    if len(files) == 1:
        return
    total = sum(torch.Size(shape).numel() * kind.itemsize for some in files for kind, shape in some.values())
    index = {name: file for file, some in zip(names, files, strict=True) for name in some}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    write_file(claim.path / "model.safetensors.index.json", text.encode())


def _write(state: State, path: Path, parts: Pieces, files: int) -> None:
    """This rank's runs, and of the first rank buffers, at their places."""
    places: dict[str, Entry] = {}
    for name in file_names(files):
        places |= entries(path / name)
    run = runtime_of(state.spec.mesh)
    paths = {
        f"main.{leaf.path}{place_at(run, bucket.apart(run.sizes))}": leaf.path
        for bucket in state.layout.buckets.values() for leaf in bucket.leaves
    }  # fmt: skip
    mine = [
        (paths[part.name], part.start, part.tensor) for part in parts_of(state) if part.name in paths and part.writes
    ]
    if run.rank == 0:
        mine += [(name, 0, held) for name, held in buffers_of(state).items()]
    opened: dict[Path, int] = {}
    try:
        for name, start, tensor in mine:
            flat = tensor.detach().reshape(-1)
            for piece in parts[name]:
                place = places[piece.name]
                if place.path not in opened:
                    opened[place.path] = os.open(place.path, os.O_WRONLY)
                for block in blocks(piece, start, start + flat.numel()):
                    host = block.of(flat, start).to("cpu", place.dtype).contiguous()
                    write_at(opened[place.path], place, block.file, host)
        for file in opened.values():
            os.fsync(file)
    finally:
        for file in opened.values():
            os.close(file)
    sync(path)


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
                raise _no_adapter("save_adapter", adapter, named)
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
            for p, own in buffers_of(state).items():
                held |= {one: own.detach().to("cpu", copy=True).contiguous() for one in (in_file(p, adapter),) if one}
        with looking(state):
            for name, buffer in state.main.items():
                wanted = [leaf.path for leaf in state.layout.buckets[name].leaves if named[leaf.path]]
                if wanted:
                    whole = whole_leaves(buffer, dtype)
                    if claim is not None:
                        for p in wanted:
                            held |= dict.fromkeys(named[p], whole[p].to("cpu", copy=True).contiguous())
        joint(write, "tensors")
    return as_path("folder", folder)


def _no_adapter(what: str, adapter: str, paths: Iterable[str]) -> TreeError:
    return TreeError(
        f"{what}: no leaf of the state is of an adapter {adapter!r}; they are called {', '.join([*paths][:3])}, ... "
        "Make the model by peft.get_peft_model, within init."
    )


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
    with looking(state):
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
        raise _no_adapter(what, adapter, home)
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
            files = files_of(_adapter_tensors(state, config, adapter, dtype), max_shard_size)
            if claim is not None:
                _begin_files(claim, files)
            return file_names(len(files))

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
                    _write_adapter(path, names, named)
            except OSError as error:
                wrong.append(error)
        joint(complete, "tensors")
    return as_path("folder", folder)


def _adapter_tensors(state: State, config: Any, adapter: str, dtype: torch.dtype | None) -> Tensors:
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
    for path, held in buffers_of(state).items():
        name = in_merged(path, adapter)
        if name is not None:
            kind = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            found[name] = kind, tuple(held.shape)
    unknown = next(((name, kind) for name, (kind, _) in found.items() if kind not in DTYPES.values()), None)
    if unknown is not None:
        raise SpecError(f"save_merged: {unknown[0]!r} is {unknown[1]}, which safetensors has not. Give dtype=.")
    return found


def _write_adapter(path: Path, names: list[str], named: Named) -> None:
    places = {name: place for file in names for name, place in entries(path / file).items() if name in named}
    for file in {place.path for place in places.values()}:
        with open(file, "r+b") as opened:
            for name, tensor in named.items():
                if places[name].path == file:
                    write_at(opened.fileno(), places[name], 0, tensor.to("cpu").contiguous().reshape(-1))
            os.fsync(opened.fileno())
