"""Owners of matrices: a plan that every rank makes alike, by which shards become whole matrices and shards again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.presets import AXES

import functional_fsdp as fsdp
from functional_fsdp import Spec, SpecError
from functional_fsdp._optim_extra.muon import Hop, Moves, Owners, Slices
from functional_fsdp._plan.layout import Bucket

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


def layout(shapes: dict[str, tuple[int, ...]], preset: str, sizes: Sequence[int], **spec: object) -> list[Bucket]:
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    mesh = dict(zip(AXES[preset], sizes, strict=True))
    made = fsdp.make_layout(params, Spec(mesh, getattr(fsdp, preset)(*AXES[preset]), **spec))  # type: ignore[arg-type]
    return [*made.trainable.values()]


def ordered(flat: list[int], order: Slices) -> list[int]:
    return [x for a, b in order for x in flat[a:b]]


def exchanged(have: list[list[int]], hops: list[Hop], axis: int, sizes: Sequence[int], back: bool) -> list[list[int]]:
    """What an all-to-all along an axis makes of what the ranks have, as the records' splits have it."""
    stride = math.prod(sizes[axis + 1 :])
    found = []
    for rank in range(len(have)):
        place = rank // stride % sizes[axis]
        mine: list[int] = []
        for s in range(sizes[axis]):
            peer = rank + (s - place) * stride
            sent = hops[peer].came if back else hops[peer].sent
            begin = sum(sent[:place])
            mine += have[peer][begin : begin + sent[place]]
        came = hops[rank].sent if back else hops[rank].came
        assert len(mine) == sum(came)
        assert max(len(mine), len(have[rank])) <= hops[rank].most
        found.append(mine)
    return found


@given(SHAPES, st.sampled_from(["zero3", "zero1", "hsdp", "hfsdp"]), st.integers(1, 4), st.integers(1, 4), st.data())
def test_shards_become_whole_matrices_and_shards_again(
    shapes: list[tuple[int, int]], preset: str, one: int, two: int, data: st.DataObject
) -> None:
    sizes = (one,) if len(AXES[preset]) == 1 else (one, two)
    named: dict[str, tuple[int, ...]] = {f"blocks.{i // 3}.{i}": shape for i, shape in enumerate(shapes)}
    buckets = layout(named, preset, sizes)
    every = fsdp.muon().owners(buckets)
    lacks = data.draw(st.sets(st.sampled_from(sorted(named)), max_size=2))
    names = tuple(b.name for b in buckets if data.draw(st.booleans()))
    given = tuple(
        (b.name, tuple(leaf.path not in lacks for leaf in b.leaves))
        for b in buckets
        if any(leaf.path in lacks for leaf in b.leaves)
    )
    wanted = {leaf.path for b in buckets if b.name in names for leaf in b.leaves} - lacks
    assert len(every) == 1
    (owners,) = every
    axes, ns = [axis for axis, _ in owners.axes], [n for _, n in owners.axes]
    coordinates = []
    for rank in range(owners.ranks):
        at = {axis: rank // math.prod(ns[k + 1 :]) % ns[k] for k, axis in enumerate(axes)}
        coordinates.append(tuple({**dict.fromkeys(AXES[preset], 0), **at}.items()))
    moves: list[Moves] = [owners.moves(names, given, here) for here in coordinates]
    # elements of all buckets in a row: bucket k has numbers from base[k] on
    base, n = {}, 0
    for bucket in buckets:
        base[bucket.name], n = n, n + bucket.numel
    whole = {
        leaf.path: list(range(base[b.name] + leaf.offset, base[b.name] + leaf.offset + leaf.numel))
        for b in buckets
        for leaf in b.leaves
    }
    sizes_of = {b.name: b.numel // owners.ranks for b in buckets}
    first = [
        [base[name] + rank * sizes_of[name] + i for name, a, b, _, _ in moves[rank].runs for i in range(a, b)]
        for rank in range(owners.ranks)
    ]
    held = first
    for k in range(len(axes)):
        hops = [one.hops[k] for one in moves]
        assert [hop.there.at(dict(here)) for hop, here in zip(hops, coordinates, strict=True)] == [
            (hop.came, hop.sent) for hop in hops
        ]
        held = exchanged([ordered(x, hop.order) for x, hop in zip(held, hops, strict=True)], hops, k, ns, False)
    found = []
    for rank, flat in enumerate(held):
        done = []
        for shape, pattern, slices in moves[rank].stacks:
            assert pattern is None
            stack = ordered(flat, slices)
            for i in range(0, len(stack), math.prod(shape)):
                found.append((rank, shape, stack[i : i + math.prod(shape)]))
            done += stack
        assert ordered(done, moves[rank].held) == flat
    of = {one.path: one.owner for one in owners.owned}
    assert sorted(map(str, found)) == sorted(str((of[p], named[p], whole[p])) for p in wanted)
    for k in reversed(range(len(axes))):
        hops = [one.hops[k] for one in moves]
        held = [ordered(x, h.undone) for x, h in zip(exchanged(held, hops, k, ns, True), hops, strict=True)]
    assert held == first


def llama(width: int, hidden: int, depth: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for i in range(depth):
        found |= {f"layers.{i}.{name}": (width, width) for name in ("q", "k", "v", "o")}
        found |= {f"layers.{i}.{name}": (hidden, width) for name in ("gate", "up")}
        found[f"layers.{i}.down"] = (width, hidden)
    return found


@pytest.mark.parametrize("ranks", [8, 64])
def test_loads_for_a_llama_of_7_billion_are_even(ranks: int) -> None:
    (owners,) = fsdp.muon().owners(layout(llama(4096, 11008, 32), "zero3", (ranks,)))
    loads = owners.loads()
    assert len(loads) == ranks
    assert max(loads) < 1.1 * sum(loads) / ranks
    assert min(loads) > 0.9 * sum(loads) / ranks
    small, large = 4096, 11008
    each = 4 * (4 * small * small * small + 2 * small**3) + 3 * (4 * small * small * large + 2 * small**3)
    assert sum(loads) == 5 * 32 * each


def test_equal_matrices_of_a_bucket_go_to_different_ranks() -> None:
    (owners,) = fsdp.muon().owners(layout(llama(64, 64, 4), "zero3", (7,)))
    by_bucket: dict[str, set[int]] = {}
    for one in owners.owned:
        by_bucket.setdefault(one.bucket, set()).add(one.owner)
    assert all(len(ranks) == 7 for ranks in by_bucket.values())


def test_owners_are_printed() -> None:
    (owners,) = fsdp.muon().owners(layout({"a": (8, 8), "b": (8, 8), "c": (4, 8)}, "zero3", (2,)))
    assert [line.rstrip() for line in repr(owners).splitlines()] == [
        "owners of 3 matrices along data 2",
        "rank  matrices  elements      work  of the mean",
        "----  --------  --------  --------  -----------",
        "0            2        96  1.86e+04        1.094",
        "1            1        64  1.54e+04        0.906",
    ]


def test_leaves_of_several_matrices_are_parted_where_they_lie_apart() -> None:
    shapes = {"qkv": (12, 5), "experts": (3, 4, 5), "woven": (5, 12)}
    labels = {"qkv": "qkv", "experts": "experts", "woven": "woven"}
    muon = fsdp.muon(
        matrices={
            "qkv": ("(k rows) columns -> k rows columns", {"k": 3}),
            "experts": "e rows columns -> e rows columns",
            "woven": ("rows (columns k) -> k rows columns", {"k": 3}),
        }
    )
    (owners,) = muon.owners(layout(shapes, "zero3", (2,), labels=labels))
    parts = {path: [o.part for o in owners.owned if o.path == path] for path in shapes}
    assert [(p.shape, p.start) for p in parts["qkv"]] == [((4, 5), 0), ((4, 5), 20), ((4, 5), 40)]
    assert [(p.shape, p.start) for p in parts["experts"]] == [((4, 5), 0), ((4, 5), 20), ((4, 5), 40)]
    assert [(p.shape, p.start, p.matrix) for p in parts["woven"]] == [((5, 12), 0, (5, 4))]
    assert parts["woven"][0].work == 3 * 5 * (4 * 4 * 4 * 5 + 2 * 4**3)


@pytest.mark.parametrize(
    ("shape", "matrices", "said"),
    [
        ((5,), None, r"the leaf 'a' has shape \[5\]; expected a matrix"),
        ((2, 3, 4), None, r"the leaf 'a' has shape \[2, 3, 4\]; expected a matrix"),
        ((5, 4), ("(k i) o -> k i o", {"k": 3}), r"'\(k i\) o -> k i o' does not fit the leaf 'a' of shape \[5, 4\]"),
        ((5, 4), "i o -> (i o)", "expected an einops pattern without parentheses on its right"),
    ],
)
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...], matrices: object, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        fsdp.muon(matrices=matrices).owners(layout({"a": shape}, "zero3", (2,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"lr": -1.0}, "muon: lr is -1.0"),
        ({"momentum": 1.0}, "muon: momentum is 1.0"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "expected three numbers"),
        ({"adjust_lr_fn": "best"}, "adjust_lr_fn is 'best'; expected one of None, 'original', 'match_rms_adamw'"),
        ({"ns_dtype": torch.int32}, "expected a floating dtype"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(numbers: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        fsdp.muon(**numbers)  # type: ignore[arg-type]
    assert isinstance(fsdp.muon().owners([]), tuple)
    assert not Owners((), (), ()).loads()[0]
