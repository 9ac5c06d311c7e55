"""The kernels of codecs, by hand on a CPU, beside the torch operations that serve there."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.triton_by_hand import by_kernels
from torch._subclasses import FakeTensorMode

import functional_fsdp as fsdp
from functional_fsdp._optim.adamw import AdamW
from functional_fsdp._spec.precision import Form
from functional_fsdp.codecs.blocks import CODE, CODES, dynamic_map
from functional_fsdp.codecs.packed_reductions import add_up, pack
from functional_fsdp.codecs.rows import Rows

KINDS: list[fsdp.Codec] = [
    fsdp.fp8_block(), fsdp.mxfp8(), fsdp.int4(), fsdp.nf4(), fsdp.dynamic8(), fsdp.dynamic8(signed=False), fsdp.int8(64)
]  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {"w": (9, 257), "b": (77,)}


@pytest.mark.parametrize("codec", KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 77, 4161])
def test_planes_and_numbers_have_the_bits_of_operations(codec: fsdp.Codec, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[n // 2 : n // 2 + 300] = 0
    for values in (x, 1e-39 * x, x.bfloat16(), x * torch.logspace(-40, 38, n)):
        for form in (Form(codec, (n,), torch.bfloat16), Form(Rows(codec), (n,), torch.float32)):
            right = form.pack(values)
            with by_kernels() as launched:
                bits = form.pack(values)
                found = form.unpack(bits)
            assert launched["_pack"].launches == launched["_unpack"].launches == 1
            assert torch.equal(bits, right)
            assert torch.equal(found, form.unpack(right))


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them."""
    return torch.stack((tensor, torch.zeros_like(tensor)), dim=1)[:, 0]


@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_elements_and_bytes_need_not_lie_side_by_side(codec: fsdp.Codec) -> None:
    x = torch.randn(40, 26, generator=torch.Generator().manual_seed(0))
    for values in (x[:, 3], x[:, ::2], x.t(), x[:1, :1].expand(9, 30)):
        for form in (Form(codec, tuple(values.shape), torch.float32), Form(Rows(codec), tuple(values.shape), x.dtype)):
            right = form.codec.pack(values.clone(memory_format=torch.contiguous_format))
            bits = form.bits_of(right, x.device)
            with by_kernels():
                planes = form.codec.pack(values)
                found = form.unpack(apart(bits))
                name = next(iter(right))  # numbers, or rows
                again = form.codec.unpack(right | {name: apart(right[name])}, form.shape, x.dtype)
            assert torch.equal(form.bits_of(planes, x.device), bits)
            assert torch.equal(found, form.unpack(bits))
            assert torch.equal(again, found)


@pytest.mark.parametrize("codec", [fsdp.nf4(nested=True), fsdp.int8()], ids=str)
def test_one_launch_reads_scales_that_are_packed_and_rows_of_any_length(codec: fsdp.Codec) -> None:
    for shape in ((33, 700), (5, 3), (0, 4), (1,)):
        form = Form(codec, shape, torch.float32)
        bits = form.pack(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        with by_kernels() as launched:
            found = form.unpack(bits)
        assert launched["_unpack"].launches == bool(found.numel())
        assert torch.equal(found, form.unpack(bits))


@pytest.mark.parametrize("codec", KINDS[:-3] + KINDS[-2:], ids=str)
def test_wires_and_their_sums_have_the_bits_of_operations(codec: fsdp.Codec) -> None:
    """Bytes, what is left, and the sum and the mean of three ranks' parts."""
    ranks, n, found = 3, 16 * codec.block, []
    seeded = torch.Generator().manual_seed(1)
    stage, before = (torch.randn(ranks * n, generator=seeded).bfloat16() for _ in range(2))
    nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in codec.planes((n,)).values())
    for way in (by_kernels(), nullcontext()):
        bits, after = torch.zeros(ranks * nbytes, dtype=torch.uint8), torch.zeros_like(before)
        sums = torch.empty(2, n)
        with way as launched:
            pack(codec, stage, bits, ranks, (before, after))
            add_up(codec, bits, ranks, sums[0], False)
            add_up(codec, bits, ranks, sums[1], True)
        assert launched is None or launched["_unpack"].launches >= 2
        found.append((bits, after, sums))
    assert all(map(torch.equal, *found))


def stepped(codec: fsdp.Codec, dtype: torch.dtype, lr: Any = 1e-2) -> tuple[dict[str, torch.Tensor], Any]:
    """Bytes of moments, by what they are of, and weights after steps of which one is skipped, and one has no gradient
    of a leaf: that is updated for itself from then on, its last block cut. First moments of it become smaller."""
    seeded = torch.Generator().manual_seed(0)
    params = {path: torch.randn(shape, generator=seeded) for path, shape in SHAPES.items()}
    first = {path: 1e-3 * torch.randn(shape, generator=seeded) for path, shape in SHAPES.items()}
    spec = fsdp.Spec(fsdp.local_mesh("cpu"), precision=fsdp.Precision(main=dtype, compute=dtype))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=lr, moments=codec))
    for step, size in enumerate((1.0, 5.0, 0.0, -0.5, 0.25)):
        grads: dict[str, Any] = {path: (size * grad).to(dtype) for path, grad in first.items()}
        grads |= {"b": None} if step == 2 else {}
        state = fsdp.step(fsdp.reduce(state, grads), skip=torch.tensor(step == 1))
    planes = {
        f"{which} {plane} {name}": buffer.local
        for which in ("mean", "square")
        for plane, tree in getattr(state.opt, which).items()
        for name, buffer in tree.items()
    }
    return planes, fsdp.full_params(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "codec", [fsdp.dynamic8(), fsdp.dynamic8(32), fsdp.fp8_block(128), fsdp.int8(64), fsdp.mxfp8()], ids=str
)
def test_an_update_is_one_launch_and_leaves_the_bits_of_operations(codec: fsdp.Codec, dtype: torch.dtype) -> None:
    found = []
    for way in (by_kernels(), patch.object(AdamW, "change", AdamW.plainly)):
        with way as launched:
            found.append(stepped(codec, dtype))
        assert not isinstance(launched, dict) or launched["_update"].launches == 9  # of 5 times 2 leaves one got none
    (planes, weights), (right, others) = found
    for name, plane in right.items():
        assert plane.any(), name
        assert torch.equal(planes[name], plane), name
    for path, other in others.items():
        assert torch.allclose(weights[path].float(), other.float(), rtol=1e-6 if dtype is torch.float32 else 2**-8)


def test_a_rate_may_come_in_any_dtype() -> None:
    """The kernel reads float32."""
    found = []
    for kind in (torch.float32, torch.float64):
        with by_kernels() as launched:
            rate = torch.tensor(1e-2, dtype=kind)
            found.append(stepped(fsdp.dynamic8(), torch.float32, lambda count, rate=rate: rate)[1])
        assert launched["_update"].launches == 9
    assert all(torch.allclose(found[1][path], p) for path, p in found[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compilers_know_the_dtype_of_a_codebook(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for mode in (FakeTensorMode(), nullcontext()):
            with mode:
                code = torch.ops.functional_fsdp.codebook("dynamic", torch.device("cpu"))
            assert (code.dtype, code.shape) == (torch.float32, (256,))
    finally:
        torch.set_default_dtype(before)


def test_codebooks_are_there_before_a_compiler_asks() -> None:
    """Of a base that came packed from a file nothing asks for one earlier."""
    with FakeTensorMode():
        assert {"nf4": CODE, "dynamic": dynamic_map(), "dynamic unsigned": dynamic_map(False)} == CODES
