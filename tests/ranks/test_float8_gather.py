"""Weights gathered in float8, for torchao's linears (emulated): the bits of bfloat16 gathers that are cast at use."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import float8
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.by_hand import passes_by_hand
from support.chains import Chain
from support.commands import TORCHAO
from support.problems import mesh_and_placement
from support.ranks import each_rank, launch
from support.scenario import Scenario, Seen, alike, run
from support.strays import strays
from support.tables import FULL
from support.traffic import issued

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T
from functional_fsdp._common.record import Collective

STEPS, E4M3 = 3 if FULL else 2, torch.float8_e4m3fn
PLAIN = fsdp.Precision(compute=torch.bfloat16)
RULES = {"blocks.*.weight": fsdp.Precision(compute=torch.bfloat16, gather=E4M3), "*": PLAIN}


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
    return (model(x).float() - torch.sin(x.float()).repeat(1, 2)).square().mean()


def start(in_float8: bool, preset: str = "zero3", optimizer: Any = None, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, skeleton = fsdp.functionalize(made())
    precision = RULES if in_float8 else PLAIN
    chosen = optimizer or fsdp.adamw(lr=0.01)
    return fsdp.shard(params, fsdp.Spec(mesh, placement, precision=precision, **spec), chosen), skeleton


def in_bfloat16(grads: dict[str, torch.Tensor]) -> None:
    assert all(g.dtype is torch.bfloat16 and type(g) is torch.Tensor for g in grads.values())


def by_hand(model: Any, state: fsdp.State, x: torch.Tensor, last: bool) -> tuple[fsdp.State, torch.Tensor]:
    def stage(unit: str) -> Any:
        part = model.get_submodule(unit)

        def run(w: Any, h: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = fsdp.bind(part, w)(h)
            if unit == "inp":
                return out
            last = (h + out).float() - torch.sin(x.float()).repeat(1, 2)
            return last.square().mean() if unit == "blocks.2" else h + out

        return run

    return passes_by_hand(state, stage, x, in_bfloat16)


def whole(model: Any, state: fsdp.State, x: torch.Tensor, last: bool) -> tuple[fsdp.State, torch.Tensor]:
    state, params = fsdp.unshard(state)
    leaves = {path: w.detach().requires_grad_() for path, w in params.items()}
    loss = loss_fn(fsdp.bind(model, leaves), x)
    grads = torch.autograd.grad(loss, [*leaves.values()])
    return fsdp.reduce(state, dict(zip(leaves, grads, strict=True))), loss.detach()


ZERO3 = Scenario(
    model=made, loss_fn=loss_fn, data=lambda step, rank, micro: batch(step), spec={"precision": PLAIN},
    optimizer=(lambda: fsdp.adamw(lr=0.01), None), steps=STEPS,
)  # fmt: skip
POISONED = {"precision": PLAIN, "transport": "copy_engine", "schedule": fsdp.Schedule(debug=True)}
WAYS = {
    "zero3": ZERO3, "zero2": replace(ZERO3, preset="zero2"), "ddp": replace(ZERO3, preset="ddp"),
    "compiled units": replace(ZERO3, options={"compile": {"backend": "aot_eager"}}),
    "copies, poisoned": replace(ZERO3, spec=POISONED),
    "recomputed": replace(ZERO3, change=lambda model: T.remat(model, "blocks.*")),
    "by hand": replace(ZERO3, loop=by_hand),
    "recorded": replace(  # in its first step no plan names a use
        ZERO3, loop=by_hand, spec={"precision": PLAIN, "schedule": fsdp.Schedule(order="recorded")}
    ),
    "whole": replace(ZERO3, loop=whole),
}  # fmt: skip
QUICK = [*WAYS] if FULL else ["compiled units", "copies, poisoned", "recomputed", "recorded", "whole"]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


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


def as_in_bfloat16(one: Scenario) -> Seen:
    seen = run(replace(one, spec={**one.spec, "precision": RULES}))
    alike(seen, run(one), 0)
    return seen


def compared() -> None:
    for name in QUICK:
        losses = as_in_bfloat16(WAYS[name]).losses
        assert losses[-1] < losses[0]


def test_bits_are_those_of_bfloat16_gathers_that_are_cast_at_use() -> None:
    """On ranks that take turns, which compile units once; on two axes, below, they are processes."""
    with nothing_cast_back():
        fsdp.launch(compared, nprocs=2, simulate=not FULL)


@pytest.mark.parametrize("preset", [pytest.param("hsdp", marks=pytest.mark.large), "hfsdp"])
@each_rank(4, processes=True)
def test_bits_on_two_axes(preset: str) -> None:
    with nothing_cast_back():
        as_in_bfloat16(replace(ZERO3, preset=preset))


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


@each_rank(2)
def test_scales_follow_main_weights_wherever_these_change(tmp_path: Path) -> None:
    state, skeleton = start(True)
    step, mesh = T.forward_backward(skeleton, loss_fn), fsdp.local_mesh()

    def stepped(state: fsdp.State, i: int, **more: Any) -> fsdp.State:
        return fsdp.step(step(state, batch(i))[0], **more)

    specs = [fsdp.Spec(mesh, fsdp.zero3("data"), precision=PLAIN)]
    specs[:0] = [fsdp.Spec(mesh, placement, precision=RULES) for placement in (fsdp.zero3("data"), fsdp.zero1("data"))]
    wrong, state, plain = strays(state, stepped, right, tmp_path, specs)
    assert wrong == []
    assert not [one for one in (tmp_path / "one").iterdir() if "scale" in one.name]
    predicted = T.apply(skeleton)(state, batch(0))[1]
    again = pickle.loads(pickle.dumps(skeleton))
    others = [T.apply(again)(state, batch(0))[1], T.apply(start(False)[1])(plain, batch(0))[1]]
    with torch.inference_mode():
        others.append(T.apply(skeleton)(state, batch(0))[1])
    assert all(torch.equal(one, predicted) for one in others)


def travelled(in_float8: bool) -> tuple[dict[str, list[int]], int, int]:
    """Bytes of each collective of a step, by kind; of the arena; of the copies that persist."""
    state, skeleton = start(in_float8, optimizer=fsdp.sgd(lr=0.1))
    step = T.forward_backward(skeleton, loss_fn)
    state = fsdp.step(step(state, batch(0))[0])  # the first step looks at the order of use
    seen: dict[str, list[int]] = {}

    def counting(hop: Collective, out: torch.Tensor, given: torch.Tensor) -> None:
        seen.setdefault(f"{hop.kind} {hop.op}".strip(), []).append(hop.nbytes)
        assert hop.nbytes == max(t.numel() * t.element_size() for t in (out, given))

    with issued(state, counting):
        state = fsdp.step(step(state, batch(1))[0])
    return seen, state.cursor.plan.arena, sum(buffer.local.nbytes for buffer in state.weights.values())


@each_rank(2)
def test_half_of_the_bytes_are_gathered_and_one_reduction_finds_all_scales() -> None:
    (wide, wide_arena, none), (narrow, narrow_arena, copies) = travelled(False), travelled(True)
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
        (module, torch.float8_e5m2,
         "casts its weight to torch.float8_e4m3fn, and it was gathered as torch.float8_e5m2"),
    ):  # fmt: skip
        params, skeleton = fsdp.functionalize(one)
        state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), precision=rules[gather]), fsdp.sgd(lr=0.1))
        with pytest.raises(fsdp.SpecError, match=re.escape(said)):
            T.forward_backward(skeleton, loss_fn)(state, torch.randn(4, 16).bfloat16())
