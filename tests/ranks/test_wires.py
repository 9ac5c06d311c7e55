"""Gradients that travel in few bits: sums by hand, bits of each run, what is lost and comes later, who carries it."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS
from support.problems import mesh_and_placement
from support.tables import each, product
from support.wired import Net, batch, loss_fn

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._spec.codec import Form

Tree = dict[str, torch.Tensor]
SHAPES = {"a.w": (48, 40), "a.b": (7,), "b.w": (3, 200)}
CODECS = {"fp8_block": fsdp.fp8_block(), "int8": fsdp.int8(64), "mxfp8": fsdp.mxfp8(), "nf4": fsdp.nf4()}


def wired(codec: Any = "fp8_block", feedback: bool = True, **more: Any) -> fsdp.Precision:
    return fsdp.Precision(wire=CODECS.get(codec, codec), feedback=feedback, **more)


def start(preset: str, precision: Any, **spec: Any) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(Net())
    return fsdp.shard(params, fsdp.Spec(mesh, placement, precision=precision, **spec), fsdp.sgd(lr=0.1)), model


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


def reduced(preset: str, codec: str, feedback: bool, average: str, steps: int) -> list[tuple[Tree, Tree]]:
    """Of each step this rank's parts of the gradients, whole, and its residuals."""
    mesh, placement = mesh_and_placement(preset)
    spec = fsdp.Spec(mesh, placement, precision=wired(codec, feedback), average=average)  # type: ignore[arg-type]
    state = fsdp.shard({path: torch.zeros(shape) for path, shape in SHAPES.items()}, spec, fsdp.sgd(lr=0.0))
    found = []
    for step in range(steps):
        state = fsdp.finish_reductions(fsdp.reduce(state, gradients(step, dist.get_rank())))
        whole: Tree = {}
        for buffer in state.grads.values():
            whole |= fsdp.extend.gather_leaves(buffer)
        state = fsdp.step(state)
        left = {s.leaf.path: s.local.clone() for b in state.residual.values() for s in fsdp.extend.leaf_shards(b)}
        found.append((whole, left))
    return found


@pytest.mark.parametrize(("codec", "feedback", "average"), product(CODECS, [True, False], ["mean", "sum"]))
def test_sums_are_of_packed_values_in_the_order_of_ranks(codec: str, feedback: bool, average: str) -> None:
    """Every bit: what each rank packs is unpacked, added up in float32, and divided."""
    ranks, steps = 3, 3
    found = launch(reduced, ("zero3", codec, feedback, average, steps), nprocs=ranks, simulate=True)
    left = [{path: torch.zeros(shape) for path, shape in SHAPES.items()} for _ in range(ranks)]
    for step in range(steps):
        for path, shape in SHAPES.items():
            form = Form(CODECS[codec], shape, torch.float32)
            values = [gradients(step, rank)[path] + left[rank][path] for rank in range(ranks)]
            sent = [form.unpack(form.pack(value)) for value in values]
            total = (sent[0] + sent[1]) + sent[2]
            right = total / torch.full((), 3.0) if average == "mean" else total
            for rank in range(ranks):
                assert torch.equal(found[rank][step][0][path], right), path
                if feedback:
                    left[rank][path] = values[rank] - sent[rank]
                    assert torch.equal(found[rank][step][1][path].view(shape), left[rank][path])
    assert bool(found[0][0][1]) is feedback


@pytest.mark.parametrize(("preset", "average"), each(PRESETS, ["mean", "sum"]))
def test_nothing_is_lost_but_late(preset: str, average: str) -> None:
    """What gradients add up to over steps, and what is still owed, is what they are: in every strategy."""
    ranks, steps = 4, 6
    found = launch(reduced, (preset, "fp8_block", True, average, steps), nprocs=ranks, simulate=True)
    for path in SHAPES:
        right = torch.stack([gradients(s, r)[path].double() for s in range(steps) for r in range(ranks)]).sum(0)
        came = torch.stack([found[0][s][0][path].double() for s in range(steps)]).sum(0)
        owed = torch.stack([found[r][-1][1][path].double() for r in range(ranks)]).sum(0).view(right.shape)
        if average == "mean":
            right, owed = right / ranks, owed / ranks
        assert torch.allclose(came + owed, right, atol=1e-5), path
        assert (came - right).abs().max() > 1e-4, "packed"
        for rank in range(ranks):
            assert torch.equal(found[rank][-1][0][path], found[0][-1][0][path])


# ---------------------------------------------------------------- driven


def driven(preset: str, precision: fsdp.Precision, steps: int, micro: int = 1, **spec: Any) -> tuple[list[float], Tree]:
    state, model = start(preset, precision, **spec)
    forward_backward: Any = T.forward_backward(model, loss_fn)
    if micro > 1:
        forward_backward = T.accumulate(forward_backward, micro)
    losses = []
    for step in range(steps):
        state, loss = forward_backward(state, batch(step, dist.get_rank()))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


def far(a: Tree, b: Tree) -> float:
    return sum((a[path] - b[path]).square().sum().item() for path in a) ** 0.5


@pytest.mark.parametrize("preset", ["zero3", "ddp", "hsdp"])
def test_each_run_has_the_same_bits_and_feedback_stays_nearer(preset: str) -> None:
    steps, ranks = 8, 4 if preset == "hsdp" else 2
    runs = [
        launch(driven, (preset, wired("nf4", on), steps), nprocs=ranks, simulate=True) for on in (True, True, False)
    ]
    plain = launch(driven, (preset, fsdp.Precision(), steps), nprocs=ranks, simulate=True)[0][1]
    with_it, again, without = runs
    for (losses, params), (twice, others) in zip(with_it, again, strict=True):
        assert losses == twice
        assert all(torch.equal(params[path], others[path]) for path in params)
        assert all(torch.equal(params[path], with_it[0][1][path]) for path in params)
    assert far(with_it[0][1], plain) < 0.5 * far(without[0][1], plain)


@pytest.mark.parametrize("preset", ["zero1", "hsdp"])
@pytest.mark.parametrize(
    "schedule", [fsdp.Schedule(), fsdp.Schedule(debug=True), fsdp.Schedule(overlap_update=True)], ids=str
)
def test_microbatches_and_schedules(preset: str, schedule: fsdp.Schedule) -> None:
    ranks = 4 if preset == "hsdp" else 2
    found = launch(driven, (preset, wired(), 4, 2), {"schedule": schedule}, nprocs=ranks, simulate=True)
    plain = launch(driven, (preset, fsdp.Precision(), 4, 2), nprocs=ranks, simulate=True)
    assert found[0][0] == pytest.approx(plain[0][0], rel=1e-3)
    assert all(torch.equal(found[0][1][path], one[1][path]) for one in found for path in one[1])


def sent(preset: str, precision: fsdp.Precision) -> None:
    mesh, placement = mesh_and_placement(preset)
    params = {"w": torch.zeros(256, 512, dtype=torch.bfloat16)}
    state = fsdp.shard(params, fsdp.Spec(mesh, placement, precision=precision), fsdp.sgd(lr=0.1))
    fsdp.finish_reductions(fsdp.reduce(state, params))


@pytest.mark.parametrize("preset", ["zero3", "zero2", "ddp"])
def test_bytes_on_the_wire(preset: str) -> None:
    half, found = fsdp.Precision(compute=torch.bfloat16), []
    for precision in (half, fsdp.Precision(compute=torch.bfloat16, wire=fsdp.fp8_block, feedback=True)):
        with fsdp.simulate(data=4) as world:
            world(sent, preset, precision)
            found.append(world.traffic.bytes(lane="reduce"))
    assert found[0] == 4 * 2 * (256 * 512 * 3 // 4) * (2 if preset == "ddp" else 1)
    assert found[1] == found[0] * (256 + 4) // 512
    assert found[1] <= 0.51 * found[0]


# ---------------------------------------------------------------- who carries the residual


def carried(folder: Path) -> None:
    state, model = start("zero3", wired())
    forward_backward = T.forward_backward(model, loss_fn)
    rank = dist.get_rank()

    def stepped(state: fsdp.State, step: int) -> fsdp.State:
        return fsdp.step(forward_backward(state, batch(step, rank))[0])

    def left(state: fsdp.State) -> Tree:
        return {s.leaf.path: s.local.clone() for b in state.residual.values() for s in fsdp.extend.leaf_shards(b)}

    def same(a: fsdp.State, b: Tree) -> None:
        assert all(torch.equal(one, b[path]) for path, one in left(a).items())
        assert any(one.any() for one in b.values())

    state = stepped(state, 0)
    before = left(state)
    forward_backward(state, batch(7, rank))  # a step that is not taken
    same(state, before)
    skipped = fsdp.step(forward_backward(copy.deepcopy(state), batch(1, rank))[0], skip=torch.tensor(True))
    same(skipped, before)
    poisoned, found = T.any_nonfinite(forward_backward(copy.deepcopy(state), batch(1, rank) * float("nan"))[0])
    same(fsdp.step(poisoned, skip=found), before)
    fsdp.save(state, folder / "a")
    copies = [
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        fsdp.load(folder / "a", like=start("zero3", wired())[0]),
    ]
    copies += [
        fsdp.load(folder / "a", state.spec, fsdp.sgd(lr=0.1)),
        fsdp.replace_params(state, fsdp.full_params(state)),
    ]
    for one in copies:
        same(one, before)
    mesh: Any = state.spec.mesh
    moved = fsdp.redistribute(copies[0], fsdp.Spec(mesh, fsdp.ddp("data"), precision=wired()))
    same(moved, before)
    state = stepped(state, 1)
    after, params = left(state), fsdp.full_params(state)
    for one in copies[1:]:
        again = stepped(one, 1)
        same(again, after)
        assert all(torch.equal(p, params[path]) for path, p in fsdp.full_params(again).items())
    frozen = fsdp.freeze(state, "blocks.0.*")
    same(frozen, after)
    assert {b.leaves[0].path.split(".")[1] for b in (one.bucket for one in frozen.residual.values())} == {"1"}
    plain = fsdp.redistribute(frozen, fsdp.Spec(mesh, trainable=dict(frozen.spec.trainable)))
    assert not plain.residual


def test_copies_files_layouts_and_skipped_steps_carry_it(tmp_path: Path) -> None:
    launch(carried, (tmp_path,), nprocs=2, simulate=True)


def owed(folder: Path | None, average: str, steps: int) -> Tree:
    """What ranks together owe, as it counts in a step. From a folder, or after steps, into it."""
    state, model = start("zero3", wired(), average=average)
    if steps:
        for step in range(steps):
            state = fsdp.step(T.forward_backward(model, loss_fn)(state, batch(step, dist.get_rank()))[0])
        fsdp.save(state, folder)  # type: ignore[arg-type]
    else:
        state = fsdp.load(folder, like=state)  # type: ignore[arg-type]
    found = {s.leaf.path: s.local.clone() for b in state.residual.values() for s in fsdp.extend.leaf_shards(b)}
    state, found = fsdp.psum(state, found) if average == "sum" else fsdp.pmean(state, found)
    return found


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_another_number_of_ranks_owes_as_much(average: str, tmp_path: Path) -> None:
    right = launch(owed, (tmp_path / "a", average, 2), nprocs=3, simulate=True)[0]
    for ranks in (1, 2, 4):
        for found in launch(owed, (tmp_path / "a", average, 0), nprocs=ranks, simulate=True):
            for path, one in found.items():
                assert torch.allclose(one, right[path], rtol=1e-4, atol=1e-9)
                assert right[path].any()


def old(folder: Path) -> None:
    state, _ = start("zero3", fsdp.Precision())
    fsdp.save(state, folder / "plain")
    loaded = fsdp.load(folder / "plain", like=start("zero3", wired())[0])
    assert not any(b.local.any() for b in loaded.residual.values())
    state, model = start("zero3", wired())
    state = fsdp.step(T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))[0])
    fsdp.save(state, folder / "packed")
    assert not fsdp.load(folder / "packed", like=start("zero3", fsdp.Precision())[0]).residual


def test_checkpoints_without_it_and_states_without_it(tmp_path: Path) -> None:
    launch(old, (tmp_path,), nprocs=2, simulate=True)


def errors() -> tuple[dict[str, Any], Tree]:
    state, model = start("zero3", wired())
    state = fsdp.step(T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))[0])
    found = {path: (one.bias, one.norm) for path, one in T.wire_error(state).items()}
    return found, {s.leaf.path: s.local.clone() for b in state.residual.values() for s in fsdp.extend.leaf_shards(b)}


def test_errors_are_reported_by_leaf() -> None:
    ranks = launch(errors, (), nprocs=2, simulate=True)
    for found, _ in ranks:
        for path, (bias, norm) in found.items():
            every = torch.stack([left[path] for _, left in ranks])
            assert norm == pytest.approx(every.norm().item(), rel=1e-4)
            assert bias == pytest.approx(every.mean().item(), abs=1e-6 * norm.item())
            assert norm > 0
    assert "residual" in repr(start("zero3", wired())[0])
    with pytest.raises(fsdp.ScheduleError, match="no leaf of this state keeps what its wire loses"):
        T.wire_error(start("zero3", wired(feedback=False))[0])


# ---------------------------------------------------------------- what is said, and refused


def test_blocks_are_of_one_leaf_and_one_slice_and_padding_is_printed() -> None:
    layout = fsdp.make_layout(
        {path: torch.zeros(shape) for path, shape in SHAPES.items()}, fsdp.Spec({"data": 3}, precision=wired())
    )
    for bucket in layout.buckets.values():
        assert all(leaf.offset % 256 == 0 for leaf in bucket.leaves)
        assert bucket.numel % (3 * 256) == 0
        assert bucket.wire_bytes(bucket.numel) == bucket.numel + bucket.numel // 256 * 4
    assert layout.padding() > 0.1
    without = fsdp.Spec({"data": 3}, precision=wired(feedback=False))
    assert fsdp.make_layout({path: torch.zeros(shape) for path, shape in SHAPES.items()}, without).hash != layout.hash
    text = "main float32, compute bfloat16, grads float32, wire fp8_block(block=256) with feedback, sum fp32"
    assert str(wired(compute=torch.bfloat16).resolve(torch.float32)) == text
    assert "wire fp8_block(block=256) with feedback" in str(wired())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wire": torch.bfloat16, "feedback": True}, "feedback is of wires in a codec"),
        ({"feedback": 1}, "Precision(feedback=1): expected True or False"),
        ({"wire": fsdp.int8()}, "it packs all of a tensor at once, and ranks are sent parts"),
        ({"wire": fsdp.nf4(nested=True)}, "it packs all of a tensor at once"),
        ({"wire": fsdp.fp8_block, "sum": "native"}, "backends do not add up packed numbers"),
    ],
)
def test_what_a_precision_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(fsdp.SpecError, match=re.escape(said)):
        fsdp.Precision(**given)


def test_what_cannot_be_is_refused_by_name() -> None:
    leaf = {"w": torch.zeros(8, 8)}
    with pytest.raises(fsdp.SpecError, match="the transport 'copy_engine' does not move packed gradients"):
        fsdp.make_layout(leaf, fsdp.Spec({"data": 2}, precision=wired(), transport="copy_engine"))
    with pytest.raises(fsdp.SpecError, match="the transport 'symmetric' does not move packed gradients"):
        fsdp.make_layout(leaf, fsdp.Spec({"data": 2}, precision=wired(), transport="symmetric"))
    with pytest.raises(fsdp.SpecError, match="of a leaf that compute sees in float64"):
        fsdp.make_layout({"w": torch.zeros(8, dtype=torch.float64)}, fsdp.Spec({"data": 2}, precision=wired()))
    far_away = fsdp.zero3("data", memory_kind="pinned_host")
    with pytest.raises(fsdp.SpecError, match="its state lies in the host's memory"):
        fsdp.make_layout(leaf, fsdp.Spec({"data": 2}, far_away, precision=wired()))
    state, model = start("zero3", wired())
    forward_backward = T.forward_backward(model, loss_fn)

    def step(state: fsdp.State, x: torch.Tensor) -> Any:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    with pytest.raises(fsdp.ScheduleError, match="compiled whole does not send gradients in a codec"):
        T.compile(step)(state, batch(0, 0))
