"""AdamW with moments in 8 bits: beside torchao's, on ranks, in checkpoints and other layouts."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.chains import Chain
from support.commands import TORCHAO
from support.presets import PRESETS
from support.problems import mesh_and_placement
from support.ranks import each_rank
from support.scenario import Scenario, Seen, apart, on_ranks

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._spec.precision import Form

Tree = dict[str, torch.Tensor]
SHAPES = {"a.w": (64, 72), "b.w": (48, 128), "c.w": (8, 512)}  # as many as torchao packs, of whole blocks
NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 6


def gradients(step: int) -> Tree:
    """Of many sizes, some zero."""
    seeded = torch.Generator().manual_seed(step)
    found = {
        path: torch.randn(shape, generator=seeded) * 10 ** (-5 * torch.rand(shape, generator=seeded))
        for path, shape in SHAPES.items()
    }
    found["a.w"][:4] = 0
    return found


def weights() -> Tree:
    seeded = torch.Generator().manual_seed(100)
    return {path: torch.randn(shape, generator=seeded) for path, shape in SHAPES.items()}


def moments_of(state: fsdp.State, which: str) -> Tree:
    """Whole moments, unpacked."""
    codec, found = state.optimizer.codec, {}
    codec = codec if which == "mean" else codec.nonnegative()
    planes: dict[str, Tree] = {name: {} for name in getattr(state.opt, which)}
    for name, tree in getattr(state.opt, which).items():
        for buffer in tree.values():
            planes[name] |= fsdp.extend.gather_leaves(buffer)
    for bucket in state.layout.trainable.values():
        for leaf in bucket.leaves:
            form = Form(codec, leaf.shape, torch.float32)
            mine = {p.name: planes[p.name][leaf.path].view(p.dtype) for p in form.places}
            found[leaf.path] = codec.unpack(mine, leaf.shape, torch.float32)
    return found


def stepped(preset: str, moments: Any, steps: int) -> tuple[Tree, Tree, Tree]:
    mesh, placement = mesh_and_placement(preset)
    state = fsdp.shard(weights(), fsdp.Spec(mesh, placement), fsdp.adamw(**NUMBERS, moments=moments))
    for step in range(steps):
        state = fsdp.step(fsdp.reduce(state, gradients(step)))
    return fsdp.full_params(state), moments_of(state, "mean"), moments_of(state, "square")


def reference(steps: int) -> tuple[Tree, Tree, Tree]:
    """torchao's 8-bit AdamW, without its compiler: single_param_adam on its own tensors."""
    with patch.object(sys, "path", [*sys.path, str(TORCHAO)]):
        from torchao.optim.adam import single_param_adam  # type: ignore[import-not-found]
        from torchao.optim.subclass_8bit import OptimState8bit  # type: ignore[import-not-found]
    params = weights()
    mean, square = (
        {path: OptimState8bit.zeros(shape, signed, 128) for path, shape in SHAPES.items()} for signed in (True, False)
    )
    lr = torch.tensor(NUMBERS["lr"])
    for step in range(steps):
        for path, grad in gradients(step).items():
            single_param_adam(
                params[path], grad, torch.tensor(step + 1.0), mean[path], square[path], None, lr, *NUMBERS["betas"],
                NUMBERS["weight_decay"], NUMBERS["eps"], True, False,
            )  # fmt: skip
    first, second = ({path: one.dequantize() for path, one in some.items()} for some in (mean, square))
    return params, first, second


@pytest.mark.parametrize("preset", ["zero3", "ddp", "zero1", "hsdp", "hfsdp"])
def test_numbers_are_those_of_torchao(preset: str) -> None:
    """Its kernel rounds in another order, so that a number may now and then be its neighbour in the codebook."""
    right = reference(STEPS)
    ranks = 4 if preset.startswith("h") else 3
    for found in launch(stepped, (preset, fsdp.dynamic8(), STEPS), nprocs=ranks, simulate=True):
        for tree, theirs in zip(found[1:], right[1:], strict=True):
            for path, one in tree.items():
                other = (one - theirs[path]).abs() > 1e-6 * theirs[path].abs()
                assert other.float().mean() < 5e-3, path
        for path, one in found[0].items():
            assert ((one - right[0][path]).abs() > 1e-5).float().mean() < 5e-3, path
            assert torch.allclose(one, right[0][path], atol=STEPS * 1e-2), path


def test_the_first_step_has_the_bits_of_torchao() -> None:
    """From zero both come to the same moments, and to the same bytes of them."""
    right = reference(1)
    found = launch(stepped, ("zero3", fsdp.dynamic8(), 1), nprocs=2, simulate=True)[0]
    for path in SHAPES:
        assert torch.equal(found[1][path], right[1][path])
        assert torch.allclose(found[2][path], right[2][path], rtol=1e-6, atol=0)
        assert torch.allclose(found[0][path], right[0][path], rtol=1e-6, atol=1e-7)


def net() -> nn.Module:
    """Leaves whose last blocks are cut."""
    return Chain(None, (nn.Sequential(nn.Linear(21, 33), nn.GELU(), nn.Linear(33, 21)) for _ in range(2)))


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sin()).square().mean()
    return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 21, generator=torch.Generator().manual_seed(10 * step + rank))


def start(preset: str, moments: Any = fsdp.dynamic8, **spec: Any) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net())
    return fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), fsdp.adamw(lr=1e-2, moments=moments)), model


def driven(preset: str, moments: Any, ranks: int) -> list[Seen]:
    """Six steps of data that are alike, for the same sums in every strategy."""
    data = lambda step, rank, micro: batch(step, 0)  # noqa: E731
    optimizer = (lambda: fsdp.adamw(lr=1e-2, moments=moments)), None
    return on_ranks(Scenario(model=net, loss_fn=loss_fn, data=data, preset=preset, optimizer=optimizer, steps=6), ranks)


@cache
def plainly() -> list[float]:
    return driven("zero3", None, 1)[0].losses


def test_every_strategy_has_the_same_bits() -> None:
    (right,) = driven("zero3", fsdp.dynamic8, 1)
    assert right.losses == pytest.approx(plainly(), rel=0.05)
    assert right.losses != plainly()
    for preset in PRESETS:
        for seen in driven(preset, fsdp.dynamic8, 4):
            assert seen.losses == right.losses, preset
            assert apart(seen.weights[-1], right.weights[-1]) == 0.0


@pytest.mark.parametrize("codec", [fsdp.fp8_block(128), fsdp.mxfp8(), fsdp.dynamic8(32)], ids=str)
def test_other_codecs(codec: fsdp.Codec) -> None:
    assert driven("zero3", codec, 2)[0].losses == pytest.approx(plainly(), rel=0.1)


def planes_of(state: fsdp.State) -> Tree:
    """All bytes, by path and plane, whole."""
    found: Tree = {}
    for which in ("mean", "square"):
        for name, tree in getattr(state.opt, which).items():
            for buffer in tree.values():
                found |= {f"{which} {name} {path}": t for path, t in fsdp.extend.gather_leaves(buffer).items()}
    return found


def padding_of(state: fsdp.State) -> float:
    """The largest number in main weights that lies in no leaf."""
    most = 0.0
    for buffer in state.main.values():
        rest = buffer.but(buffer.local.clone())
        for shard in fsdp.extend.leaf_shards(rest):
            shard.local.zero_()
        most = max(most, float(rest.local.abs().max()))
    return most


@each_rank(2)
def test_checkpoints_copies_layouts_and_skipped_steps_carry_the_bytes(tmp_path: Path) -> None:
    state, model = start("zero3")
    forward_backward, rank = T.forward_backward(model, loss_fn), dist.get_rank()

    def stepped(state: fsdp.State, step: int, **more: Any) -> fsdp.State:
        return fsdp.step(forward_backward(state, batch(step, rank))[0], **more)

    state = stepped(stepped(state, 0), 1)
    right, params = planes_of(state), fsdp.full_params(state)
    assert any(one.any() for one in right.values())
    held = sum(b.local.nbytes for tree in (*state.opt.mean.values(), *state.opt.square.values()) for b in tree.values())
    assert held == sum(b.numel // 2 * 2 + b.numel // 128 // 2 * 8 for b in state.layout.buckets.values())

    def same(other: fsdp.State) -> fsdp.State:
        found = planes_of(other)
        assert found.keys() == right.keys()
        assert all(torch.equal(one, right[name]) for name, one in found.items())
        assert all(torch.equal(one, params[path]) for path, one in fsdp.full_params(other).items())
        return other

    same(stepped(copy.deepcopy(state), 2, skip=torch.tensor(True)))
    fsdp.save(state, tmp_path / "a")
    others = [
        same(copy.deepcopy(state)),
        same(pickle.loads(pickle.dumps(state))),
        same(fsdp.load(tmp_path / "a", like=start("zero3")[0])),
        same(fsdp.load(tmp_path / "a", state.spec, state.optimizer)),
    ]
    nexts = [stepped(one, 2) for one in others]
    after = [planes_of(one) for one in nexts]
    assert all(torch.equal(one[name], after[0][name]) for one in after for name in right)
    assert not any(map(padding_of, nexts))  # the last block of a leaf reaches into it
    same(fsdp.load(tmp_path / "a", like=start("ddp")[0]))
    same(fsdp.load(tmp_path / "a", like=start("zero1", units=["blocks"])[0]))
    moved, mesh = copy.deepcopy(state), state.spec.mesh
    for placement, units in ((fsdp.ddp("data"), None), (fsdp.zero1("data"), ["blocks"]), (fsdp.zero3("data"), ["*"])):
        moved = same(fsdp.redistribute(moved, fsdp.Spec(mesh, placement, units=units)))  # type: ignore[arg-type]
    frozen = stepped(fsdp.freeze(copy.deepcopy(state), "blocks.0.*"), 2)
    assert not padding_of(frozen)
    assert not padding_of(stepped(moved, 2))
    assert {path.split(".")[1] for path in (name.split()[-1] for name in planes_of(frozen))} == {"1"}
    with pytest.raises(fsdp.SpecError, match="was written with another optimizer"):
        fsdp.load(tmp_path / "a", like=start("zero3", None)[0])
    assert "mean" in repr(state.opt)


def missing(moments: Any) -> Tree:
    """In the second step a leaf gets no gradient."""
    mesh: Any = fsdp.local_mesh()
    params = {"a": torch.ones(300), "b": torch.ones(200)}
    state = fsdp.shard(params, fsdp.Spec(mesh, units=["*"]), fsdp.adamw(lr=0.1, moments=moments))
    for step in range(3):
        grads = {"a": torch.full((300,), 0.5), "b": None if step == 1 else torch.full((200,), 0.25)}
        state = fsdp.step(fsdp.reduce(state, grads))
    assert bool(state.opt.missed)
    return fsdp.full_params(state)


def test_leaves_without_a_gradient_are_left_out() -> None:
    """Of constant gradients every number is the largest of its block, or zero: packing loses nothing."""
    for found in launch(missing, (fsdp.dynamic8,), nprocs=2, simulate=True):
        right = launch(missing, (None,), nprocs=1, simulate=True)[0]
        assert all(torch.allclose(found[path], p, rtol=1e-6) for path, p in right.items())


@pytest.mark.parametrize("codec", [fsdp.dynamic8(), fsdp.dynamic8(32), fsdp.mxfp8()], ids=str)
@each_rank(2)
def test_leaves_of_one_of_several_optimizers(codec: fsdp.Codec) -> None:
    """Two optimizers with packed moments, each of its own leaves, are one with all."""
    mesh: Any = fsdp.local_mesh("cpu")
    leaves, found = {"a": torch.linspace(-1, 1, 150), "b": torch.linspace(1, 2, 5), "c": torch.ones(301)}, []
    one = fsdp.adamw(lr=0.1, moments=codec)
    for optimizer in (one, fsdp.partition({"few": one, "default": one})):
        state = fsdp.shard({"unit": leaves}, fsdp.Spec(mesh, labels={"unit.b": "few"}), optimizer)
        for step in range(3):
            grads = {path: p.sin() * (step + 1) for path, p in leaves.items()}
            state = fsdp.step(fsdp.reduce(state, {"unit": grads}))
        found.append(fsdp.full_params(state)["unit"])
    assert all(torch.equal(found[1][path], p) for path, p in found[0].items())


def test_whole_compiled_steps() -> None:
    def step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, params = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda params: (params["w"] * x - 1).square().mean())(params)
        return fsdp.step(fsdp.reduce(state, grads)), loss

    found = []
    for run in (step, T.compile(step, backend="aot_eager")):  # which is traced as torch.compile does
        params, losses = {"w": torch.linspace(-1, 1, 300)}, []
        mesh: Any = fsdp.local_mesh("cpu")
        state = fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=0.1, moments=fsdp.dynamic8))
        for i in range(3):
            state, loss = run(state, torch.full((), 1.0 + i))
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_what_cannot_be_is_refused_by_name() -> None:
    for moments, said in (
        (fsdp.int8, "adamw(moments=int8()): it packs all of a tensor at once"),
        (fsdp.fp8_block, "it has blocks of 256 elements, and leaves begin with every 128th element"),
        ("8bit", "adamw(moments='8bit'): expected a codec, as fsdp.dynamic8"),
    ):
        with pytest.raises(fsdp.SpecError, match=re.escape(said)):
            fsdp.adamw(moments=moments)  # type: ignore[arg-type]
    far = fsdp.zero3("data", memory_kind="pinned_host")
    with pytest.raises(fsdp.SpecError, match="lies in the host's memory"):
        fsdp.shard({"w": torch.zeros(8)}, fsdp.Spec(fsdp.local_mesh(), far), fsdp.adamw(moments=fsdp.dynamic8))
