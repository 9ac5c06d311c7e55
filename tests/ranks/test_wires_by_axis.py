"""Gradients that travel in few bits along one axis only: sums by hand, bytes, what is owed and who carries it."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.wired import Net, batch, loss_fn

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._spec.codec import Form

Tree = dict[str, torch.Tensor]
SHAPES = {"a.w": (48, 40), "a.b": (7,), "b.w": (3, 200)}
BOTH = ("replica", "shard")
PLACEMENTS: dict[str, fsdp.Placement] = {
    "hsdp": fsdp.hsdp(*BOTH),
    "hfsdp": fsdp.hfsdp(*BOTH),
    "ddp": fsdp.Placement(data=BOTH),
    "zero1": fsdp.Placement(main=BOTH),
    "zero3": fsdp.Placement(weights=BOTH, grads=BOTH, main=BOTH),
}


def wired(codec: Any = fsdp.fp8_block, feedback: bool = True, axis: str = "replica", **more: Any) -> fsdp.Precision:
    return fsdp.Precision(wire={axis: codec}, feedback=feedback, **more)


def gradients(step: int, rank: int) -> Tree:
    seeded = torch.Generator().manual_seed(100 * step + rank)
    return {
        path: torch.randn(shape, generator=seeded) * torch.rand(shape, generator=seeded)
        for path, shape in SHAPES.items()
    }


def zeros(placement: str, precision: fsdp.Precision, average: Any, **spec: Any) -> fsdp.State:
    mesh: Any = fsdp.local_mesh(replica=2, shard=2)
    given = fsdp.Spec(mesh, PLACEMENTS[placement], precision=precision, average=average, **spec)
    return fsdp.shard({path: torch.zeros(shape) for path, shape in SHAPES.items()}, given, fsdp.sgd(lr=0.0))


def whole_of(trees: Any) -> Tree:
    found: Tree = {}
    for buffer in trees.values():
        found |= fsdp.extend.gather_leaves(buffer)
    return found


def owed(state: fsdp.State) -> Tree:
    """What residuals add to a step's gradients, whole."""
    found: Tree = {}
    for buffer in state.residual.values():
        ends = {axis: fsdp.Replicated for axis, _ in buffer.states}
        local = buffer.redistribute(ends, average=state.spec.average).local
        found |= {leaf.path: local[leaf.offset :][: leaf.numel].view(leaf.shape) for leaf in buffer.bucket.leaves}
    return found


def reduced(
    placement: str, precision: fsdp.Precision, average: str, steps: int, micro: int, transport: str = "collective"
) -> list[tuple[Tree, Tree]]:
    """Of each step the gradients, whole, and what is owed."""
    state = zeros(placement, precision, average, transport=transport)
    found = []
    for step in range(steps):
        for k in range(micro):
            grads = gradients(step + 10 * k, dist.get_rank())
            state = fsdp.reduce(state, grads, last_microbatch=k == micro - 1)
        state = fsdp.finish_reductions(state)
        whole = whole_of(state.grads)
        state = fsdp.step(state)
        found.append((whole, owed(state)))
    return found


@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize("feedback", [True, False])
def test_sums_are_of_sums_over_the_fast_axis_that_are_packed(feedback: bool, average: str) -> None:
    """Every bit: sums along "shard", in float32, are packed, and added up along "replica"."""
    precision, steps = wired(feedback=feedback, sum="fp32"), 3
    found = launch(reduced, ("hfsdp", precision, average, steps, 1), nprocs=4, simulate=True)
    two = torch.full((), 2.0)
    left = [{path: torch.zeros(shape) for path, shape in SHAPES.items()} for _ in range(2)]
    for step in range(steps):
        for path, shape in SHAPES.items():
            form, sent = Form(fsdp.fp8_block(), shape, torch.float32), []
            for replica in range(2):
                each = [gradients(step, 2 * replica + shard)[path] for shard in range(2)]
                value = (each[0] + each[1]) / two if average == "mean" else each[0] + each[1]
                value = value + left[replica][path]
                sent.append(form.unpack(form.pack(value)))
                if feedback:
                    left[replica][path] = value - sent[-1]
            right = (sent[0] + sent[1]) / two if average == "mean" else sent[0] + sent[1]
            for rank in found:
                assert torch.equal(rank[step][0][path], right), path


@pytest.mark.parametrize("average", ["mean", "sum"])
@pytest.mark.parametrize(
    ("placement", "axis", "micro", "more"),
    [
        ("hsdp", "replica", 1, {"sum": "fp32"}),
        ("hsdp", "replica", 2, {}),
        ("hsdp", "shard", 2, {}),
        ("hfsdp", "replica", 2, {"compute": torch.bfloat16}),
        ("ddp", "shard", 1, {"sum": "fp32"}),
        ("ddp", "replica", 2, {}),
        ("zero1", "replica", 2, {}),
        ("zero3", "replica", 1, {}),
    ],
)
def test_nothing_is_lost_but_late(placement: str, axis: str, micro: int, more: Any, average: str) -> None:
    """What gradients add up to over steps, and what is still owed, is what they are."""
    steps = 4
    found = launch(reduced, (placement, wired(axis=axis, **more), average, steps, micro), nprocs=4, simulate=True)
    near = 1e-4 if "compute" not in more else 0.1
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
    found = [
        launch(reduced, ("hsdp", wired(sum="fp32"), "mean", 2, 1, transport), nprocs=4, simulate=True)
        for transport in ("collective", "copy_engine")
    ]
    for one, other in zip(*found, strict=True):
        for (a, left), (b, lost) in zip(one, other, strict=True):
            assert all(torch.equal(a[path], b[path]) and torch.equal(left[path], lost[path]) for path in SHAPES)
    with pytest.raises(fsdp.SpecError, match="the transport 'copy_engine' does not move packed gradients"):
        fsdp.make_layout({"w": torch.zeros(8)}, fsdp.Spec(
            {"replica": 2, "shard": 2}, fsdp.hsdp(*BOTH), precision=wired(axis="shard"), transport="copy_engine"
        ))  # fmt: skip


def sent(precision: fsdp.Precision) -> None:
    params = {"w": torch.zeros(256, 512, dtype=torch.bfloat16)}
    mesh: Any = fsdp.local_mesh(replica=2, shard=2)
    state = fsdp.shard(params, fsdp.Spec(mesh, fsdp.hsdp(*BOTH), precision=precision), fsdp.sgd(lr=0.1))
    fsdp.finish_reductions(fsdp.reduce(state, params))


def test_bytes_on_the_wire() -> None:
    """Along the fast axis as without; along the slow one 0.508 of them."""
    found = []
    for precision in (
        fsdp.Precision(compute=torch.bfloat16),
        fsdp.Precision(compute=torch.bfloat16, wire={"replica": fsdp.fp8_block}, feedback=True),
    ):
        with fsdp.simulate(replica=2, shard=2) as world:
            world(sent, precision)
            found.append([world.traffic.bytes(axis=axis) for axis in ("shard", "replica")])
    assert found[0][0] == found[1][0] > 0
    assert found[1][1] * 512 == found[0][1] * (256 + 4)


# ---------------------------------------------------------------- driven, and who carries what is owed


def start(precision: Any, placement: str = "hsdp", **spec: Any) -> tuple[fsdp.State, Any]:
    torch.manual_seed(0)
    mesh: Any = fsdp.local_mesh(replica=2, shard=2)
    params, model = fsdp.functionalize(Net())
    given = fsdp.Spec(mesh, PLACEMENTS[placement], precision=precision, **spec)
    return fsdp.shard(params, given, fsdp.sgd(lr=0.1)), model


def local(state: fsdp.State) -> list[torch.Tensor]:
    return [buffer.local.clone() for buffer in state.residual.values()]


def carried(folder: Path, average: Any) -> None:
    state, model = start(wired(), average=average)
    forward_backward, rank = T.forward_backward(model, loss_fn), dist.get_rank()

    def stepped(state: fsdp.State, step: int) -> fsdp.State:
        return fsdp.step(forward_backward(state, batch(step, rank))[0])

    def same(a: fsdp.State, b: list[torch.Tensor]) -> None:
        assert all(map(torch.equal, local(a), b))
        assert any(one.any() for one in b)

    state = stepped(state, 0)
    assert all(one.numel() == b.numel // 2 for one, b in zip(local(state), state.layout.buckets.values(), strict=True))
    before, owing = local(state), owed(state)
    forward_backward(state, batch(7, rank))  # a step that is not taken
    same(state, before)
    same(fsdp.step(forward_backward(copy.deepcopy(state), batch(1, rank))[0], skip=torch.tensor(True)), before)
    fsdp.save(state, folder / "a")
    copies = [
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        fsdp.load(folder / "a", like=start(wired(), average=average)[0]),
        fsdp.load(folder / "a", state.spec, fsdp.sgd(lr=0.1)),
        fsdp.replace_params(state, fsdp.full_params(state)),
    ]
    for one in copies:
        same(one, before)
    mesh: Any = state.spec.mesh
    others = [("hsdp", "replica"), ("hfsdp", "replica"), ("hsdp", "shard"), ("ddp", "replica"), ("hsdp", "replica")]
    moved = copies.pop(0)
    for placement, axis in others:
        loaded = fsdp.load(folder / "a", like=start(wired(axis=axis), placement, average=average)[0])
        given = fsdp.Spec(mesh, PLACEMENTS[placement], precision=wired(axis=axis), average=average)
        moved = fsdp.redistribute(moved, given)
        for path, right in owing.items():
            for one in (loaded, moved):
                assert torch.allclose(owed(one)[path], right, atol=1e-8), (placement, axis, path)
    every = fsdp.redistribute(moved, fsdp.Spec(mesh, PLACEMENTS["hsdp"], average=average, precision=fsdp.Precision(
        wire=fsdp.fp8_block, feedback=True)))  # fmt: skip
    loaded = fsdp.load(folder / "a", like=every)
    for path, right in owing.items():
        assert torch.allclose(owed(every)[path], right, atol=1e-8)
        assert torch.allclose(owed(loaded)[path], right, atol=1e-8)
    state = stepped(state, 1)
    for one in copies:
        same(stepped(one, 1), local(state))
    errors, right_of = T.wire_error(state), owed(state)
    for path, (bias, norm) in errors.items():
        assert norm > 0
        mean = right_of[path].mean() / (1 if average == "mean" else 2)
        assert bias.item() == pytest.approx(mean.item(), abs=1e-6 * norm.item())


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_copies_files_layouts_and_skipped_steps_carry_what_is_owed(average: str, tmp_path: Path) -> None:
    launch(carried, (tmp_path, average), nprocs=4, simulate=True)


def driven(precision: fsdp.Precision, schedule: fsdp.Schedule) -> tuple[list[float], Tree]:
    state, model = start(precision, schedule=schedule)
    forward_backward, losses = T.accumulate(T.forward_backward(model, loss_fn), 2), []
    for step in range(4):
        state, loss = forward_backward(state, batch(step, dist.get_rank()))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss.item())
    return losses, fsdp.full_params(state)


@pytest.mark.parametrize(
    "schedule", [fsdp.Schedule(), fsdp.Schedule(debug=True), fsdp.Schedule(overlap_update=True)], ids=str
)
def test_driven_steps(schedule: fsdp.Schedule) -> None:
    found = launch(driven, (wired(), schedule), nprocs=4, simulate=True)
    plain = launch(driven, (fsdp.Precision(), schedule), nprocs=4, simulate=True)
    assert found[0][0] == pytest.approx(plain[0][0], rel=1e-3)
    assert found[0][0] != plain[0][0]
    assert all(torch.equal(found[0][1][path], one[1][path]) for one in found for path in one[1])


# ---------------------------------------------------------------- what is said, and refused


def test_what_is_said() -> None:
    one = wired(compute=torch.bfloat16)
    text = "wire bfloat16, over replica fp8_block(block=256) with feedback, sum native"
    assert text in str(one.resolve(torch.float32))
    assert "wire fp8_block(block=256) over replica with feedback" in str(one)
    assert one == wired(compute=torch.bfloat16)
    assert hash(one) == hash(wired(compute=torch.bfloat16))
    leaf = {"w": torch.zeros(1024)}
    hashes = {
        fsdp.make_layout(leaf, fsdp.Spec({"replica": 2, "shard": 2}, fsdp.hsdp(*BOTH), precision=precision)).hash
        for precision in (one, wired(axis="shard", compute=torch.bfloat16))
    }
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ({}, "expected one axis of the mesh and a codec"),
        ({"replica": torch.bfloat16}, "expected one axis of the mesh and a codec"),
        ({"a": fsdp.fp8_block, "b": fsdp.fp8_block}, "expected one axis of the mesh and a codec"),
        ({"replica": fsdp.int8}, "it packs all of a tensor at once"),
    ],
)
def test_what_a_precision_cannot_be(wire: Any, said: str) -> None:
    with pytest.raises(fsdp.SpecError, match=re.escape(said)):
        fsdp.Precision(wire=wire)


def test_an_axis_that_gradients_are_not_reduced_along_is_refused() -> None:
    with pytest.raises(fsdp.SpecError, match="the leaf 'w': its gradients are reduced along 'data'"):
        fsdp.make_layout({"w": torch.zeros(8)}, fsdp.Spec({"data": 2}, precision=wired()))
