"""Cuts of leaves along axes of the model's own: parts, boxes and conversions of whole tensors, for random cuts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_fsdp as fsdp
from functional_fsdp import Along, Concatenated, Stacked, Transposed
from functional_fsdp._axes import Cuts, boxes, cut_of, cuts_of, join, whole_shape
from functional_fsdp._io.conversions import part_of
from functional_fsdp._io.pieces import blocks, pieces

SIZES = {"tp": 2, "ep": 3}


@st.composite
def cut_leaves(draw: Any) -> tuple[torch.Tensor, Cuts]:
    """A whole leaf whose elements are numbers, and how it is cut along one axis or two, perhaps in one dim."""
    alongs, shape = [], [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    for axis in draw(st.permutations(["tp", "ep"]))[: draw(st.integers(1, 2))]:
        dim = draw(st.integers(0, len(shape) - 1))
        parts = draw(st.sampled_from([1, 2, 3, (2, 1), (4, 1, 1)]))
        alongs.append(Along(axis, dim - draw(st.sampled_from([0, len(shape)])), parts=parts))
        shape[dim] *= SIZES[axis] * sum(alongs[-1].shares) if dim < len(shape) else 1
    for one in alongs:  # whatever came before, it has to divide
        dim = one.dim % len(shape) if one.dim is not None else 0
        shape[dim] *= SIZES["tp"] * SIZES["ep"]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    return whole, cuts_of("w", shape, alongs, SIZES)[0]


def places(cuts: Cuts) -> list[dict[str, int]]:
    axes = [cut.axis for cut in cuts]
    return [dict(zip(axes, at, strict=True)) for at in itertools.product(*(range(cut.ranks) for cut in cuts))]


@settings(max_examples=40)
@given(cut_leaves())
def test_parts_are_disjoint_and_join_to_the_whole(case: tuple[torch.Tensor, Cuts]) -> None:
    whole, cuts = case
    held = {tuple(place.values()): cut_of(whole, cuts, place) for place in places(cuts)}
    assert torch.cat([part.flatten() for part in held.values()]).sort().values.equal(whole.flatten())
    assert {whole_shape(part.shape, cuts) for part in held.values()} == {tuple(whole.shape)}
    for i in reversed(range(len(cuts))):
        rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at in sorted(held):
            rows.setdefault(at[:i], []).append(held[at])
        held = {at: join(some, cuts[i]) for at, some in rows.items()}
    assert torch.equal(held[()], whole)


@settings(max_examples=40)
@given(cut_leaves())
def test_boxes_are_the_parts(case: tuple[torch.Tensor, Cuts]) -> None:
    whole, cuts = case
    for place in places(cuts):
        part = cut_of(whole, cuts, place)
        built = torch.full_like(part, -1)
        for there, here, size in boxes(whole.shape, cuts, place):
            mine = tuple(slice(a, a + n) for a, n in zip(here, size, strict=True))
            built[mine] = whole[tuple(slice(a, a + n) for a, n in zip(there, size, strict=True))]
        assert torch.equal(built, part)


def read(said: Any, path: str, shape: Any, files: dict[str, torch.Tensor]) -> torch.Tensor:
    found = torch.full((torch.Size(shape).numel(),), -1)
    for piece in pieces(path, shape, said):
        flat = files[piece.name].reshape(-1)
        for block in blocks(piece, 0, found.numel()):
            block.of(found, 0).copy_(flat[block.file : block.file + block.numel].view(block.sizes))
    return found.view(shape)


@settings(max_examples=40)
@given(cut_leaves(), st.sampled_from(["as it is", "transposed", "concatenated", "stacked"]), st.data())
def test_a_part_of_a_conversion_reads_the_part(case: tuple[torch.Tensor, Cuts], how: str, data: Any) -> None:
    whole, cuts = case
    dim = data.draw(st.integers(0, whole.ndim - 1))
    said: Any = "w"
    files = {"w": whole}
    if how == "transposed" and whole.ndim > 1:
        said, files = Transposed("w"), {"w": whole.transpose(0, 1).contiguous()}
    elif how == "concatenated":
        n = data.draw(st.sampled_from([k for k in (1, 2) if whole.shape[dim] % k == 0]))  # parts of one size
        said = Concatenated([f"w{k}" for k in range(n)], dim)
        files = {f"w{k}": part.contiguous() for k, part in enumerate(whole.chunk(n, dim))}
    elif how == "stacked":
        said = Stacked([f"w{k}" for k in range(whole.shape[dim])], dim)
        files = {f"w{k}": part.contiguous() for k, part in enumerate(whole.unbind(dim))}
    for place in places(cuts):
        part = cut_of(whole, cuts, place)
        try:
            mine = part_of(said, whole.shape, cuts, place)
            got = read(mine, "w", part.shape, files)
        except fsdp.SpecError as error:  # two cuts of one dim, of a leaf that files hold in parts along it
            if "Slice each part" not in str(error):
                raise
            return
        assert torch.equal(got, part)


def test_an_along_says_what_it_is() -> None:
    assert repr(Along("tp", 0, parts=(4, 1, 1))) == "Along('tp', 0, parts=(4, 1, 1))"
    assert str(Along("tp", grads="sum")) == "equal along tp, gradients summed"
    assert Along("tp", -1) == Along("tp", -1)
    with pytest.raises(fsdp.SpecError, match="expected the name of a mesh axis"):
        Along(3)  # type: ignore[arg-type]
