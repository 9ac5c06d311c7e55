"""stream, delta: weights to whoever runs them, unit by unit, and only what a step has changed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from support.peers import PeerModel, batch_of, loss_of
from support.ranks import each_rank
from support.streams import ordered
from support.tables import marked
from torch.distributed.device_mesh import DeviceMesh

import functional_fsdp as fsdp
from functional_fsdp import extend, launch
from functional_fsdp import transforms as T

CUT: dict[str, Any] = {
    "blocks.0.up.weight": fsdp.Transposed("kernel"),
    "blocks.0.norm.weight": fsdp.Sliced("both", 0, of=13),
    "blocks.0.up.bias": fsdp.Sliced("both", 6, of=13),
    "gate.weight": fsdp.Concatenated(["gate.a", "gate.b"], 1, sizes=[2, 4]),
}


LITTLE = {"blocks.0.norm.weight": True, "blocks.0.up.bias": True, "*": False}


def made(kind: str = "zero3", little: bool = False) -> tuple[fsdp.State, Any]:
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, getattr(fsdp, kind)("data"), trainable=LITTLE if little else {})
    return fsdp.init(PeerModel, spec, fsdp.adamw(lr=1e-2), seed=3)


def stepped(state: fsdp.State, model: Any, n: int = 1) -> fsdp.State:
    for step in range(n):
        state, _ = T.forward_backward(model, loss_of)(state, batch_of(step, dist.get_rank()))
        state = fsdp.step(state)
    return state


def all_of(state: fsdp.State, **how: Any) -> dict[str, torch.Tensor]:
    """What a stream gives, copied."""
    return {name: leaf.clone() for _, named in fsdp.stream(state, **how) for name, leaf in named.items()}


@pytest.mark.parametrize("kind", ["zero3", "zero1", "ddp"])
@each_rank(2)
def test_a_stream_has_the_names_and_bits_of_the_files(kind: str, tmp_path: Path) -> None:
    state = stepped(*made(kind))
    for name, cut, dtype in (("plain", None, None), ("cut", CUT, torch.bfloat16)):
        got: dict[str, torch.Tensor] = {}
        units = []
        for unit, named in fsdp.stream(state, dtype=dtype, convert=cut):
            units.append(unit)
            assert not got.keys() & named.keys()
            got |= named
        assert units == [*state.units, ""]
        fsdp.save_safetensors(state, tmp_path / name, dtype=dtype, convert=cut)
        held = load_file(tmp_path / name / "model.safetensors")
        assert held.keys() == got.keys()
        assert all(torch.equal(got[n], leaf) for n, leaf in held.items())
    assert all(bool(named) is (dist.get_rank() == 1) for _, named in fsdp.stream(state, rank=1))


@pytest.mark.parametrize("kind", ["zero3", "zero2"])
@each_rank(2)
def test_the_next_step_computes_between_two_units(kind: str) -> None:
    """A stream goes on while the next step computes, and ends with its update."""
    state, model = made(kind)
    forward_backward = T.forward_backward(model, loss_of)
    before = fsdp.full_params(state)
    units = fsdp.stream(state)
    got = dict(next(units)[1])
    after, _ = forward_backward(state, batch_of(0, dist.get_rank()))
    got |= next(units)[1]
    assert all(torch.equal(before[name], leaf) for name, leaf in got.items())
    state = fsdp.step(after)
    with pytest.raises(fsdp.StaleStateError):
        next(units)
    straight, _ = forward_backward(made(kind)[0], batch_of(0, dist.get_rank()))
    there = fsdp.full_params(fsdp.step(straight))
    assert all(torch.equal(there[name], leaf) for name, leaf in fsdp.full_params(state).items())


def deltas(kind: str, dtype: Any, cut: Any, little: bool) -> Any:
    """Deltas of this rank, of two steps, and of none."""
    state, model = made(kind, little)
    first = all_of(state, dtype=dtype, convert=cut)
    since = fsdp.snapshot(state, dtype=dtype)
    state = stepped(state, model)
    changed = [fsdp.delta(since, state, convert=cut)]
    state = stepped(state, model)
    changed.append(fsdp.delta(since, state, convert=cut, block=4))
    changed.append(fsdp.delta(since, state, convert=cut))
    return first, pickle.loads(pickle.dumps(changed)), all_of(state, dtype=dtype, convert=cut)


CASES = [
    ("zero3", None, None, False),
    ("zero3", torch.bfloat16, CUT, False),
    ("zero1", torch.bfloat16, None, True),
    ("zero3", None, None, True),
    ("ddp", None, None, False),
]


@pytest.mark.parametrize(("kind", "dtype", "cut", "little"), CASES)
def test_deltas_of_all_ranks_give_the_bits_of_the_stream(kind: str, dtype: Any, cut: Any, little: bool) -> None:
    said = launch(deltas, (kind, dtype, cut, little), nprocs=2, simulate=True)
    weights, _, last = said[0]
    weights = copy.deepcopy(weights)
    for i in (1, 0):
        fsdp.apply_delta(weights, said[i][1][0])
    for i in (0, 1):
        fsdp.apply_delta(weights, said[i][1][1])
    assert weights.keys() == last.keys()
    assert all(torch.equal(weights[name], leaf) for name, leaf in last.items())
    if little:  # norm.weight and up.bias, in blocks of 4 or less
        own = sum(values.nbytes for _, (_, one, _), _ in said for values in one.values.values())
        assert own <= 13 * (dtype or torch.float32).itemsize
    assert all(not again.runs and again.nbytes == 0 for _, (_, _, again), _ in said)
    assert "step 1 to 2" in repr(said[0][1][1])


def own_parts(kind: str, dtype: Any, cut: Any) -> Any:
    """What the stream gives, and what this rank gives of it, of a state and of one that is cut along an axis."""
    mesh = fsdp.local_mesh()
    own = {"a": fsdp.Along("tp", 1, parts=2), "b": "tp"} if "tp" in (mesh.mesh_dim_names or ()) else {}
    spec = fsdp.Spec(mesh, getattr(fsdp, kind)("data"), own=own, units=["a", "b"])
    state = fsdp.shard({"a": torch.arange(35.0).repeat(4).view(7, 20), "b": torch.arange(5.0)}, spec) if own else (
        stepped(*made(kind)))  # fmt: skip
    every = all_of(state, dtype=dtype, convert=cut)
    given: list[tuple[str, Any]] = []
    units = [*state.units, ""]
    fsdp.stream_to(lambda *some: given.append(some), state, gather=False, dtype=dtype, convert=cut)()
    assert [name for name, _ in given] == [name for name in units if name in dict(given)]
    return every, [part for _, part in given]


@pytest.mark.parametrize(("axes", "kind", "dtype", "cut"), [
    ({"data": 2}, "zero3", None, None), ({"data": 4}, "zero3", torch.bfloat16, CUT), ({"data": 2}, "zero1", None, CUT),
    ({"data": 2}, "ddp", torch.bfloat16, None), ({"data": 2, "tp": 2}, "zero3", None, None),
    ({"data": 2, "tp": 2}, "zero3", torch.bfloat16, {"a": fsdp.Transposed("a")}),
])  # fmt: skip
def test_parts_of_all_ranks_are_what_the_stream_gives(axes: Any, kind: str, dtype: Any, cut: Any) -> None:
    with fsdp.simulate(**axes) as ranks:
        said = [*zip(*(one.get() for one in ranks(own_parts, kind, dtype, cut)), strict=True)]
    every = said[0][0]
    got = {name: torch.full_like(leaf, 77) for name, leaf in every.items()}
    for _, given in said:
        for part in given:
            fsdp.apply_delta(got, part)
    assert all(torch.equal(got[name], leaf) for name, leaf in every.items())
    held = sum(values.numel() for _, given in said for part in given for values in part.values.values())
    assert held == sum(leaf.numel() for leaf in every.values())  # each element once
    sent = [
        values for _, given in said for part in given for values in pickle.loads(pickle.dumps(part)).values.values()
    ]
    assert all(values.untyped_storage().nbytes() == values.nbytes for values in sent)  # and not its neighbours


def test_parts_are_each_ranks_own() -> None:
    state, _ = made()
    with pytest.raises(fsdp.SpecError, match="each rank gives its own part, and got rank=0"):
        fsdp.stream_to(lambda *_: None, state, gather=False, rank=0)


def test_a_delta_that_fails_leaves_the_snapshot_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    state, model = fsdp.init(PeerModel, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw(lr=0.1), seed=3)
    since, weights = fsdp.snapshot(state), fsdp.full_params(state)
    state, _ = T.forward_backward(model, loss_of)(state, batch_of(0, 0))
    state = fsdp.step(state)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *_, **__: (_ for _ in ()).throw(MemoryError))  # when all is compared
        with pytest.raises(MemoryError):
            fsdp.delta(since, state)
    changed = fsdp.delta(since, state)
    assert changed.steps == (0, 1)
    fsdp.apply_delta(weights, changed)
    assert all(torch.equal(weights[path], leaf) for path, leaf in fsdp.full_params(state).items())


def test_a_delta_is_put_into_what_was_loaded_in_inference_mode() -> None:
    state, _ = fsdp.init(PeerModel, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw(lr=0.1), seed=3)
    since = fsdp.snapshot(state)
    with torch.inference_mode():
        weights = all_of(state)
    state = fsdp.replace_params(state, {path: 2 * leaf for path, leaf in fsdp.full_params(state).items()})
    fsdp.apply_delta(weights, fsdp.delta(since, state))
    assert all(torch.equal(weights[name], leaf) for _, named in fsdp.stream(state) for name, leaf in named.items())


def test_what_does_not_fit_is_refused() -> None:
    mesh = fsdp.local_mesh("cpu")
    state, model = fsdp.init(PeerModel, fsdp.Spec(mesh), fsdp.adamw(lr=0.1), seed=3)
    wrongs: list[tuple[Any, str]] = [
        ({"dtype": torch.int8}, "expected a floating dtype"),
        ({"rank": 5}, "one of the mesh's ranks, 0 to 0"),
        ({"convert": {"nowhere": "x"}}, "'nowhere' is no path"),
    ]
    for wrong, said in wrongs:
        with pytest.raises(fsdp.SpecError, match=said):
            fsdp.stream(state, **wrong)
    since = fsdp.snapshot(state)
    other = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(mesh))
    with pytest.raises(fsdp.TreeError, match="the snapshot is of other leaves: 'blocks"):
        fsdp.delta(since, other)
    weights = all_of(state)
    changed = fsdp.delta(since, stepped(state, model))
    kept = weights.pop("embed.weight")
    with pytest.raises(
        fsdp.TreeError, match=r"'embed\.weight' is NoneType; the delta has torch\.float32 up to element 78"
    ):
        fsdp.apply_delta(weights, changed)
    for given in ((None, changed), (model, changed), (weights, weights)):
        with pytest.raises(TypeError, match=r"apply_delta: got a .* expected \{name: tensor\}, and what delta gave"):
            fsdp.apply_delta(*given)
    with pytest.raises(TypeError, match="expected what snapshot gave, and got a State"):
        fsdp.delta(state, other)  # type: ignore[arg-type]
    with pytest.raises(fsdp.TreeError, match=r"'embed\.weight' is torch\.float32 .* on the meta device"):
        fsdp.apply_delta({**weights, "embed.weight": kept.to("meta")}, changed)
    with pytest.raises(fsdp.TreeError, match=r"'embed\.weight' is ndarray"):
        fsdp.apply_delta({**weights, "embed.weight": kept.numpy()}, changed)  # type: ignore[dict-item]
    for bad in (kept.bfloat16(), kept[:2], kept.t()):
        before = {name: leaf.clone() for name, leaf in weights.items()}
        with pytest.raises(fsdp.TreeError, match=r"'embed\.weight' is torch"):
            fsdp.apply_delta({**weights, "embed.weight": bad}, changed)
        assert all(torch.equal(before[name], leaf) for name, leaf in weights.items())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def with_buffers(kind: str) -> Any:
    """Weights as a stream gives them before a step and after, and the delta."""
    state, model = fsdp.init(Normed, fsdp.Spec(fsdp.local_mesh(), getattr(fsdp, kind)("data")), fsdp.sgd(lr=0.1))
    dtype = torch.float8_e4m3fn

    first, since = all_of(state, dtype=dtype), fsdp.snapshot(state, dtype=dtype)
    drawn = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    state, _ = T.forward_backward(model, lambda model, x: model(x).square().mean())(state, drawn)
    state = fsdp.step(state)
    return first, fsdp.delta(since, state), all_of(state, dtype=dtype)


@pytest.mark.parametrize("kind", ["zero3", "ddp"])
def test_a_delta_has_buffers_and_any_dtype_can_be_pickled(kind: str) -> None:
    said = launch(with_buffers, (kind,), nprocs=2, simulate=True)
    first, _, last = said[0]
    for _, changed, _ in said:
        fsdp.apply_delta(first, pickle.loads(pickle.dumps(changed)))
    assert not torch.equal(first["norm.running_mean"], torch.zeros(3))
    assert int(first["norm.num_batches_tracked"]) == 1
    assert all(torch.equal(first[name].view(torch.uint8), t.view(torch.uint8)) for name, t in last.items() if t.dim())


def test_what_is_no_dtype_block_or_state_is_named_and_a_snapshot_stays_as_it_is() -> None:
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    state = fsdp.shard({"a": torch.ones(4), "b": torch.ones(4)}, spec)
    since = fsdp.snapshot(state)
    for block in (0, -1, 1.5, None, True):
        with pytest.raises(fsdp.SpecError, match=r"delta\(block=.*1 or more"):
            fsdp.delta(since, state, block=block)  # type: ignore[arg-type]
    for dtype in ("bf16", torch.int32):
        with pytest.raises(fsdp.SpecError, match=r"snapshot\(dtype=.*expected a floating dtype"):
            fsdp.snapshot(state, dtype=dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"stream\(state, \.\.\.\): the first argument is a State, not str"):
        fsdp.stream("state")  # type: ignore[arg-type]
    other = fsdp.shard({"a": torch.zeros(4), "b": torch.zeros(5)}, spec)
    with pytest.raises(fsdp.TreeError, match="elements 0 to 4 of 'b', the state 0 to 5"):
        fsdp.delta(since, other)
    assert torch.equal(since.parts["a"][1], torch.ones(4))


def beside_steps(overlap: bool, wrong: bool, change: str, gather: bool) -> list[str]:
    """Streams on a lane beside steps have the weights with which each began; what raced."""
    with ordered() as order:
        spec = fsdp.Spec(fsdp.local_mesh(), schedule=fsdp.Schedule(overlap_update=overlap))
        state, model = fsdp.init(PeerModel, spec, fsdp.adamw(lr=1e-2), seed=3)
        forward_backward = T.forward_backward(model, loss_of)
        for i in range(3):
            before = {path: leaf.clone() for path, leaf in fsdp.full_params(state).items()}
            del before["head.weight"]  # which is embed.weight
            shared = {path: torch.zeros_like(leaf) if gather else leaf.clone() for path, leaf in before.items()}

            def put(unit: str, named: Any) -> None:
                if unit and not gather:  # this rank's part: what others have stays
                    fsdp.apply_delta(shared, named)  # noqa: B023
                for name, leaf in named.items() if unit and gather else ():
                    shared[name].copy_(leaf)  # noqa: B023

            arrived = fsdp.stream_to(put, state, gather=gather)
            if wrong:
                state.version.lineage.note_reads(None)
            if change == "step":
                state, _ = forward_backward(state, batch_of(i, 0))
                state = fsdp.step(state)
            else:
                main = [buffer.local for buffer in state.main.values()]
                state = extend.change_weights(state, "clamp", lambda: torch._foreach_zero_(main))  # noqa: B023
            if not wrong:
                assert all(torch.equal(before[name], leaf) for name, leaf in shared.items())
        del arrived
        return order.races


CHANGED = [(*row, gather) for row in ((False, "step"), (True, "step"), (False, "weights")) for gather in (True, False)]


@pytest.mark.parametrize(("overlap", "change", "gather"), marked(CHANGED, [CHANGED[0], CHANGED[3], CHANGED[4]]))
def test_what_changes_the_weights_waits_for_a_stream_on_its_lane(overlap: bool, change: str, gather: bool) -> None:
    assert launch(beside_steps, (overlap, False, change, gather), nprocs=2) == [[], []]
    for races in launch(beside_steps, (overlap, True, change, gather), nprocs=2):
        assert any("store" in race for race in races)


@each_rank(2)
def test_an_error_of_the_function_comes_when_peers_have_their_units() -> None:
    """One rank's function raises: the other's stream goes on, and so do both states."""
    state, model = made("zero3")
    seen: list[str] = []

    def put(unit: str, named: Any) -> None:
        seen.append(unit)
        if dist.get_rank() == 1 and named:
            raise ZeroDivisionError(unit)

    if dist.get_rank() == 1:
        with pytest.raises(ZeroDivisionError, match=state.units[0]):
            fsdp.stream_to(put, state)
    else:
        fsdp.stream_to(put, state)()
    stepped(state, model)
    assert seen == [*state.units, ""][: 1 if dist.get_rank() else None]


@each_rank(3, processes=True)
def test_a_rank_outside_of_the_mesh_is_a_destination() -> None:
    """Two ranks train, the third one, which calls nothing, gets the weights by the process group."""
    mesh, rank = DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",)), dist.get_rank()
    if rank < 2:
        state, model = fsdp.init(PeerModel, fsdp.Spec(mesh), fsdp.adamw(lr=1e-2), seed=3)
        state = stepped(state, model)
        for _, named in fsdp.stream(state, rank=0):
            if rank == 0:
                dist.send_object_list([{name: leaf.clone() for name, leaf in named.items()}], 2)
        whole = {**fsdp.full_params(state), **state.buffers}
        if rank == 0:
            dist.send_object_list([whole], 2)
        return
    got: dict[str, torch.Tensor] = {}
    came: list[Any] = [None]
    while len(got) < len(PeerModel(0).state_dict()) - 1:  # a tied leaf comes once
        dist.recv_object_list(came, 0)
        got |= came[0]
    dist.recv_object_list(came, 0)
    assert len(got) == 8
    assert all(torch.equal(came[0][name], leaf) for name, leaf in got.items())


def test_a_change_far_into_a_buffer_of_complex128_is_found() -> None:
    held = torch.zeros(200, dtype=torch.complex128)
    state = fsdp.shard({"w": torch.ones(4)}, fsdp.Spec(fsdp.local_mesh("cpu")), buffers={"c": held})
    since = fsdp.snapshot(state)
    moved = held.clone()
    moved[100].add_(2j)
    changed = fsdp.delta(since, extend.evolve(state, buffers={"c": moved}), block=8)
    assert changed.runs["c"].tolist() == [[96, 8]]
    fsdp.apply_delta({"c": held}, changed)
    assert torch.equal(held, moved)
