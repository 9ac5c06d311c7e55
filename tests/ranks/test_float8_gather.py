"""Weights gathered in float8, for torchao's linears (emulated): the bits of bfloat16 gathers that are cast at use."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import float8
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.by_hand import step_by_hand
from support.chains import Chain
from support.commands import TORCHAO
from support.problems import mesh_and_placement
from support.ranks import launch
from support.strays import strays
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T

STEPS, E4M3 = 3 if FULL else 2, torch.float8_e4m3fn
PLAIN = fsdp.Precision(compute=torch.bfloat16)
RULES = {"blocks.*.weight": fsdp.Precision(compute=torch.bfloat16, gather=E4M3), "*": PLAIN}
Result = tuple[list[float], dict[str, torch.Tensor]]


def net() -> nn.Module:
    """Of each block one matrix lies on the first of two ranks, one on both, one on the second."""
    return Chain(
        nn.Linear(16, 32),
        (nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 32)) for _ in range(3)),
    )


def made() -> nn.Module:
    torch.manual_seed(0)
    with patch.object(sys, "path", [*sys.path, str(TORCHAO)]):
        return float8.converted(net(), emulate=True)


def batch(step: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(32, 16, generator=seeded).bfloat16()


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x).float() - torch.sin(x.float()).repeat(1, 2)).square().mean()
    return loss


def start(in_float8: bool, preset: str = "zero3", optimizer: Any = None, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, skeleton = fsdp.functionalize(made())
    precision = RULES if in_float8 else PLAIN
    chosen = optimizer or fsdp.adamw(lr=0.01)
    return fsdp.shard(params, fsdp.Spec(mesh, placement, precision=precision, **spec), chosen), skeleton


def driven(
    in_float8: bool, preset: str, compile: Any, transport: str, debug: bool = False, again: bool = False
) -> Result:
    schedule = fsdp.Schedule(debug=debug)
    state, skeleton = start(in_float8, preset, transport=transport, schedule=schedule)
    model = T.remat(skeleton, "blocks.*") if again else skeleton
    step, losses = T.forward_backward(model, loss_fn, compile=compile), []
    for i in range(STEPS):
        state, loss = step(state, batch(i))
        state = fsdp.step(state)
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


def in_bfloat16(grads: dict[str, torch.Tensor]) -> None:
    assert all(g.dtype is torch.bfloat16 and type(g) is torch.Tensor for g in grads.values())


def by_hand(in_float8: bool, order: Any = None) -> Result:
    state, model = start(in_float8, schedule=fsdp.Schedule(order=order))
    losses = []

    def stage(unit: str, x: torch.Tensor) -> Any:
        part = model.get_submodule(unit)

        def run(w: Any, h: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = fsdp.bind(part, w)(h)
            if unit == "inp":
                return out
            last = (h + out).float() - torch.sin(x.float()).repeat(1, 2)
            return last.square().mean() if unit == "blocks.2" else h + out

        return run

    for i in range(STEPS):
        x = batch(i)
        state, loss = step_by_hand(state, partial(stage, x=x), x, in_bfloat16)
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


def whole(in_float8: bool) -> Result:
    state, model = start(in_float8)
    losses = []
    for i in range(STEPS):
        state, params = fsdp.unshard(state)
        leaves = {path: w.detach().requires_grad_() for path, w in params.items()}
        loss = loss_fn(fsdp.bind(model, leaves), batch(i))
        grads = torch.autograd.grad(loss, [*leaves.values()])
        state = fsdp.step(fsdp.reduce(state, dict(zip(leaves, grads, strict=True))))
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


WAYS: dict[str, Any] = {
    "zero3": lambda on: driven(on, "zero3", False, "collective"),
    "zero2": lambda on: driven(on, "zero2", False, "collective"),
    "ddp": lambda on: driven(on, "ddp", False, "collective"),
    "compiled units": lambda on: driven(on, "zero3", {"backend": "aot_eager"}, "collective"),
    "copies, poisoned": lambda on: driven(on, "zero3", False, "copy_engine", debug=True),
    "recomputed": lambda on: driven(on, "zero3", False, "collective", again=True),
    "by hand": by_hand,
    "recorded": lambda on: by_hand(on, "recorded"),  # in its first step no plan names a use
    "whole": whole,
}
QUICK = [*WAYS] if FULL else ["zero3", "compiled units", "copies, poisoned", "recomputed", "recorded", "whole"]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out


def between_passes(in_float8: bool, options: Any) -> tuple[list[float], list[str]]:
    """Losses of compiled units whose products are in float8, and what of their weights is kept for the backward beside
    what is lent, which is poisoned meanwhile."""
    torch.manual_seed(0)
    with patch.object(sys, "path", [*sys.path, str(TORCHAO)]):
        model = float8.converted(nn.Sequential(Gated(), Gated()), parts=("",))
    params, skeleton = fsdp.functionalize(model)
    precision = float8.gathered(model) if in_float8 else PLAIN
    spec = fsdp.Spec(fsdp.local_mesh(), precision=precision, schedule=fsdp.Schedule(debug=True))
    state, kept, losses = fsdp.shard(params, spec, fsdp.sgd(0.1)), [], []
    step = T.forward_backward(skeleton, lambda m, x: (m(x) - x).float().square().mean(), compile=options)

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.dtype.itemsize == 1 and 64 in saved.shape and 32 not in saved.shape and not extend.is_lent(saved):
            kept.append(str(tuple(saved.shape)))
        return saved

    for i in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * i + dist.get_rank())).bfloat16()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            state, loss = step(state, x)
        state = fsdp.step(state)
        losses.append(loss.item())
    return losses, kept


@pytest.mark.large  # Inductor's code; `compiled units` of WAYS are compiled, too
@pytest.mark.parametrize("options", [True, {"mode": "default"}, {"options": {"max_autotune": False}}])
def test_copies_of_weights_do_not_stay_between_forward_and_backward(options: Any) -> None:
    found = launch(between_passes, (True, options), nprocs=1)  # each rank would run Inductor, for the same code
    plain = launch(between_passes, (False, options), nprocs=1) if options is True else found
    for (losses, kept), (wanted, _) in zip(found, plain, strict=True):
        assert kept == []
        assert losses == wanted


def nothing_cast_back() -> Any:
    """Nothing but torchao's linears may read a weight in float8."""

    def refuse(self: fsdp.Float8Weight) -> torch.Tensor:
        raise AssertionError("a weight in float8 was cast back")

    return patch.object(fsdp.Float8Weight, "dequantized", refuse)


def compared() -> dict[str, tuple[Result, Result]]:
    """Each way in bfloat16 and in float8."""
    return {name: (WAYS[name](False), WAYS[name](True)) for name in QUICK}


def two_axes(preset: str) -> dict[str, tuple[Result, Result]]:
    with nothing_cast_back():
        return {preset: (driven(False, preset, False, "collective"), driven(True, preset, False, "collective"))}


def differ(found: dict[str, tuple[Result, Result]]) -> list[str]:
    return [
        name
        for name, ((losses, weights), (theirs, others)) in found.items()
        if losses != theirs or any(not torch.equal(weight, others[path]) for path, weight in weights.items())
    ]


def test_bits_are_those_of_bfloat16_gathers_that_are_cast_at_use() -> None:
    """On ranks that take turns, which compile units once; on two axes, below, they are processes."""
    with nothing_cast_back():
        ranks = fsdp.launch(compared, nprocs=2, simulate=not FULL)
    for found in ranks:
        assert differ(found) == []
        assert found["zero3"][0][0][-1] < found["zero3"][0][0][0]


@pytest.mark.parametrize("preset", [pytest.param("hsdp", marks=pytest.mark.large), "hfsdp"])
def test_bits_on_two_axes(preset: str) -> None:
    for found in launch(two_axes, (preset,), nprocs=4, processes=True):
        assert differ(found) == []


# ---------------------------------------------------------------- states


def right(state: fsdp.State) -> bool:
    """Whether copies in float8 are what torchao makes of the main weights, in bfloat16."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # type: ignore[import-not-found]

    want = fsdp.full_params(state)
    _, found = fsdp.unshard(copy.deepcopy(state))
    for path, weight in want.items():
        in_float8 = path.startswith("blocks.") and path.endswith("weight")
        assert (type(found[path]) is fsdp.Float8Weight) is in_float8
        if in_float8:
            theirs = hp_tensor_to_float8_dynamic(weight.bfloat16(), E4M3, None)
            same = torch.equal(theirs._data.view(torch.uint8), found[path].bits.view(torch.uint8))
            if not same or theirs._scale != found[path].scale:
                return False
    return True


def everywhere(folder: str) -> tuple[list[str], list[bool]]:
    state, skeleton = start(True)
    step, mesh = T.forward_backward(skeleton, loss_fn), fsdp.local_mesh()

    def stepped(state: fsdp.State, i: int, **more: Any) -> fsdp.State:
        return fsdp.step(step(state, batch(i))[0], **more)

    specs = [fsdp.Spec(mesh, fsdp.zero3("data"), precision=PLAIN)]
    specs[:0] = [fsdp.Spec(mesh, placement, precision=RULES) for placement in (fsdp.zero3("data"), fsdp.zero1("data"))]
    wrong, state, plain = strays(state, stepped, right, Path(folder), specs)
    wrong += [name.name for name in (Path(folder) / "one").iterdir() if "scale" in name.name]
    predicted = T.apply(skeleton)(state, batch(0))[1]
    again = pickle.loads(pickle.dumps(skeleton))
    others = [T.apply(again)(state, batch(0))[1], T.apply(start(False)[1])(plain, batch(0))[1]]
    with torch.inference_mode():
        others.append(T.apply(skeleton)(state, batch(0))[1])
    return wrong, [torch.equal(one, predicted) for one in others]


def test_scales_follow_main_weights_wherever_these_change(tmp_path: Path) -> None:
    assert launch(everywhere, (str(tmp_path),), nprocs=2) == [([], [True] * 3)] * 2


def travelled(in_float8: bool) -> tuple[dict[str, list[int]], int, int]:
    """Bytes of each collective of a step, by kind; of the arena; of the copies that persist."""
    state, skeleton = start(in_float8, optimizer=fsdp.sgd(lr=0.1))
    step = T.forward_backward(skeleton, loss_fn)
    state = fsdp.step(step(state, batch(0))[0])  # the first step looks at the order of use
    seen: dict[str, list[int]] = {}
    lanes: Any = state._executor.run.lanes
    real = lanes.collective

    def counting(hop: Any, out: torch.Tensor, given: torch.Tensor, group: Any) -> Any:
        seen.setdefault(f"{hop.kind} {hop.op}".strip(), []).append(hop.nbytes)
        assert hop.nbytes == max(t.numel() * t.element_size() for t in (out, given))
        return real(hop, out, given, group)

    lanes.collective = counting
    try:
        state = fsdp.step(step(state, batch(1))[0])
    finally:
        del lanes.collective
    return seen, state.cursor.plan.arena, sum(buffer.local.nbytes for buffer in state.weights.values())


def both() -> tuple[Any, Any]:
    return travelled(False), travelled(True)


def test_half_of_the_bytes_are_gathered_and_one_reduction_finds_all_scales() -> None:
    (wide, wide_arena, none), (narrow, narrow_arena, copies) = launch(both, nprocs=2)[0]
    matrices, rest = 4096, 512  # elements of a block, padding included; 5 of 6 gathers of blocks, see `print(plan)`
    assert sorted(wide["all_gather"])[-5:] == [2 * (matrices + rest)] * 5
    assert sorted(narrow["all_gather"])[-5:] == [matrices] * 5
    assert sum(wide["all_gather"]) - sum(narrow["all_gather"]) == 5 * matrices
    assert wide_arena - narrow_arena == 2 * matrices
    assert (none, copies) == (0, 3 * matrices // 2)
    assert narrow.pop("all_reduce max") == [9 * 4]
    assert "all_reduce max" not in wide
    assert sum(wide["reduce_scatter mean"]) == sum(narrow["reduce_scatter mean"])


def test_linears_that_cast_their_weights_otherwise_are_refused() -> None:
    module = made()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    by_rows = convert_to_float8_training(net(), module_filter_fn=lambda _, path: "blocks" in path, config=recipe)
    rules = {gather: {**RULES, "blocks.*.weight": replace(RULES["blocks.*.weight"], gather=gather)}
             for gather in (E4M3, torch.float8_e5m2)}  # fmt: skip
    for one, gather, said in (
        (by_rows, E4M3, "the float8 linear 'blocks.0.0' casts its weight dynamic, axiswise; expected one scale"),
        (
            module,
            torch.float8_e5m2,
            "casts its weight to torch.float8_e4m3fn, and it was gathered as torch.float8_e5m2",
        ),
    ):
        params, skeleton = fsdp.functionalize(one)
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), precision=rules[gather]), fsdp.sgd(lr=0.1))
        with pytest.raises(fsdp.SpecError, match=re.escape(said)):
            T.forward_backward(skeleton, loss_fn)(state, torch.randn(4, 16).bfloat16())
