"""Weights that train and are gathered by a codec, beside a plain module with what the packed weights stand for."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.chains import Chain
from support.packed import of_whole_trees, unit_by_unit
from support.ranks import each_rank
from support.scenario import Scenario, begun, on_ranks
from support.strays import strays

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._spec.precision import Form
from functional_fsdp.codecs.rows import Rows

Result = tuple[list[float], dict[str, torch.Tensor]]
CODECS = {"fp8_block": fsdp.fp8_block(), "mxfp8": fsdp.mxfp8(), "int8": fsdp.int8(64), "nf4": fsdp.nf4()}
STEPS, LR = 3, 0.1


def net() -> nn.Module:
    """Matrices whose last blocks are cut, an odd number of elements among them."""
    blocks = (nn.Sequential(nn.Linear(21, 33), nn.GELU(), nn.Linear(33, 21)) for _ in range(2))
    return Chain(nn.Linear(16, 21), blocks)


def made() -> nn.Module:
    torch.manual_seed(0)
    return net()


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.float().sin().repeat(1, 2)[:, :21]).square().mean()


def rules(codec: Any, compute: torch.dtype = torch.bfloat16) -> dict[str, fsdp.Precision]:
    plain = {"compute": compute, "sum": "fp32"}
    return {"blocks.*.weight": fsdp.Precision(gather=codec, **plain), "*": fsdp.Precision(**plain)}  # type: ignore[arg-type]


def seen(path: str, main: torch.Tensor, codec: str, compute: torch.dtype) -> torch.Tensor:
    """What compute sees of a main weight."""
    if is_packed(path):
        form = Form(CODECS[codec], tuple(main.shape), compute)
        return form.unpack(form.pack(main))
    return main.to(compute)


@cache
def reference(codec: str, compute: torch.dtype, ranks: int, alike: bool) -> Result:
    """A plain module; gradients with respect to what it computes with go to the weights that are kept."""
    model, losses = made(), []
    main = {path: p.detach().clone() for path, p in model.named_parameters()}
    for step in range(STEPS):
        leaves = {path: seen(path, w, codec, compute).clone().requires_grad_() for path, w in main.items()}
        each = []
        for rank in range(ranks):
            x = batch(step, 0 if alike else rank, compute)
            loss = loss_fn(lambda x, w=leaves: torch.func.functional_call(model, w, (x,)), x)
            each.append(torch.autograd.grad(loss, [*leaves.values()]))
            if rank == 0:
                losses.append(loss.item())
        for w, grads in zip(main.values(), zip(*each, strict=True), strict=True):
            total = grads[0].float()
            for grad in grads[1:]:
                total = total + grad.float()
            w.add_(total / torch.full((), float(ranks)), alpha=-LR)
    return losses, main


def scenario(
    preset: str, codec: str, compute: torch.dtype = torch.bfloat16, alike: bool = False, spec: Any = {}, **more: Any  # noqa: B006
) -> Scenario:  # fmt: skip
    data = lambda step, rank, micro: batch(step, 0 if alike else rank, compute)  # noqa: E731
    optimizer = (lambda: fsdp.sgd(lr=LR)), None
    return Scenario(
        model=made, loss_fn=loss_fn, data=data, preset=preset, optimizer=optimizer, steps=STEPS,
        spec={"precision": rules(CODECS[codec], compute), **spec}, **more,
    )  # fmt: skip


def start(preset: str, codec: str, **spec: Any) -> tuple[fsdp.State, Any]:
    return begun(scenario(preset, codec, spec=spec))


def same(one: Scenario, ranks: int, right: Result) -> None:
    """Every bit."""
    found = on_ranks(one, ranks)
    assert found[0].losses == right[0]
    for seen in found:
        assert all(torch.equal(seen.weights[-1][path], p) for path, p in right[1].items())


def stage(model: Any, x: torch.Tensor, unit: str) -> Any:
    part = model.get_submodule(unit)

    def run(w: Any, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fsdp.bind(part, w)(h)
        if unit == "inp":
            return out
        return loss_fn(lambda x: h + out, x) if unit == "blocks.1" else h + out

    return run


def is_packed(path: str) -> bool:
    return path.startswith("blocks.") and path.endswith("weight")


@pytest.mark.parametrize(
    ("codec", "compute"),
    [("fp8_block", torch.bfloat16), ("mxfp8", torch.bfloat16), ("int8", torch.float32), ("nf4", torch.float32)],
)
def test_every_bit_is_that_of_a_plain_module_with_unpacked_weights(codec: str, compute: torch.dtype) -> None:
    same(scenario("zero3", codec, compute), 3, reference(codec, compute, 3, False))


#: `test_packed_leaves` has them
OTHERS = [pytest.param(preset, marks=pytest.mark.large) for preset in ("zero2", "zero1", "hsdp")]


@pytest.mark.parametrize("preset", ["zero3", "ddp", "hfsdp", *OTHERS])
def test_in_every_strategy(preset: str) -> None:
    """Ranks have the same data, so that sums along two axes have the same bits."""
    codec = "mxfp8" if preset in ("zero3", "zero1", "hfsdp") else "fp8_block"
    same(scenario(preset, codec, alike=True), 4, reference(codec, torch.bfloat16, 4, True))


WAYS: dict[str, dict[str, Any]] = {
    "torch.func": {"loop": of_whole_trees(loss_fn, "torch.func", is_packed)},
    "autograd": {"loop": of_whole_trees(loss_fn, "autograd", is_packed)},
    "by hand": {"loop": unit_by_unit(stage)},
    "recomputed": {"change": lambda model: T.remat(model, "blocks.*")},
    "poisoned": {"spec": {"schedule": fsdp.Schedule(debug=True)}},
    "kept": {"preset": "ddp", "spec": {"schedule": fsdp.Schedule(keep="all")}},
    "copy engines": {"codec": "fp8_block", "spec": {"transport": "copy_engine"}},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_of_a_step(way: str) -> None:
    more = {"preset": "zero3", "codec": "mxfp8", **WAYS[way]}
    same(scenario(**more), 2, reference(more["codec"], torch.bfloat16, 2, False))


def test_compiled_units() -> None:
    """Unpacking is traced into the unit."""
    one = scenario("zero3", "mxfp8", torch.float32)
    (eager,), (compiled,) = on_ranks(one, 1), on_ranks(replace(one, options={"compile": {"backend": "aot_eager"}}), 1)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)


def test_bytes_of_gathers_and_of_the_arena() -> None:
    """33 bytes for 32 elements in the place of 64."""
    leaf = {"w": torch.zeros(256, 512)}
    half = fsdp.Precision(compute=torch.bfloat16)
    layouts = [
        fsdp.make_layout(leaf, fsdp.Spec({"data": 4}, precision=one))
        for one in (half, fsdp.Precision(compute=torch.bfloat16, gather=fsdp.mxfp8))
    ]
    plans = [fsdp.make_plan(layout, fsdp.Schedule()) for layout in layouts]
    assert plans[0].arena == 2 * 256 * 512
    assert plans[1].arena == 256 * 512 * 33 // 32
    assert layouts[1].nbytes("weights") == plans[1].arena // 4
    assert layouts[0].hash != layouts[1].hash
    assert "gather mxfp8()" in str(layouts[1])
    text = "main float32, compute bfloat16, gather mxfp8(), grads float32, wire bfloat16, sum native"
    assert str(fsdp.Precision(compute=torch.bfloat16, gather=fsdp.mxfp8).resolve(torch.float32)) == text
    assert "gather mxfp8()" in str(fsdp.Precision(gather=fsdp.mxfp8))
    for codec in CODECS.values():
        rows = Rows(codec)
        assert all(first % 16 == last % 16 == 0 for first, last in rows.places.values())
        bucket = fsdp.make_layout({"a": torch.zeros(7), "b": torch.zeros(3, 500)}, fsdp.Spec(
            {"data": 3}, precision=fsdp.Precision(gather=codec), units=["*"])).buckets  # fmt: skip
        for one in bucket.values():
            assert all(leaf.offset % rows.width == 0 for leaf in one.leaves)
            assert one.numel % (3 * rows.width) == 0
            assert all(leaf.offset % 16 == 0 for leaf in one.gathered.leaves)


def test_traffic() -> None:
    moved = []
    for precision in (fsdp.Precision(compute=torch.bfloat16), rules(fsdp.mxfp8())["blocks.*.weight"]):
        with fsdp.simulate(data=4) as world:
            world(gathered, precision)
            moved.append(world.traffic.bytes(lane="side"))
    assert moved[0] == 4 * 2 * (256 * 512 * 3 // 4)
    assert moved[1] * 64 == moved[0] * 33


def gathered(precision: fsdp.Precision) -> None:
    state = fsdp.shard({"w": torch.ones(256, 512)}, fsdp.Spec(fsdp.local_mesh(), precision=precision), fsdp.sgd(lr=0.1))
    fsdp.drop_gradients(fsdp.unshard(state)[0])


# ---------------------------------------------------------------- states


def right(state: fsdp.State) -> bool:
    """Whether compute sees what main weights are packed to."""
    want = fsdp.full_params(state)
    _, found = fsdp.unshard(copy.deepcopy(state))
    packed = [path for path, w in found.items() if type(w) is fsdp.PackedWeight]
    assert len(packed) == 4
    return all(torch.equal(found[path].clone(), seen(path, want[path], "mxfp8", torch.bfloat16)) for path in packed)


@each_rank(2)
def test_packed_copies_follow_main_weights_wherever_these_change(tmp_path: Path) -> None:
    state, model = start("zero3", "mxfp8")
    step, mesh = T.forward_backward(model, loss_fn), fsdp.local_mesh()

    def stepped(state: fsdp.State, i: int, **more: Any) -> fsdp.State:
        return fsdp.step(step(state, batch(i, dist.get_rank(), torch.bfloat16))[0], **more)

    packed = rules(fsdp.mxfp8())
    placements = [getattr(fsdp, preset)("data") for preset in ("zero1", "ddp", "zero3")]
    specs = [fsdp.Spec(mesh, placement, precision=packed) for placement in placements]
    wrong, *_ = strays(state, stepped, right, tmp_path, [*specs, fsdp.Spec(mesh, precision=fsdp.Precision())])
    assert wrong == []


def test_the_peak_of_a_step_counts_bytes() -> None:
    found = []
    for codec in ("mxfp8", None):
        spec: dict[str, Any] = {} if codec else {"precision": fsdp.Precision(compute=torch.bfloat16)}
        state, model = start("zero3", "mxfp8", **spec)
        memory = T.step_memory(T.forward_backward(model, loss_fn), state, batch(0, 0, torch.bfloat16))
        found.append(memory.parts)
    assert found[0]["compute copies"] == sum(b.local.nbytes for b in start("zero3", "mxfp8")[0].weights.values())
    assert found[0]["arena"] < found[1]["arena"]


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("codec", [fsdp.int8, fsdp.nf4(nested=True), fsdp.fp8_block(tile=(8, 8))])
def test_codecs_without_blocks_are_refused(codec: Any) -> None:
    with pytest.raises(fsdp.SpecError, match="it packs all of a tensor at once, and each rank has a part"):
        fsdp.Precision(gather=codec)


def test_what_cannot_be_is_refused_by_name() -> None:
    leaf = {"w": torch.zeros(8, 8)}
    packed = fsdp.Precision(gather=fsdp.mxfp8)
    far = fsdp.zero3("data", memory_kind="pinned_host")
    with pytest.raises(fsdp.SpecError, match=re.escape("Precision(gather=mxfp8()) of the leaf 'w': its state lies in")):
        fsdp.make_layout(leaf, fsdp.Spec({"data": 2}, far, precision=packed))
    with pytest.raises(fsdp.SpecError, match="has the codec mxfp8"):
        fsdp.make_layout(leaf, fsdp.Spec({"data": 2, "tensor": 2}, fsdp.zero3("data"), precision=packed,
                                         own={"w": ("tensor", 0)}))  # fmt: skip
    state, model = start("zero3", "mxfp8")
    forward_backward = T.forward_backward(model, loss_fn)

    def step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    with pytest.raises(fsdp.ScheduleError, match=r"does not gather in a codec, as Precision\(gather=mxfp8\(\)\)"):
        T.compile(step)(state, batch(0, 0, torch.bfloat16))


@each_rank(2)
def test_an_eps_of_zero_leaves_zeros_beside_leaves() -> None:
    """Beside leaves 0 / 0 would be NaN, and what packs the last block of a leaf packs that, too."""
    mesh: Any = fsdp.local_mesh("cpu")
    params, grad = {"w": torch.linspace(1, 2, 300)}, torch.linspace(0, 1, 300)
    plain = torch.nn.Parameter(params["w"].clone())
    torchs = torch.optim.AdamW([plain], lr=0.1, eps=0, fused=True)
    plain.grad = grad
    for _ in range(2):
        torchs.step()
    for eps, moments in ((0.0, None), (lambda count: count * 0.0, None), (0, fsdp.dynamic8)):
        optimizer = fsdp.adamw(lr=0.1, eps=eps, moments=moments)
        state = fsdp.shard(params, fsdp.Spec(mesh, precision=fsdp.Precision(gather=fsdp.int8(64))), optimizer)
        for _ in range(2):
            state, weights = fsdp.unshard(state)
            assert weights["w"].isfinite().all()
            state = fsdp.step(fsdp.reduce(state, {"w": grad}))
        found = fsdp.full_params(state)["w"]
        assert plain[0].isnan()
        assert float(found[0]) == pytest.approx(0.999**2)
        if not moments:  # a function's numbers are float32
            assert torch.allclose(found[1:], plain.detach()[1:], rtol=0, atol=1e-5 if callable(eps) else 0)
