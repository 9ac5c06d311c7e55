"""Gradients that travel in few bits, along all axes or one: sums by hand, bytes, what is lost and comes later, who
carries it."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS
from support.problems import mesh_and_placement
from support.ranks import each_rank
from support.tables import each, product
from support.wired import Net, batch, loss_fn

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._spec.precision import Form

Tree = dict[str, torch.Tensor]
SHAPES = {"a.w": (48, 40), "a.b": (7,), "b.w": (3, 200)}
CODECS = {"fp8_block": fsdp.fp8_block(), "int8": fsdp.int8(64), "mxfp8": fsdp.mxfp8(), "nf4": fsdp.nf4()}
BOTH = ("replica", "shard")
ON_BOTH = {
    "ddp on both": fsdp.Placement(data=BOTH),
    "zero1 on both": fsdp.Placement(main=BOTH),
    "zero3 on both": fsdp.Placement(weights=BOTH, grads=BOTH, main=BOTH),
}


def wired(codec: Any = "fp8_block", feedback: bool = True, axis: str = "", **more: Any) -> fsdp.Precision:
    """Packed along one axis, or along all."""
    codec = CODECS.get(codec, codec)
    return fsdp.Precision(wire={axis: codec} if axis else codec, feedback=feedback, **more)


def spec_of(placement: str, precision: Any, **spec: Any) -> fsdp.Spec:
    if placement in ON_BOTH:
        mesh: Any = fsdp.local_mesh(replica=2, shard=2)
        return fsdp.Spec(mesh, ON_BOTH[placement], precision=precision, **spec)
    mesh, placed = mesh_and_placement(placement)
    return fsdp.Spec(mesh, placed, precision=precision, **spec)


def start(placement: str, precision: Any, **spec: Any) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    params, model = fsdp.functionalize(Net())
    return fsdp.shard(params, spec_of(placement, precision, **spec), fsdp.sgd(lr=0.1)), model


def left(state: fsdp.State) -> Tree:
    """This rank's part of what is owed."""
    return {s.leaf.path: s.local.clone() for b in state.residual.values() for s in fsdp.extend.leaf_shards(b)}


def owed(state: fsdp.State) -> Tree:
    """What residuals add to a step's gradients, whole."""
    found: Tree = {}
    for buffer in state.residual.values():
        ends = {axis: fsdp.Replicated for axis, _ in buffer.states}
        local = buffer.redistribute(ends, average=state.spec.average).local
        found |= {leaf.path: local[leaf.offset :][: leaf.numel].view(leaf.shape) for leaf in buffer.bucket.leaves}
    return found


# ---------------------------------------------------------------- by hand


def gradients(step: int, rank: int) -> Tree:
    """Of blocks of other sizes, some zero."""
    seeded = torch.Generator().manual_seed(100 * step + rank)
    found = {
        path: torch.randn(shape, generator=seeded) * torch.rand(shape, generator=seeded)
        for path, shape in SHAPES.items()
    }
    found["a.w"][:3] *= 1e-4
    found["b.w"][1] = 0
    return found


def reduced(
    placement: str, precision: Any, average: Any, steps: int, micro: int = 1, transport: str = "collective"
) -> list[tuple[Tree, Tree, Tree]]:
    """Of each step the gradients and what is owed, whole, and this rank's part of it."""
    spec = spec_of(placement, precision, average=average, transport=transport)
    state = fsdp.shard({path: torch.zeros(shape) for path, shape in SHAPES.items()}, spec, fsdp.sgd(lr=0.0))
    found = []
    for step in range(steps):
        for k in range(micro):
            grads = gradients(step + 10 * k, dist.get_rank())
            state = fsdp.reduce(state, grads, last_microbatch=k == micro - 1)
        state = fsdp.finish_reductions(state)
        whole: Tree = {}
        for buffer in state.grads.values():
            whole |= fsdp.extend.gather_leaves(buffer)
        state = fsdp.step(state)
        found.append((whole, owed(state), left(state)))
    return found


ALL_AXES = [("zero3", "", codec, ((0,), (1,), (2,))) for codec in CODECS]
FAST_AXIS = [("hfsdp", "replica", "fp8_block", ((0, 1), (2, 3)))]


@pytest.mark.parametrize(("row", "feedback", "average"), product(ALL_AXES + FAST_AXIS, [True, False], ["mean", "sum"]))
def test_sums_are_of_packed_values_in_the_order_of_ranks(row: Any, feedback: bool, average: str) -> None:
    """Every bit: the sum of each group, in float32, is packed; what it stands for is added up, and divided."""
    placement, axis, codec, groups = row
    precision, steps = wired(codec, feedback, axis, sum="fp32"), 3
    ranks = sum(map(len, groups))
    found = launch(reduced, (placement, precision, average, steps), nprocs=ranks, simulate=True)
    lost = [{path: torch.zeros(shape) for path, shape in SHAPES.items()} for _ in groups]
    mean = (lambda t, n: t / torch.full((), float(n))) if average == "mean" else (lambda t, n: t)
    for step, (path, shape) in itertools.product(range(steps), SHAPES.items()):
        form, sent = Form(CODECS[codec], shape, torch.float32), []
        for owing, group in zip(lost, groups, strict=True):
            value = mean(sum(gradients(step, rank)[path] for rank in group), len(group)) + owing[path]
            sent.append(form.unpack(form.pack(value)))
            owing[path] = value - sent[-1] if feedback else owing[path]
        right = mean(sum(sent), len(groups))
        assert all(torch.equal(rank[step][0][path], right) for rank in found), path
        if feedback and not axis:
            mine = [rank[step][2][path].view(shape) for rank in found]
            assert all(torch.equal(one, owing[path]) for one, owing in zip(mine, lost, strict=True))
    assert bool(found[0][0][2]) is feedback


LATE: list[tuple[str, str, int, dict[str, Any]]] = [
    *((preset, "", 1, {}) for preset in PRESETS),
    ("hsdp", "replica", 1, {"sum": "fp32"}),
    ("hsdp", "replica", 2, {}),
    ("hsdp", "shard", 2, {}),
    ("hfsdp", "replica", 2, {"compute": torch.bfloat16}),
    ("ddp on both", "shard", 1, {"sum": "fp32"}),
    ("ddp on both", "replica", 2, {}),
    ("zero1 on both", "replica", 2, {}),
    ("zero3 on both", "replica", 1, {}),
]


@pytest.mark.parametrize(("row", "average"), each(LATE, ["mean", "sum"]))
def test_nothing_is_lost_but_late(row: Any, average: str) -> None:
    """What gradients add up to over steps, and what is still owed, is what they are: in every strategy."""
    placement, axis, micro, more = row
    steps, near = 6 if not axis else 4, 0.1 if "compute" in more else 1e-4 if axis else 1e-5
    found = launch(reduced, (placement, wired(axis=axis, **more), average, steps, micro), nprocs=4, simulate=True)
    for path in SHAPES:
        every = [gradients(s + 10 * k, r)[path].double() for s in range(steps) for k in range(micro) for r in range(4)]
        right = torch.stack(every).sum(0) / (4 if average == "mean" else 1)
        came = torch.stack([found[0][s][0][path].double() for s in range(steps)]).sum(0)
        assert torch.allclose(came + found[0][-1][1][path], right, atol=near), path
        assert (came - right).abs().max() > 1e-4, "packed"
        for rank in found:
            assert all(torch.equal(one[0][path], other[0][path]) for one, other in zip(rank, found[0], strict=True))


def test_copy_engines_reduce_along_the_fast_axis() -> None:
    """The second hop is a collective's, of packed bytes."""
    precision = wired(axis="replica", sum="fp32")
    found = [
        launch(reduced, ("hsdp", precision, "mean", 2, 1, transport), nprocs=4, simulate=True)
        for transport in ("collective", "copy_engine")
    ]
    for one, other in zip(*found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert all(torch.equal(a[path], b[path]) for a, b in zip(mine, theirs, strict=True) for path in a)


# ---------------------------------------------------------------- driven


def driven(placement: str, precision: Any, steps: int, micro: int = 1, **spec: Any) -> tuple[list[float], Tree]:
    state, model = start(placement, precision, **spec)
    forward_backward: Any = T.accumulate(T.forward_backward(model, loss_fn), micro)
    losses = []
    for step in range(steps):
        state, loss = forward_backward(state, batch(step, dist.get_rank()))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


@cache
def plainly(placement: str, ranks: int, steps: int, micro: int = 1) -> tuple[list[float], Tree]:
    return launch(driven, (placement, fsdp.Precision(), steps, micro), nprocs=ranks, simulate=True)[0]


def far(a: Tree, b: Tree) -> float:
    return sum((a[path] - b[path]).square().sum().item() for path in a) ** 0.5


@pytest.mark.parametrize("preset", ["zero3", pytest.param("ddp", marks=pytest.mark.large), "hsdp"])
def test_each_run_has_the_same_bits_and_feedback_stays_nearer(preset: str) -> None:
    steps, ranks = 8, 4 if preset == "hsdp" else 2
    with_it, again, without = (
        launch(driven, (preset, wired("nf4", on), steps), nprocs=ranks, simulate=True) for on in (True, True, False)
    )
    plain = plainly(preset, ranks, steps)[1]
    for (losses, params), (twice, others) in zip(with_it, again, strict=True):
        assert losses == twice
        assert all(torch.equal(params[path], others[path]) for path in params)
        assert all(torch.equal(params[path], with_it[0][1][path]) for path in params)
    assert far(with_it[0][1], plain) < 0.5 * far(without[0][1], plain)


SCHEDULES = [fsdp.Schedule(), fsdp.Schedule(debug=True), fsdp.Schedule(overlap_update=True)]


@pytest.mark.parametrize(
    ("where", "schedule"), each([("zero1", "", 2), ("hsdp", "", 4), ("hsdp", "replica", 4)], SCHEDULES)
)
def test_microbatches_and_schedules(where: Any, schedule: fsdp.Schedule) -> None:
    placement, axis, ranks = where
    given = placement, wired(axis=axis), 4, 2
    found = launch(driven, given, {"schedule": schedule}, nprocs=ranks, simulate=True)
    losses, _ = plainly(placement, ranks, 4, 2)
    assert found[0][0] == pytest.approx(losses, rel=1e-3)
    assert found[0][0] != losses
    assert all(torch.equal(found[0][1][path], one[1][path]) for one in found for path in one[1])


def sent(placement: str, precision: fsdp.Precision) -> None:
    params = {"w": torch.zeros(256, 512, dtype=torch.bfloat16)}
    state = fsdp.shard(params, spec_of(placement, precision), fsdp.sgd(lr=0.1))
    fsdp.finish_reductions(fsdp.reduce(state, params))


def traffic(placement: str, precision: fsdp.Precision, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of gradients by axis."""
    with fsdp.simulate(**sizes) as world:  # type: ignore[arg-type]
        world(sent, placement, precision)
        return {axis: world.traffic.bytes(lane="reduce", axis=axis) for axis in sizes}


def test_bytes_on_the_wire() -> None:
    """A scale of 4 bytes for 256 elements; along an axis that does not pack, as without."""
    half = fsdp.Precision(compute=torch.bfloat16)
    for preset in ("zero3", "zero2", "ddp"):
        plain, packed = (traffic(preset, one, {"data": 4})["data"] for one in (half, wired(compute=torch.bfloat16)))
        assert plain == 4 * 2 * (256 * 512 * 3 // 4) * (2 if preset == "ddp" else 1)
        assert packed * 512 == plain * (256 + 4)
    both = {"replica": 2, "shard": 2}
    there, mine = (traffic("hsdp", one, both) for one in (half, wired(axis="replica", compute=torch.bfloat16)))
    assert there["shard"] == mine["shard"] > 0
    assert mine["replica"] * 512 == there["replica"] * (256 + 4)


# ---------------------------------------------------------------- who carries the residual


@pytest.mark.parametrize(
    ("ranks", "placement", "axis", "average"),
    [
        (2, "zero3", "", "mean"),
        pytest.param(4, "hsdp", "replica", "mean", marks=pytest.mark.large),
        (4, "hsdp", "replica", "sum"),
    ],
)
@each_rank("ranks")
def test_copies_files_layouts_and_skipped_steps_carry_it(
    ranks: int, placement: str, axis: str, average: Any, tmp_path: Path
) -> None:
    precision, more = wired(axis=axis), {"average": average}
    state, model = start(placement, precision, **more)
    forward_backward, rank = T.forward_backward(model, loss_fn), dist.get_rank()

    def stepped(state: fsdp.State, step: int) -> fsdp.State:
        return fsdp.step(forward_backward(state, batch(step, rank))[0])

    def same(a: fsdp.State, b: Tree) -> None:
        found = left(a)
        assert all(torch.equal(one, b[path]) for path, one in found.items())
        assert any(one.any() for one in b.values())

    state = stepped(state, 0)
    assert not axis or sum(b.local.numel() for b in state.residual.values()) * 2 == sum(
        b.numel for b in state.layout.buckets.values()
    )
    before, owing = left(state), owed(state)
    forward_backward(state, batch(7, rank))  # a step that is not taken
    same(state, before)
    same(fsdp.step(forward_backward(copy.deepcopy(state), batch(1, rank))[0], skip=torch.tensor(True)), before)
    poisoned, found = T.any_nonfinite(forward_backward(copy.deepcopy(state), batch(1, rank) * float("nan"))[0])
    same(fsdp.step(poisoned, skip=found), before)
    fsdp.save(state, tmp_path / "a")
    moved, *copies = (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        fsdp.load(tmp_path / "a", like=start(placement, precision, **more)[0]),
        fsdp.load(tmp_path / "a", state.spec, fsdp.sgd(lr=0.1)),
        fsdp.replace_params(state, fsdp.full_params(state)),
    )
    for one in (moved, *copies):
        same(one, before)
    others = [("hfsdp", axis), ("hsdp", "shard"), ("ddp on both", axis), ("hsdp", axis), ("hsdp", "")]
    for there, along in others if axis else [("ddp", "")]:
        loaded = fsdp.load(tmp_path / "a", like=start(there, wired(axis=along), **more)[0])
        moved = fsdp.redistribute(moved, spec_of(there, wired(axis=along), **more))
        for path, right in owing.items():
            for one in (loaded, moved):
                assert torch.allclose(owed(one)[path], right, atol=1e-8), (there, along, path)
    if not axis:
        same(moved, before)
    state = stepped(state, 1)
    after, params = left(state), fsdp.full_params(state)
    for one in copies:
        again = stepped(one, 1)
        same(again, after)
        assert all(torch.equal(p, params[path]) for path, p in fsdp.full_params(again).items())
    right_of = owed(state)
    for path, (bias, norm) in T.wire_error(state).items():
        mean = right_of[path].mean() / (1 if average == "mean" else 2 if axis else ranks)
        assert norm > 0
        assert bias.item() == pytest.approx(mean.item(), abs=1e-6 * norm.item())
    frozen = fsdp.freeze(state, "blocks.0.*")
    same(frozen, after)
    assert {one.bucket.leaves[0].path.split(".")[1] for one in frozen.residual.values()} == {"1"}
    trainable = dict(frozen.spec.trainable)
    assert not fsdp.redistribute(frozen, spec_of(placement, fsdp.Precision(), **more, trainable=trainable)).residual


def read_again(folder: Path, average: str, steps: int) -> Tree:
    """What ranks together owe, as it counts in a step. From a folder, or after steps, into it."""
    state, model = start("zero3", wired(), average=average)
    if steps:
        for step in range(steps):
            state = fsdp.step(T.forward_backward(model, loss_fn)(state, batch(step, dist.get_rank()))[0])
        fsdp.save(state, folder)
    else:
        state = fsdp.load(folder, like=state)
    return owed(state)


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_another_number_of_ranks_owes_as_much(average: str, tmp_path: Path) -> None:
    right = launch(read_again, (tmp_path / "a", average, 2), nprocs=3, simulate=True)[0]
    for ranks in (1, 2, 4):
        for found in launch(read_again, (tmp_path / "a", average, 0), nprocs=ranks, simulate=True):
            for path, one in found.items():
                assert torch.allclose(one, right[path], rtol=1e-4, atol=1e-9)
                assert right[path].any()


@each_rank(2)
def test_checkpoints_without_it_and_states_without_it(tmp_path: Path) -> None:
    state, _ = start("zero3", fsdp.Precision())
    fsdp.save(state, tmp_path / "plain")
    loaded = fsdp.load(tmp_path / "plain", like=start("zero3", wired())[0])
    assert not any(b.local.any() for b in loaded.residual.values())
    state, model = start("zero3", wired())
    state = fsdp.step(T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))[0])
    fsdp.save(state, tmp_path / "packed")
    assert not fsdp.load(tmp_path / "packed", like=start("zero3", fsdp.Precision())[0]).residual


@pytest.mark.parametrize("average", ["mean", "sum"])
@each_rank(4)
def test_what_replicas_owe_is_read_where_one_state_goes_on(average: Any, tmp_path: Path) -> None:
    """Two replicas with the same weights, each of which owes what its own gradients have lost, go on as one state on
    all ranks; and as replicas of one rank each."""
    mesh, precision, rank = fsdp.local_mesh(replica=2, shard=2), wired(), dist.get_rank()
    folder = tmp_path / "saved"

    def made(mesh: Any, placement: Any) -> fsdp.State:
        spec = fsdp.Spec(mesh, placement, precision=precision, average=average)
        return fsdp.shard({path: torch.zeros(shape) for path, shape in SHAPES.items()}, spec, fsdp.sgd(lr=0.0))

    state = made(mesh, fsdp.zero3("shard"))
    state = fsdp.step(fsdp.reduce(state, gradients(0, rank)))
    fsdp.save(state, folder)
    with pytest.raises(fsdp.SpecError, match="other ranks have leaves of their own"):
        fsdp.load(folder, like=made(mesh, fsdp.hsdp("replica", "shard")))
    own = owed(state)
    for placement in (fsdp.hsdp("replica", "shard"), fsdp.zero1("replica", "shard")):
        loaded = fsdp.load(folder, like=made(mesh, placement), allow=["replicas"])
        moved = fsdp.redistribute(copy.deepcopy(state), loaded.spec, allow=["replicas"])
        for path, right in owed(moved).items():
            assert right.any()
            assert torch.allclose(owed(loaded)[path], right, rtol=1e-2, atol=1e-7), path
    more = fsdp.local_mesh(replica=4, shard=1)
    found = owed(fsdp.load(folder, like=made(more, fsdp.zero3("shard")), allow=["replicas"]))
    there: list[Any] = [None] * 4
    dist.all_gather_object(there, own)  # of ranks 0 and 1 what the first replica owes, of 2 and 3 the second
    for path, one in found.items():
        assert torch.allclose(one, there[2 * (rank % 2)][path], rtol=1e-2, atol=1e-7), path


@pytest.mark.parametrize(("ranks", "placement", "axis"), [(2, "zero3", ""), (2, "ddp", ""), (4, "hsdp", "replica")])
@each_rank("ranks")
def test_what_is_no_gradient_of_the_step_leaves_it(ranks: int, placement: str, axis: str) -> None:
    """What is sent, and is no gradient of a step that is taken."""
    state, model = start(placement, wired("nf4", axis=axis), units=["blocks.*"])
    rank = dist.get_rank()
    forward_backward = T.forward_backward(model, loss_fn)
    state = fsdp.step(forward_backward(state, batch(0, rank))[0])
    before = {path: lost for path, lost in left(state).items() if lost.numel()}
    assert all(lost.any() for lost in before.values())
    some = T.forward_backward(model, lambda model, x: loss_fn(model.blocks[1], model.blocks[0][0](x)))
    began, norms = T.norms(some(copy.deepcopy(state), batch(1, rank))[0])
    took, weights = fsdp.step(began), fsdp.full_params(state)
    after, moved = left(took), fsdp.full_params(took)
    for path, lost in before.items():  # leaves that got no gradient owe what they did, and norms are of what was sent
        idle = path.startswith("blocks.0.2.")
        assert torch.equal(lost, after[path]) == torch.equal(weights[path], moved[path]) == idle, path
        assert norms[path] > 0

    bare = start(placement, wired("nf4", feedback=False, axis=axis), units=["blocks.*"])[0]
    bare = fsdp.replace_params(bare, fsdp.full_params(state))
    v = {name: buffer.but(torch.ones_like(buffer.local)) for name, buffer in state.main.items()}
    (_, (_, right)), (state, (_, found)) = (T.hvp(model, loss_fn)(one, v, batch(1, rank)) for one in (bare, state))
    assert all(torch.equal(found[name].local, buffer.local) for name, buffer in right.items())
    twin = fsdp.step(forward_backward(copy.deepcopy(state), batch(2, rank))[0])
    began, _ = forward_backward(state, batch(2, rank))
    began, _ = T.hvp(model, loss_fn)(began, v, batch(1, rank))
    there = forward_backward(fsdp.replace_params(state, fsdp.full_params(state)), batch(2, rank))[0]
    for one in (began, fsdp.replace_grads(copy.deepcopy(state), fsdp.finish_reductions(there))):
        other = left(fsdp.step(one))
        assert all(torch.equal(other[path], lost) for path, lost in left(twin).items())


def errors() -> tuple[dict[str, Any], Tree]:
    state, model = start("zero3", wired())
    state = fsdp.step(T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))[0])
    return {path: (one.bias, one.norm) for path, one in T.wire_error(state).items()}, left(state)


def test_errors_are_reported_by_leaf() -> None:
    ranks = launch(errors, (), nprocs=2, simulate=True)
    for found, _ in ranks:
        for path, (bias, norm) in found.items():
            every = torch.stack([mine[path] for _, mine in ranks])
            assert norm == pytest.approx(every.norm().item(), rel=1e-4)
            assert bias == pytest.approx(every.mean().item(), abs=1e-6 * norm.item())
            assert norm > 0
    assert "residual" in repr(start("zero3", wired())[0])
    with pytest.raises(fsdp.ScheduleError, match="no leaf of this state keeps what its wire loses"):
        T.wire_error(start("zero3", wired(feedback=False))[0])


# ---------------------------------------------------------------- what is said, and refused


def layout(spec: fsdp.Spec) -> fsdp.Layout:
    return fsdp.make_layout({path: torch.zeros(shape) for path, shape in SHAPES.items()}, spec)


def test_blocks_are_of_one_leaf_and_one_slice_and_padding_is_printed() -> None:
    found = layout(fsdp.Spec({"data": 3}, precision=wired()))
    for bucket in found.buckets.values():
        assert all(leaf.offset % 256 == 0 for leaf in bucket.leaves)
        assert bucket.numel % (3 * 256) == 0
        assert bucket.wire_bytes(bucket.numel) == bucket.numel + bucket.numel // 256 * 4
    assert found.padding() > 0.1
    assert layout(fsdp.Spec({"data": 3}, precision=wired(feedback=False))).hash != found.hash
    on_two = {"replica": 2, "shard": 2}, fsdp.hsdp(*BOTH)
    assert len({layout(fsdp.Spec(*on_two, precision=wired(axis=axis))).hash for axis in ("", *BOTH)}) == 3


def test_what_is_said() -> None:
    whole, one = wired(compute=torch.bfloat16), wired(axis="replica", compute=torch.bfloat16)
    text = "main float32, compute bfloat16, grads float32, wire fp8_block(block=256) with feedback, sum fp32"
    assert str(whole.resolve(torch.float32)) == text
    assert "wire fp8_block(block=256) with feedback" in str(whole)
    text = "wire bfloat16, over replica fp8_block(block=256) with feedback, sum native"
    assert text in str(one.resolve(torch.float32))
    assert "wire fp8_block(block=256) over replica with feedback" in str(one)
    again = wired(axis="replica", compute=torch.bfloat16)
    assert (one, hash(one)) == (again, hash(again))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wire": torch.bfloat16, "feedback": True}, "feedback is of wires in a codec"),
        ({"feedback": 1}, "Precision(feedback=1): expected True or False"),
        ({"wire": fsdp.int8()}, "it packs all of a tensor at once, and ranks are sent parts"),
        ({"wire": fsdp.nf4(nested=True)}, "it packs all of a tensor at once"),
        ({"wire": {"replica": fsdp.int8}}, "it packs all of a tensor at once"),
        ({"wire": fsdp.fp8_block, "sum": "native"}, "backends do not add up packed numbers"),
        ({"wire": {}}, "expected one axis of the mesh and a codec"),
        ({"wire": {"replica": torch.bfloat16}}, "expected one axis of the mesh and a codec"),
        ({"wire": {"a": fsdp.fp8_block, "b": fsdp.fp8_block}}, "expected one axis of the mesh and a codec"),
    ],
)
def test_what_a_precision_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fsdp.SpecError, match=re.escape(said)):
        fsdp.Precision(**given)


FAR = fsdp.zero3("data", memory_kind="pinned_host")
ON_TWO: dict[str, Any] = {"placement": fsdp.hsdp(*BOTH), "precision": wired(axis="shard"), "transport": "copy_engine"}


@pytest.mark.parametrize(
    ("sizes", "given", "said"),
    [
        ({"data": 2}, {"transport": "copy_engine"}, "the transport 'copy_engine' does not move packed gradients"),
        ({"data": 2}, {"transport": "symmetric"}, "the transport 'symmetric' does not move packed gradients"),
        ({"replica": 2, "shard": 2}, ON_TWO, "the transport 'copy_engine' does not move packed gradients"),
        ({"data": 2}, {"placement": FAR}, "its state lies in the host's memory"),
        ({"data": 2}, {"precision": wired(axis="replica")}, "the leaf 'w': its gradients are reduced along 'data'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sizes: dict[str, int], given: dict[str, Any], said: str) -> None:
    with pytest.raises(fsdp.SpecError, match=said):
        fsdp.make_layout({"w": torch.zeros(8, 8)}, fsdp.Spec(sizes, **{"precision": wired(), **given}))


def test_float64_and_steps_that_are_compiled_whole_are_refused() -> None:
    with pytest.raises(fsdp.SpecError, match="of a leaf that compute sees in float64"):
        fsdp.make_layout({"w": torch.zeros(8, dtype=torch.float64)}, fsdp.Spec({"data": 2}, precision=wired()))
    state, model = start("zero3", wired())
    forward_backward = T.forward_backward(model, loss_fn)
    with pytest.raises(fsdp.ScheduleError, match="compiled whole does not send gradients in a codec"):
        T.compile(lambda state, x: fsdp.step(forward_backward(state, x)[0]))(state, batch(0, 0))
