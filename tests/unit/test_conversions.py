"""Where in files the elements of a leaf lie: by plain torch on whole tensors, and by a rank's runs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import functional_fsdp as fsdp
from functional_fsdp._io.conversions import Concatenated, Conversion, Sliced, Stacked, Transposed
from functional_fsdp._io.pieces import blocks, pieces

Tensors = dict[str, torch.Tensor]


def in_memory(said: Conversion, shape: tuple[int, ...], held: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The leaf that a conversion means, of whole leaves of the file."""
    if isinstance(said, str):
        return held[said]
    if isinstance(said, Stacked):
        inner = shape[: said.dim] + shape[said.dim + 1 :]
        if not said.parts:
            return torch.empty(shape)
        return torch.stack([in_memory(part, inner, held) for part in said.parts], said.dim)
    if isinstance(said, Concatenated):
        sizes = said.sizes or (shape[said.dim] // len(said.parts),) * len(said.parts)
        shapes = [(*shape[: said.dim], n, *shape[said.dim + 1 :]) for n in sizes]
        return torch.cat([in_memory(part, s, held) for part, s in zip(said.parts, shapes, strict=True)], said.dim)
    if isinstance(said, Transposed):
        order = [*shape]
        order[said.dim0], order[said.dim1] = order[said.dim1], order[said.dim0]
        return in_memory(said.part, tuple(order), held).transpose(said.dim0, said.dim1)
    whole = (*shape[: said.dim], said.of, *shape[said.dim + 1 :])
    return in_memory(said.part, whole, held).narrow(said.dim, said.start, shape[said.dim])


def drawn(draw: Any, shape: tuple[int, ...], names: list[str], depth: int = 3) -> Conversion:
    """Any conversion of a leaf of that shape."""
    kinds = ["name"]
    if depth and shape:
        kinds += ["stacked", "concatenated", "transposed", "sliced"]
    kind = draw(st.sampled_from(kinds))
    if kind == "name":
        names.append(f"leaf.{len(names)}")
        return names[-1]
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "stacked":
        inner = shape[:dim] + shape[dim + 1 :]
        return Stacked((drawn(draw, inner, names, depth - 1) for _ in range(shape[dim])), dim)
    if kind == "concatenated":
        cut = draw(st.integers(0, shape[dim]))
        sizes = (cut, shape[dim] - cut)
        parts = [drawn(draw, (*shape[:dim], n, *shape[dim + 1 :]), names, depth - 1) for n in sizes]
        return Concatenated(parts, dim, () if cut * 2 == shape[dim] else sizes)
    if kind == "transposed":
        other = draw(st.integers(0, len(shape) - 1))
        order = [*shape]
        order[dim], order[other] = order[other], order[dim]
        return Transposed(drawn(draw, tuple(order), names, depth - 1), dim, other)
    part: Conversion = f"leaf.{len(names)}"
    names.append(str(part))
    if draw(st.booleans()):
        part = Transposed(part, 0, len(shape) - 1)
    start, more = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return Sliced(part, start, start + shape[dim] + more, dim)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_written_by_runs_is_read_by_others_and_is_what_torch_has(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    names: list[str] = []
    said = drawn(data.draw, shape, names)
    leaf = torch.randn(shape)
    flat, cuts = leaf.flatten(), st.lists(st.integers(0, leaf.numel()), max_size=4)
    most = data.draw(st.sampled_from([1, 3, 1 << 24]))
    found = pieces("leaf", shape, said)
    assert sorted(piece.name for piece in found) == sorted(names)
    held = {piece.name: torch.full(piece.shape, torch.nan) for piece in found}
    seen = torch.zeros(leaf.numel(), dtype=torch.int64)
    for start, stop in runs(data.draw(cuts), leaf.numel()):
        for piece in found:
            for block in blocks(piece, start, stop, most):
                there = flat.as_strided(block.sizes, block.strides, block.memory)
                assert 0 < block.numel <= most
                held[piece.name].view(-1)[block.file : block.file + block.numel] = there.reshape(-1)
                places = torch.arange(leaf.numel()).as_strided(block.sizes, block.strides, block.memory)
                assert start <= int(places.min()) <= int(places.max()) < stop
                seen[places] += 1
    assert torch.equal(seen, torch.ones_like(seen))
    assert torch.equal(in_memory(said, shape, held), leaf)
    back = torch.full_like(flat, torch.nan)
    for start, stop in runs(data.draw(cuts), leaf.numel()):
        for piece in found:
            for block in blocks(piece, start, stop, most):
                values = held[piece.name].view(-1)[block.file : block.file + block.numel]
                back.as_strided(block.sizes, block.strides, block.memory).copy_(values.view(block.sizes))
    assert torch.equal(back, flat)


def runs(cuts: list[int], numel: int) -> list[tuple[int, int]]:
    ends = [0, *sorted(cuts), numel]
    return [*pairwise(ends)]


def test_a_plain_leaf_and_a_stacked_one_are_read_end_to_end() -> None:
    (plain,) = pieces("w", (4, 5, 6), "w")
    assert [block.numel for block in blocks(plain, 7, 113)] == [106]
    assert [block.numel for block in blocks(plain, 7, 113, most=50)] == [50, 50, 6]
    both = Stacked(Concatenated([f"{e}.w1", f"{e}.w3"]) for e in range(4))
    found = {piece.name: [*blocks(piece, 25, 60)] for piece in pieces("w", (4, 4, 5), both)}
    assert {name: [(b.file, b.memory, b.numel) for b in some] for name, some in found.items() if some} == {
        "1.w1": [(5, 25, 5)],
        "1.w3": [(0, 30, 10)],
        "2.w1": [(0, 40, 10)],
        "2.w3": [(0, 50, 10)],
    }


def test_a_transposed_leaf_is_one_block_whole_and_one_a_row_of_the_file_else() -> None:
    (turned,) = pieces("w", (4, 3), Transposed("w"))
    assert [block.numel for block in blocks(turned, 0, 12)] == [12]
    assert [(block.file, block.numel) for block in blocks(turned, 3, 9)] == [(1, 2), (5, 2), (9, 2)]
    assert [block.file for block in blocks(turned, 2, 7)] == [8, 1, 5, 9, 2]


REFUSED: dict[str, tuple[Any, str]] = {
    "parts": (Stacked(["a", "b"]), r"'w' is \[3, 4\], and Stacked has 2 parts for the 3 elements along its dim 0"),
    "uneven": (Concatenated(["a", "b"]), r"Concatenated has 2 parts of one size for the 3 elements along its dim 0"),
    "sizes": (Concatenated(["a", "b"], 1, [1, 2]), r"has 2 parts of \[1, 2\] for the 4 elements along its dim 1"),
    "dim": (Transposed("a", 0, 2), r"Transposed has dim 2 of \[3, 4\], which has 2 dims"),
    "beyond": (Sliced("a", 2, of=4), r"Sliced takes 3 elements from 2 on along dim 0, of 4"),
    "several": (Sliced(Stacked(["a", "b", "c"]), 0, of=4), r"a slice along dim 0 of Stacked is of several leaves"),
    "concatenated": (
        Sliced(Concatenated(["a", "b", "c"], 0, [4, 4, 4]), 0, of=12),
        r"a slice along dim 0 of Concatenated",
    ),
    "kind": (7, r"'w' is \[3, 4\], and a int is said of it; expected a name in the file, Stacked"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_leaf_is_refused(case: str) -> None:
    said, text = REFUSED[case]
    with pytest.raises(fsdp.SpecError, match=text):
        pieces("w", (3, 4), said)


def test_parts_are_several() -> None:
    with pytest.raises(fsdp.SpecError, match="Stacked: got the one name 'abc'; expected several names"):
        Stacked("abc")
    with pytest.raises(fsdp.SpecError, match="Concatenated: got 2 parts, 3 sizes"):
        Concatenated(["a", "b"], sizes=[1, 2, 3])
    assert Stacked(name for name in "ab") == Stacked(["a", "b"])
