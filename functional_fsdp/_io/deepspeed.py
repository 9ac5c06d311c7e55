"""DeepSpeed: ZeRO-1, 2 and 3, and its universal format.

global_step3/mp_rank_00_model_states.pt                      stages 1 and 2: the module in compute's dtype, and shapes
             zero_pp_rank_0_mp_rank_00_model_states.pt       stage 3: buffers, shapes, this rank's frozen fragments
             [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt   this rank's part of main weights and moments, flat
zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt                 universal: a file of each leaf

stages 1, 2    a group's leaves end to end, cut into equal parts; the last rank's main weights end before the padding,
               its moments have it
stage 3        of each leaf an equal part for each rank, the last one padded; parts of a rank's leaves end to end
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._common.errors import CheckpointError
from .contents import (
    Contents,
    Cut,
    Held,
    Inert,
    Moments,
    by_number,
    numel_of,
    plain_name,
    read_saved,
    run,
    span_of,
    steps_from,
)
from .torch_files import Spanned, ties_of

MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
OPTIM = re.compile(r"^(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
Flat = list[tuple[int, Any, int, Path]]  # of each part: where it begins, where it lies, how long it is, its file


class DeepSpeed:
    """A folder that `save_checkpoint` wrote, that of a step in it, or a universal one."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and _step_folder(path) is not None

    def read(self, path: Path) -> Contents:
        folder = _step_folder(path)
        assert folder is not None
        odd = next((f.name for f in folder.iterdir() if f.name.startswith(("layer_", "expert_"))), None)
        if odd is not None:
            raise CheckpointError(
                f"{folder / odd}: layers of pipelines and experts lie in files of their own, which are not read."
            )
        models = _of_ranks(folder, MODEL)
        if not models:
            raise CheckpointError(f"{folder} has no *_model_states.pt.")
        first, span, file = models[0]
        if not isinstance(first, Mapping) or not isinstance(first.get("module"), Mapping):
            raise CheckpointError(f"{file} has no 'module': it is no checkpoint of DeepSpeed.")
        if first.get("mp_world_size", 1) not in (1, None):
            raise CheckpointError(f"{file} is of {first['mp_world_size']} tensor-parallel ranks, which is not read.")
        buffers = frozenset(map(plain_name, first.get("buffer_names") or ()))
        module = {plain_name(name): one for name, one in first["module"].items()}
        ties = {plain_name(a): plain_name(b) for a, b in (first.get("shared_params") or {}).items()}
        shapes = [
            {plain_name(n): _shape(file, n, s) for n, s in group.items()} for group in first.get("param_shapes") or ()
        ]
        trained = {name for group in shapes for name in group}
        ties |= {a: b for a, b in ties_of(module.items()).items() if a not in buffers and a not in trained}
        found = {name: span_of(one, span) for name, one in module.items() if name in buffers}
        frozen = _frozen(models, module, buffers, trained, ties)
        version = first.get("ds_version")
        about: dict[str, Any] = {
            "version": version if isinstance(version, str) else None, "ties": ties, "buffers": buffers,
            "frozen": frozenset(frozen), "step": first.get("global_steps"),
        }  # fmt: skip
        if (folder / "zero").is_dir():
            weights, moments, steps = _universal(folder, shapes, first.get("global_steps"))
            kind, world = "DeepSpeed, universal", first.get("dp_world_size")
        else:
            ranks = _of_ranks(folder, OPTIM)
            if not ranks:
                return _without_zero(folder, models[0], {**about, "frozen": None})
            stage, world = _stage(ranks, first)
            weights, moments, steps = (_third if stage == 3 else _second)(ranks, shapes)
            kind = f"DeepSpeed ZeRO-{stage}"
        order = [name for name in module if name not in ties]
        every = {**found, **frozen, **weights}
        return Contents(kind, {n: every[n] for n in (*order, *every) if n in every}, world=world, moments=moments,
                        steps=steps, **about)  # fmt: skip


def _step_folder(path: Path) -> Path | None:
    """The folder of a step."""
    inner = [path]
    latest = path / "latest"
    if latest.is_file():
        tag = latest.read_text(errors="replace").strip()
        if Path(tag).name != tag or not (path / tag).is_dir():
            raise CheckpointError(f"{latest} names {tag!r}, which is no folder there.")
        inner.append(path / tag)
    for folder in inner:
        if any(MODEL.match(one.name) or OPTIM.match(one.name) for one in folder.iterdir()):
            return folder
    return None


def _of_ranks(folder: Path, pattern: re.Pattern[str]) -> list[Spanned]:
    """What the files of all ranks hold, in the order of ranks."""
    found: dict[int, Path] = {}
    for file in folder.iterdir():
        match = pattern.match(file.name)
        if match:
            rank = int(match[1] or 0)
            if int(match[2]) or rank in found:
                raise CheckpointError(f"{file} is of another tensor-parallel rank, or a second one of rank {rank}.")
            found[rank] = file
    missing = [rank for rank in range(max(found, default=-1) + 1) if rank not in found]
    if missing:
        raise CheckpointError(f"{folder} lacks the file of rank {missing[0]}, beside {found[max(found)].name}.")
    return [(*read_saved(found[rank]), found[rank]) for rank in sorted(found)]


def _shape(file: Path, name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
        raise CheckpointError(f"{file} has {name!r} of the shape {shape!r}; expected whole numbers.")
    return shape


def _stage(ranks: list[Spanned], model: Mapping[str, Any]) -> tuple[int, int]:
    _, _, file = ranks[0]
    optimizers = [_optimizer(one) for one in ranks]
    said = [one.get("zero_stage") for one in optimizers]
    stages = [stage.args[0] if isinstance(stage, Inert) else stage for stage in said]
    stage = stages[0]
    world = optimizers[0].get("partition_count")
    world = max(world) if isinstance(world, list) else world
    if stage not in (1, 2, 3) or type(world) is not int:
        raise CheckpointError(f"{file} is of ZeRO stage {stage!r} and {world!r} ranks; expected stage 1, 2 or 3.")
    if world != len(ranks) or model.get("dp_world_size", world) != world:
        raise CheckpointError(
            f"{file} is of {world} ranks; {len(ranks)} files of optimizer states are there, and the model's says "
            f"{model.get('dp_world_size')}. Some are missing, or of another checkpoint."
        )
    for theirs, (_, _, name) in zip(stages, ranks, strict=True):
        if theirs != stage:
            raise CheckpointError(f"{name} is of ZeRO stage {theirs}, and {file.name} of {stage}: of two checkpoints?")
    return stage, world


def _optimizer(one: Spanned) -> Mapping[str, Any]:
    tree, _, file = one
    found = tree.get("optimizer_state_dict") if isinstance(tree, Mapping) else None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{file} has no 'optimizer_state_dict': it is no optimizer state of DeepSpeed.")
    return found


def _frozen(
    models: list[Spanned], module: Mapping[str, Any], buffers: Any, trained: set[str], ties: Mapping[str, str]
) -> dict[str, Any]:
    """Leaves that do not train: whole in the module, or a fragment of each rank."""
    tree, span, file = models[0]
    shapes = {plain_name(n): _shape(file, n, s) for n, s in (tree.get("frozen_param_shapes") or {}).items()}
    found: dict[str, Any] = {}
    for name, one in module.items():
        if name in trained or name in buffers or name in ties:
            continue
        if name not in shapes or tuple(one.shape) == shapes[name]:
            found[name] = span_of(one, span)
            continue
        flat: Flat = []
        at = 0
        for theirs, where, path in models:
            part = {plain_name(n): t for n, t in (theirs.get("frozen_param_fragments") or {}).items()}.get(name)
            if part is None:
                raise CheckpointError(f"{path} has no fragment of the frozen leaf {name!r}.")
            flat.append((at, where(part), numel_of(part.shape), path))
            at += numel_of(part.shape)
        found[name] = _cut(name, shapes[name], one.dtype, 0, flat)
    return found


def _cut(name: str, shape: tuple[int, ...], dtype: Any, first: int, flat: Flat) -> Cut:
    """A leaf that is elements `first` and so on of parts that follow one another."""
    parts, n = [], numel_of(shape)
    for begin, span, length, _ in flat:
        low, high = max(begin, first), min(begin + length, first + n)
        if low < high:
            parts.append(run(low - first, high - low, span, low - begin))
    made = Cut(shape, dtype, tuple(parts))
    if made.covered != n:
        files = ", ".join(path.name for *_, path in flat[:3])
        raise CheckpointError(
            f"{flat[0][3].parent} has {made.covered} of the {n} elements of {name!r} {[*shape]} in {files}: a file is "
            "cut short, or of another checkpoint."
        )
    return made


Found = tuple[dict[str, Any], Moments, dict[str, Any]]


def _second(ranks: list[Spanned], shapes: list[dict[str, tuple[int, ...]]]) -> Found:
    """Stages 1 and 2: by group."""
    weights: dict[str, Any] = {}
    moments: Moments = {}
    steps: dict[str, Any] = {}
    optimizers = [_optimizer(one) for one in ranks]
    paddings = optimizers[0].get("param_alignment_paddings")
    for i, group in enumerate(shapes):
        slots = _slots([_state(one, "base_optimizer_state", i) for one in optimizers], ranks)
        try:
            main = [one["single_partition_of_fp32_groups"][i] for one in optimizers]
        except (KeyError, IndexError):
            raise CheckpointError(f"{ranks[0][2]} has no main weights of the group {i}.") from None
        each = max(numel_of(part.shape) for slot in ([*main], *slots.values()) for part in slot)
        at = 0
        for k, (name, shape) in enumerate(group.items()):
            weights[name] = _cut(name, shape, main[0].dtype, at, _flat(ranks, main, each))
            for slot, held in slots.items():
                cut = _cut(f"{slot} of {name}", shape, held[0].dtype, at, _flat(ranks, held, each))
                moments.setdefault(name, {})[slot] = cut
            steps |= _step(name, _state(optimizers[0], "base_optimizer_state", i), ranks[0][1])
            at += numel_of(shape) + (paddings[i][k] if paddings else 0)
    return weights, moments, steps


def _third(ranks: list[Spanned], shapes: list[dict[str, tuple[int, ...]]]) -> Found:
    """Stage 3: by leaf."""
    weights: dict[str, Any] = {}
    moments: Moments = {}
    steps: dict[str, Any] = {}
    optimizers = [_optimizer(one) for one in ranks]
    flats: dict[str, list[Flat]] = {"": []}
    for (_, span, file), one in zip(ranks, optimizers, strict=True):
        flats[""].append(_ends([*one["fp32_flat_groups"]], span, file))
        state = one["optimizer_state_dict"]["state"]
        for slot in _names([state[k] for k in sorted(state)]):
            flats.setdefault(slot, []).append(_ends([state[k][slot] for k in sorted(state)], span, file))
    at = 0
    for group in shapes:
        for name, shape in group.items():
            n, world = numel_of(shape), len(ranks)
            each = -(-n // world)
            for slot, parts in flats.items():
                if len(parts) != world:
                    raise CheckpointError(f"{ranks[0][2].parent}: only some ranks' files have {slot!r}.")
                flat: Flat = []
                for rank, own in enumerate(parts):
                    length = max(0, min(each, n - rank * each))
                    if length:
                        inner = _cut(name, (length,), own[0][1].dtype, at, own)
                        flat.append((rank * each, inner, length, ranks[rank][2]))
                made = _cut(name, shape, parts[0][0][1].dtype, 0, flat or parts[0][:1])
                if slot:
                    moments.setdefault(name, {})[slot] = made
                else:
                    weights[name] = made
            steps |= _step(name, _state(optimizers[0], "optimizer_state_dict", 0), ranks[0][1])
            at += each
    return weights, moments, steps


def _ends(held: list[Any], span: Any, file: Path) -> Flat:
    """Parts that follow one another."""
    found, at = [], 0
    for part in held:
        n = numel_of(part.shape)
        found.append((at, span_of(part, span), n, file))
        at += n
    return found


def _flat(ranks: list[Spanned], held: list[Any], each: int) -> Flat:
    return [(r * each, span_of(t, span), numel_of(t.shape), file)
            for r, (t, (_, span, file)) in enumerate(zip(held, ranks, strict=True))]  # fmt: skip


def _state(optimizer: Mapping[str, Any], name: str, i: int) -> Mapping[str, Any]:
    """What the optimizer keeps for a group."""
    base = optimizer.get(name)
    state = base.get("state", {}) if isinstance(base, Mapping) else base
    found = state[i] if isinstance(state, list) else (state or {}).get(i, {})
    return found if isinstance(found, Mapping) else {}


def _names(states: list[Mapping[str, Any]]) -> list[str]:
    """The names of what an optimizer keeps for each element."""
    return [slot for slot, one in (states[0] if states else {}).items() if len(getattr(one, "shape", ())) == 1]


def _slots(states: list[Mapping[str, Any]], ranks: list[Spanned]) -> dict[str, list[Any]]:
    found = {}
    for slot in _names([*states]):
        lacking = next((file for one, (_, _, file) in zip(states, ranks, strict=True) if slot not in one), None)
        if lacking is not None:
            raise CheckpointError(f"{lacking} has no {slot!r}, and {ranks[0][2].name} has.")
        found[slot] = [one[slot] for one in states]
    return found


def _step(name: str, state: Mapping[str, Any], span: Any) -> dict[str, Any]:
    return {name: span_of(state["step"], span)} if "step" in state else {}


def _universal(folder: Path, shapes: list[dict[str, tuple[int, ...]]], step: Any) -> Found:
    """A folder of each leaf."""
    weights: dict[str, Any] = {}
    moments: Moments = {}
    steps: dict[str, Any] = {}
    for group in shapes:
        for name, shape in group.items():
            there = folder / "zero" / name
            if not (there / "fp32.pt").exists():
                raise CheckpointError(f"{there / 'fp32.pt'} is missing: the model's file names {name!r}.")
            for file in sorted(there.glob("*.pt")):
                tree, span = read_saved(file)
                held = tree.get("param") if isinstance(tree, Mapping) else tree
                if file.stem == "step":
                    steps[name] = span_of(held, span)
                    continue
                if not isinstance(held, Held) or numel_of(held.shape) != numel_of(shape):
                    raise CheckpointError(f"{file} has {held!r}; expected a tensor {[*shape]}.")
                made = _cut(name, shape, held.dtype, 0, [(0, span(held), numel_of(shape), file)])
                if file.stem == "fp32":
                    weights[name] = made
                else:
                    moments.setdefault(name, {})[file.stem] = made
            if name not in steps and name in moments and isinstance(step, int):
                steps[name] = step
    return weights, moments, steps


def _without_zero(folder: Path, model: Spanned, about: dict[str, Any]) -> Contents:
    """Stage 0: a module and an optimizer's state dict."""
    tree, span, file = model
    if tree.get("dp_world_size", 1) > 1 and not tree.get("optimizer") and tree.get("param_shapes") is not None:
        raise CheckpointError(f"{folder} has no *_optim_states.pt, in which DeepSpeed keeps main weights.")
    ties = ties_of((plain_name(n), t) for n, t in tree["module"].items())
    found = {plain_name(n): span_of(t, span) for n, t in tree["module"].items() if plain_name(n) not in ties}
    moments: Moments = {}
    optimizer = tree.get("optimizer")
    left: tuple[str, ...] = ()
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        state = {k: {s: span_of(t, span) for s, t in kept.items()} for k, kept in optimizer["state"].items()}
        names = [n for n in found if n not in about["buffers"]]
        moments, why = by_number(file, state, optimizer["param_groups"], {n: found[n] for n in names})
        left = (why,) if why else ()
    steps = steps_from(moments)
    return Contents("DeepSpeed ZeRO-0", found, world=tree.get("dp_world_size"), moments=moments, steps=steps, left=left,
                    **{**about, "ties": ties})  # fmt: skip
