"""Codecs: bytes and planes by arithmetic, errors within their bounds, and the bits of bitsandbytes and torchao."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_fsdp as fsdp
from functional_fsdp._spec.precision import Form
from functional_fsdp._spec.settings import describe_settings
from functional_fsdp.codecs.blocks import CODE, dynamic_map

#: made by tools/peers/packed.py, with bitsandbytes 0.50.2 and torchao 0.18.0
PEERS: dict[str, Any] = torch.load(Path(__file__).parents[1] / "data" / "packed.pt", weights_only=True)
GAP = max(b - a for a, b in itertools.pairwise(CODE)) / 2
#: the codec, the largest error as a share of the largest number of a block, elements of a block, or rows and columns
CODECS: dict[str, tuple[fsdp.Codec, float, int]] = {
    "nf4": (fsdp.nf4(), GAP, 64),
    "nf4 of 32": (fsdp.nf4(32), GAP, 32),
    "int8": (fsdp.int8(), 0.5 / 127, 0),
    "int8 of 64": (fsdp.int8(64), 0.5 / 127, 64),
    "fp8_block": (fsdp.fp8_block(), 2**-4, 256),
    "int4": (fsdp.int4(), 1 / 14, 64),
    "dynamic8": (fsdp.dynamic8(), 2**-7, 128),
    "mxfp8": (fsdp.mxfp8(), 2**-3, 32),  # what is above 448 becomes 448, of less than 512
}
EVERY = {name: codec for name, (codec, *_) in CODECS.items()}
EVERY |= {"nf4 nested": fsdp.nf4(nested=True), "fp8_block of tiles": fsdp.fp8_block(tile=(16, 8))}


def blocks_of(tensor: torch.Tensor, size: int) -> torch.Tensor:
    flat = tensor.flatten()
    size = size or tensor.shape[-1]
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**20), st.sampled_from([1e-20, 1e-3, 1.0, 1e20]))
def test_what_is_unpacked_is_near_what_was_packed(name: str, n: int, m: int, seed: int, size: float) -> None:
    codec, share, block = CODECS[name]
    w = torch.randn(n, m, generator=torch.Generator().manual_seed(seed)) * size
    form = Form(codec, (n, m), torch.float32)
    bits = form.pack(w)
    assert bits.shape == (form.nbytes,)
    found = form.unpack(bits)
    most = blocks_of(w, block).abs().amax(dim=1, keepdim=True)
    assert ((blocks_of(found, block) - blocks_of(w, block)).abs() <= share * most * (1 + 1e-5)).all()
    assert torch.equal(bits, form.pack(w))


@pytest.mark.parametrize("name", EVERY)
def test_planes_lie_end_to_end_and_packing_fills_them(name: str) -> None:
    form = Form(EVERY[name], (33, 100), torch.bfloat16)
    assert [place.start % 16 for place in form.places] == [0] * len(form.places)
    assert sum(place.nbytes for place in form.places) <= form.nbytes < sum(p.nbytes + 16 for p in form.places)
    w = torch.randn(33, 100, generator=torch.Generator().manual_seed(0))
    bits = form.pack(w)
    planes = form.codec.pack(w)
    assert planes.keys() == form.planes(bits).keys()
    for key, plane in form.planes(bits).items():
        assert plane.dtype is planes[key].dtype
        assert torch.equal(plane.view(torch.uint8).flatten(), planes[key].contiguous().view(torch.uint8).flatten())
    assert form.unpack(bits).dtype is torch.bfloat16
    assert torch.equal(form.unpack(bits), replace(form, dtype=torch.float32).unpack(bits).bfloat16())


def test_bytes_by_arithmetic() -> None:
    n = 1024 * 4096
    shape = (1024, 4096)
    sizes = {name: Form(codec, shape, torch.bfloat16).nbytes for name, codec in EVERY.items()}
    assert sizes["nf4"] == n // 2 + n // 64 * 4
    assert sizes["nf4 nested"] == n // 2 + n // 64 + n // 64 // 256 * 4 + 4
    assert sizes["int8"] == n + 1024 * 4
    assert sizes["fp8_block"] == n + n // 256 * 4
    assert sizes["fp8_block"] / (2 * n) <= 0.51
    assert sizes["fp8_block of tiles"] == n + n // 128 * 4
    assert sizes["mxfp8"] == n + n // 32


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1), (7,), (2, 3, 5), ()], ids=str)
def test_shapes_of_any_kind(name: str, shape: tuple[int, ...]) -> None:
    form = Form(EVERY[name], shape, torch.float32)
    if name == "fp8_block of tiles" and len(shape) < 2:
        with pytest.raises(fsdp.SpecError, match=re.escape(f"{form.codec}: the shape {shape} has no tiles")):
            _ = form.nbytes
        return
    w = torch.arange(prod(shape), dtype=torch.float32).reshape(shape) - 2
    found = form.unpack(form.pack(w))
    assert found.shape == w.shape
    assert torch.allclose(found, w, atol=0.2 * float(w.abs().max()) if w.numel() else 0)
    assert not form.unpack(form.pack(torch.zeros(shape))).count_nonzero()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_block_with_what_is_no_number_shows_it(name: str, odd: float) -> None:
    """A vote that looks for it in gradients must find it."""
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    w[3, 5] = odd
    form = Form(EVERY[name], (16, 256), torch.float32)
    found = form.unpack(form.pack(w))
    assert not found[3, 5].isfinite()
    assert "nested" in name or found[9, 128:].isfinite().all()


@pytest.mark.parametrize(
    ("name", "codec"), [("nf4", fsdp.nf4()), ("nf4 nested", fsdp.nf4(nested=True)), ("int8", fsdp.int8())]
)
def test_bits_of_bitsandbytes(name: str, codec: fsdp.Codec) -> None:
    planes, plain = PEERS[name]
    w = PEERS["w"]
    assert torch.equal(codec.unpack(planes, (34, 50), plain.dtype), plain)
    own = codec.pack(w)
    for key, plane in planes.items():
        assert torch.equal(own[key].view(plane.shape), plane), key


def test_the_dynamic_map_of_bitsandbytes() -> None:
    assert torch.equal(torch.tensor(dynamic_map()), PEERS["dynamic map"])


def test_bits_of_torchao() -> None:
    planes, plain = PEERS["mxfp8"]
    own = fsdp.mxfp8().pack(PEERS["rows"])
    assert torch.equal(own["data"].view(torch.uint8), planes["data"])
    assert torch.equal(own["scale"], planes["scale"])
    assert torch.equal(fsdp.mxfp8().unpack(own, (16, 96), torch.float32), plain)


def test_tiles_by_hand() -> None:
    codec = fsdp.fp8_block(tile=(2, 3))
    w = torch.tensor([[1.0, 2.0, 448.0, 8.0], [0.0, -4.0, 2.0, -16.0], [0.5, 0.0, 0.0, 0.0]])
    planes = codec.pack(w)
    assert torch.equal(
        planes["scale"], torch.tensor([[448.0, 16.0], [0.5, 0.0]]) / 448 + torch.tensor([[0, 0], [0, 1.0]])
    )
    assert torch.allclose(codec.unpack(planes, (3, 4), torch.float32), w, rtol=2**-4)


def test_what_ranks_compare_of_a_codec_are_its_fields() -> None:
    assert describe_settings(fsdp.nf4(32)) != describe_settings(fsdp.nf4())
    assert fsdp.nf4(32) == fsdp.nf4(32) != fsdp.nf4(64)
    assert [str(codec) for codec in (fsdp.nf4(), fsdp.nf4(32, nested=True), fsdp.fp8_block(), fsdp.mxfp8())] == [
        "nf4()", "nf4(block=32, nested=True)", "fp8_block(block=256)", "mxfp8()",
    ]  # fmt: skip


@pytest.mark.parametrize("make", [fsdp.nf4, fsdp.int8, fsdp.fp8_block])
@pytest.mark.parametrize("block", [1, 48, -64, True, 64.0])
def test_blocks_that_are_none(make: Any, block: Any) -> None:
    with pytest.raises(fsdp.SpecError, match=re.escape(f"{make.__name__}(block={block!r}): expected a power of 2")):
        make(block)


# ---------------------------------------------------------------- PackedWeight


def weight(codec: fsdp.Codec | None = None, shape: tuple[int, int] = (24, 64)) -> fsdp.PackedWeight:
    form = Form(codec or fsdp.nf4(), shape, torch.float32)
    return fsdp.PackedWeight(form.pack(torch.randn(shape, generator=torch.Generator().manual_seed(0))), form)


def test_operations_see_the_numbers_and_autograd_keeps_the_bytes() -> None:
    packed = weight()
    plain = packed.dequantized()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    found = []
    for w in (packed, plain):
        x_ = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = torch.nn.functional.linear(x_, w)
        found.append((out, *torch.autograd.grad(out.square().sum(), x_)))
    assert all(map(torch.equal, *found))
    assert {type(t) for t in kept if t.shape in ((24, 64), (64, 24))} == {fsdp.PackedWeight, torch.Tensor}
    assert torch.equal(packed.t(), plain.t())
    assert type(packed.t()) is type(packed.transpose(-1, 0)) is type(packed.detach()) is fsdp.PackedWeight
    assert packed.transpose(-1, 0).shape == (64, 24)
    assert torch.equal(packed.transpose(0, 0), plain)
    assert torch.equal(packed[3:5], plain[3:5])
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([2, 0]), packed), plain[[2, 0]])
    assert (packed.dtype, packed.stride(), packed.t().stride()) == (torch.float32, (64, 1), (1, 64))
    assert repr(packed) == "PackedWeight(shape=(24, 64), dtype=torch.float32, codec=nf4())"


def test_it_is_not_written_to() -> None:
    with pytest.raises(fsdp.ScheduleError, match="would write to a weight that is packed by a codec"):
        weight().mul_(2)


def test_torch_func_looks_through() -> None:
    packed = weight()
    plain = packed.dequantized()

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, w).tanh().sum()

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    for f in (torch.func.grad(loss), torch.func.jacrev(loss), torch.func.hessian(loss)):
        assert torch.equal(f(x[:1], packed), f(x[:1], plain))
    assert torch.equal(
        torch.func.vmap(torch.func.grad(loss), (0, None))(x, packed),
        torch.func.vmap(torch.func.grad(loss), (0, None))(x, plain),
    )
    assert torch.equal(torch.func.grad(loss, argnums=1)(x, packed), torch.func.grad(loss, argnums=1)(x, plain))


# ---------------------------------------------------------------- Precision


@dataclass(frozen=True)
class Halves(fsdp.Codec):
    """One of a user's own: a bfloat16 for two elements, their mean."""

    block: int = 2

    def planes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"mean": ((prod(shape) // 2,), torch.bfloat16)}

    def pack(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": tensor.reshape(-1, 2).mean(dim=1).bfloat16()}

    def unpack(self, planes: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return planes["mean"].to(dtype).repeat_interleave(2).view(shape)


def layout(rules: Any, frozen: bool = True, shape: tuple[int, ...] = (64, 64)) -> fsdp.Layout:
    params = {"w": torch.nn.Parameter(torch.ones(shape), requires_grad=not frozen), "b": torch.ones(3)}
    return fsdp.make_layout(params, fsdp.Spec({"data": 4}, precision=rules))


def test_a_packed_leaf_lies_in_a_bucket_of_bytes() -> None:
    found = layout({"w": fsdp.Precision(main=fsdp.nf4), "*": fsdp.Precision()})
    (bucket,) = [b for b in found.buckets.values() if b.packed]
    (leaf,) = bucket.leaves
    assert leaf.form is not None
    assert (leaf.numel, leaf.seen_shape) == (64 * 64 // 2 + 64 * 4, (64, 64))
    assert bucket.nbytes("main") == bucket.nbytes("weights") == bucket.numel // 4
    assert bucket.numel - leaf.numel < 4 * 128
    assert not bucket.trainable
    assert "uint8 nf4()" in repr(found)
    other = layout({"w": fsdp.Precision(main=Halves()), "*": fsdp.Precision()})
    assert other.hash != found.hash != layout({"w": fsdp.Precision(main=fsdp.nf4(32)), "*": fsdp.Precision()}).hash
    assert [leaf.numel for b in other.buckets.values() if b.packed for leaf in b.leaves] == [64 * 64]


def test_what_is_said_of_it() -> None:
    assert str(fsdp.Precision(main=fsdp.nf4)) == "main nf4(), compute as the leaf, frozen"
    found = fsdp.Precision(main=fsdp.mxfp8(), compute=torch.bfloat16).resolve(torch.float32)
    assert str(found) == "main mxfp8(), compute bfloat16, frozen"


def test_what_is_refused_of_a_spec() -> None:
    packed = {"w": fsdp.Precision(main=fsdp.nf4), "*": fsdp.Precision()}
    params = {"w": torch.ones(64, 64), "b": torch.ones(3)}
    with pytest.raises(fsdp.SpecError, match=r"'w' is marked trainable, and it is packed by nf4\(\)"):
        fsdp.make_layout(params, fsdp.Spec({"data": 4}, precision=packed, trainable={"*": True}))
    with pytest.raises(fsdp.SpecError, match=r"Precision\(main=nf4\(\)\) is of frozen leaves"):
        fsdp.Precision(main=fsdp.nf4, gather=torch.bfloat16, compute=torch.bfloat16)
    other = fsdp.Spec({"data": 4}, precision={"w": fsdp.Precision(main=fsdp.int8), "*": fsdp.Precision()})
    with pytest.raises(fsdp.SpecError, match=r"'w' is packed already, by nf4\(\)\. Leave main out"):
        fsdp.make_layout({**params, "w": weight()}, other)


def test_leaves_that_are_packed_stay_so_or_are_unpacked() -> None:
    params = {"w": weight(), "b": torch.ones(3)}
    kept = fsdp.make_layout(params, fsdp.Spec({"data": 4}))
    assert [leaf.path for b in kept.buckets.values() if b.packed for leaf in b.leaves] == ["w"]
    plain = fsdp.make_layout(params, fsdp.Spec({"data": 4}, precision=fsdp.Precision(main=torch.float32)))
    assert not any(b.packed for b in plain.buckets.values())


@dataclass(frozen=True)
class Planed(Halves):
    """Planes of which a run of blocks is no slice along dim 0: `shape` of so many blocks."""

    form: Callable[[int], tuple[int, ...]] = lambda blocks: (blocks,)

    def planes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"data": (self.form(prod(shape) // 2), torch.uint8)}


@pytest.mark.parametrize(("form", "said"), [
    (lambda blocks: (2, blocks), "'data' is [2, 1] of one block (2 elements), and [2, 2] of two"),
    (lambda blocks: (1,), "'data' is [1] of one block (2 elements), and [1] of two"),
    (lambda blocks: (), "'data' is [] of one block (2 elements), and [] of two"),
])  # fmt: skip
def test_planes_that_are_not_cut_along_their_first_dim_are_no_wire(form: Any, said: str) -> None:
    with pytest.raises(fsdp.SpecError, match=re.escape(said)):
        fsdp.Precision(wire=Planed(form=form))
    fsdp.Precision(wire=Planed(form=lambda blocks: (blocks, 3)))
