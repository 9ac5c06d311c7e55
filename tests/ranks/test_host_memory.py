"""Main weights and optimizer state in the host's memory: the same bits as on the device, whatever is done with them."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.presets import AXES, PRESETS, TWO_AXES, placement_of, ranks_of
from support.problems import batch, loss_fn, mesh_and_placement, net
from support.ranks import each_rank, launch
from support.tables import FULL, marked

import functional_fsdp as fsdp
from functional_fsdp import _host_memory
from functional_fsdp import transforms as T
from functional_fsdp._common.device import in_host_memory
from functional_fsdp._optim.optimizer import FILL

HOST = "pinned_host"
OPTIMIZERS = {
    "adamw": lambda: fsdp.adamw(lr=1e-2, weight_decay=0.1),
    "sgd": lambda: fsdp.sgd(lr=1e-2, momentum=0.9),
    "radam": lambda: fsdp.from_torch(torch.optim.RAdam, lr=1e-2),
    "muon": lambda: fsdp.partition({"matrix": fsdp.muon(lr=1e-2), "default": fsdp.adamw(lr=1e-2)}),
    "a pair": lambda: fsdp.Optimizer(
        init=lambda main: pytree.tree_map(torch.zeros_like, main),
        update=lambda grads, opt, main, count: _descent(grads, opt, main),
    ),
}
Trees = dict[str, Any]


def _descent(grads: Any, opt: Any, main: Any) -> Any:
    """Momentum, as new tensors."""
    moved = pytree.tree_map(lambda m, g: 0.9 * m + g, opt, grads)
    return pytree.tree_map(lambda p, m: p - 0.01 * m, main, moved), moved


def spec_of(preset: str, kind: Any, **more: Any) -> fsdp.Spec:
    mesh, _ = mesh_and_placement(preset)
    placement = getattr(fsdp, preset)(*AXES[preset], memory_kind=kind)
    labels = {"blocks.*.up.weight": "matrix", "blocks.*.down.weight": "matrix"}
    return fsdp.Spec(mesh, placement, labels=labels, **more)


def buffers(state: fsdp.State) -> list[Any]:
    """What the state and its optimizer keep of leaves, but for numbers of which there is one a leaf."""
    is_buffer = lambda x: isinstance(x, fsdp.FlatBuffer)  # noqa: E731
    kept = [x for x in pytree.tree_leaves((state.main, state.opt), is_leaf=is_buffer) if is_buffer(x)]
    return [x for x in kept if not x.bucket.by_leaf and x.local.numel()]


def trained(state: fsdp.State, model: Any, steps: int, first: int = 0, micro: int = 1, **more: Any) -> fsdp.State:
    step = more.pop("step", fsdp.step)
    forward_backward = T.forward_backward(model, loss_fn)
    for i in range(first, first + steps):
        for k in range(micro):
            state, _ = forward_backward(state, batch(i, dist.get_rank(), k), last_microbatch=k == micro - 1)
        state = step(state)
    return state


def kept(state: fsdp.State) -> Trees:
    return {"params": fsdp.full_params(state), "opt": fsdp.optimizer_state(state)}


def same(a: Any, b: Any) -> bool:
    x, y = ({pytree.keystr(path): t for path, t in pytree.tree_flatten_with_path(tree)[0]} for tree in (a, b))
    return x.keys() == y.keys() != set() and all(torch.equal(x[path], y[path]) for path in x)


BF16 = fsdp.Precision(compute=torch.bfloat16)
ROWS = [
    (ranks_of(preset), preset, optimizer, 1 if optimizer == "radam" and preset in TWO_AXES else micro)
    for preset, optimizer, micro in itertools.product(PRESETS, OPTIMIZERS, (1, 2))
]
QUICK = [(2, "zero3", "muon", 2), (2, "zero3", "a pair", 1), (2, "zero1", "adamw", 2)]


@pytest.mark.parametrize(("ranks", "preset", "optimizer", "micro"), marked([*dict.fromkeys(ROWS)], QUICK))
@each_rank("ranks")
def test_three_steps_have_the_device_s_bits(ranks: int, preset: str, optimizer: str, micro: int) -> None:
    """On the device; all of it on the host, in parts of 128 elements; main weights and optimizer state only."""
    params, model = fsdp.functionalize(net(torch.float32))
    found = []
    for kind, fill in (("device", 1), (HOST, 512), ({"main": HOST}, 1 << 20)):
        setattr(_host_memory, "FILL", fill)  # noqa: B010
        spec = spec_of(preset, kind, precision=None if micro == 1 else BF16)
        state = trained(fsdp.shard(params, spec, OPTIMIZERS[optimizer]()), model, 3, micro=micro)
        assert {in_host_memory(x.local) for x in buffers(state)} == {kind != "device"}
        copies = {in_host_memory(x.local) for x in state.weights.values() if x.local.numel()}
        placement = placement_of(preset)
        assert copies <= {kind == HOST and bool(placement.weights) and {*placement.weights} == {*placement.main}}
        state, _ = T.forward_backward(model, loss_fn)(state, batch(3, dist.get_rank()))
        state = fsdp.finish_reductions(state)
        assert {in_host_memory(x.local) for x in state.grads.values() if x.local.numel()} == {kind == HOST}
        found.append(kept(fsdp.drop_gradients(state)))
    setattr(_host_memory, "FILL", FILL)  # noqa: B010
    device, *others = found
    assert all(same(device, other) for other in others)


def compiled(preset: str) -> None:
    """A compiled step."""
    mesh, _ = mesh_and_placement(preset)
    found = []

    def whole(state: fsdp.State, x: torch.Tensor) -> fsdp.State:
        state, p = fsdp.unshard(state)
        grads = torch.func.grad(lambda p: (p["a"] * x).sin().square().mean() + p["b"].exp().sum())(p)
        return fsdp.step(fsdp.reduce(state, grads))

    for kind in ("device", HOST):
        spec = fsdp.Spec(mesh, getattr(fsdp, preset)(*AXES[preset], memory_kind=kind), units=["a", "b"])
        state = fsdp.shard({"a": torch.linspace(-1, 1, 300), "b": torch.ones(5)}, spec, fsdp.adamw(lr=1e-2))
        state = torch.compile(whole, fullgraph=True, backend="eager")(state, torch.full((), 1.0 + dist.get_rank()))
        assert {in_host_memory(x.local) for x in buffers(state)} == {kind == HOST}
        found.append(kept(state))
    assert same(*found)


def other_ways(preset: str) -> None:
    """A step that is skipped and gradients that are lacking."""
    params, model = fsdp.functionalize(net(torch.float32, 1))
    found = []
    for kind in ("device", HOST):
        state = fsdp.shard(params, spec_of(preset, kind), fsdp.adamw(lr=1e-2))
        skipping = T.skip_nonfinite(fsdp.step)
        state = trained(state, model, 2, step=skipping)
        state, _ = T.forward_backward(model, loss_fn)(state, batch(2, dist.get_rank()))
        before = kept(state := fsdp.drop_gradients(state))
        state, _ = T.forward_backward(model, lambda m, b: loss_fn(m, b) * float("nan"))(state, batch(2, 0))
        state = skipping(state)
        assert same(before, kept(state))
        state, _ = T.forward_backward(model, lambda m, b: m.embed(b[0]).square().mean())(
            state, batch(3, dist.get_rank())
        )
        state = fsdp.step(state)
        assert {in_host_memory(x.local) for x in buffers(state)} == {kind == HOST}
        found.append(kept(state))
    assert same(*found)


@pytest.mark.parametrize("steps", [other_ways, compiled])
@pytest.mark.parametrize("preset", marked([(p,) for p in PRESETS], [("zero3",)]))
def test_steps_that_are_skipped_lack_gradients_or_are_compiled(preset: str, steps: Any) -> None:
    ranks = ranks_of(preset) if FULL or steps is other_ways else 1
    launch(steps, (preset,), nprocs=ranks, processes=steps is compiled)


def moved_about(folder: str, preset: str) -> None:
    """Checkpoints, redistribution, copies: each goes on as the one that was trained in one go."""
    params, model = fsdp.functionalize(net(torch.float32, 1))
    optimizer = fsdp.adamw(lr=1e-2)
    specs = {kind: spec_of(preset, kind) for kind in ("device", HOST)}
    whole = kept(trained(fsdp.shard(params, specs["device"], optimizer), model, 3))
    begun = {kind: trained(fsdp.shard(params, spec, optimizer), model, 2) for kind, spec in specs.items()}
    goes: dict[str, fsdp.State] = {}
    for kind, other in (("device", HOST), (HOST, "device")):
        fsdp.save(begun[kind], f"{folder}/{preset} {kind}")
        goes[f"a checkpoint from {kind}"] = fsdp.load(f"{folder}/{preset} {kind}", specs[other], optimizer)
        goes[f"redistributed from {kind}"] = fsdp.redistribute(copy.deepcopy(begun[kind]), specs[other])
        beside = f"{folder}/{preset} {kind} beside"
        fsdp.async_save(begun[kind], beside).result()
        goes[f"like itself, {kind}"] = fsdp.load(beside, like=begun[kind])
    there = begun[HOST]
    goes["copied"] = copy.deepcopy(there)
    goes["pickled"] = pickle.loads(pickle.dumps(there))
    goes["other weights"] = fsdp.replace_params(there, there.main)
    goes["optimizer state"] = fsdp.load_optimizer_state(
        fsdp.replace_params(fsdp.shard(params, specs[HOST], optimizer), fsdp.full_params(there)),
        fsdp.optimizer_state(begun["device"]),
        steps=2,
    )
    goes["weights from a source"] = fsdp.load_weights(there, fsdp.full_params(there))
    for what, state in goes.items():
        assert {in_host_memory(x.local) for x in buffers(state)} == {state.spec == specs[HOST]}, what
        assert same(whole, kept(trained(state, model, 1, first=2))), what
    thawed = {kind: fsdp.unfreeze(fsdp.freeze(begun[kind], "blocks.*"), "blocks.*.up.*") for kind in specs}
    assert {in_host_memory(x.local) for x in buffers(thawed[HOST])} == {True}
    assert same(*(kept(trained(state, model, 1, first=2)) for state in thawed.values()))


@pytest.mark.parametrize("preset", marked([(p,) for p in PRESETS], [("zero3",)]))
def test_checkpoints_redistribution_and_copies(preset: str, tmp_path: Path) -> None:
    """On simulated ranks, but with LAWS=full; so are the saves in the background."""
    fsdp.launch(moved_about, (str(tmp_path), preset), nprocs=ranks_of(preset), simulate=not FULL)


@each_rank(2)
def test_some_leaves_by_pattern_and_what_they_cost() -> None:
    params, model = fsdp.functionalize(net(torch.float32))
    mesh = fsdp.local_mesh()
    found = []
    for kind in ("device", HOST):
        rules = {"blocks.*.up.*": fsdp.zero3("data", memory_kind=kind), "*": fsdp.zero3("data")}
        state = trained(fsdp.shard(params, fsdp.Spec(mesh, rules), fsdp.adamw(lr=1e-2)), model, 3)
        there = {leaf.path for x in state.main.values() if in_host_memory(x.local) for leaf in x.bucket.leaves}
        assert there == ({path for path in params if ".up." in path} if kind == HOST else set())
        far = sum(x.local.nbytes for x in buffers(state) if in_host_memory(x.local))
        moved = fsdp.host_transfer(state)
        with torch.device("meta"):
            shapes, _ = fsdp.functionalize(net(torch.float32))
        planned = fsdp.host_transfer(fsdp.abstract_state(shapes, fsdp.Spec({"data": 2}, rules), fsdp.adamw()))
        assert planned[:4] == moved[:4]
        assert moved.bandwidth > 0
        found.append((kept(state), moved, far))
    (device, none, _), (host, moved, far) = found
    assert same(device, host)
    assert none[:4] == (0, 0, 0, 0)
    assert moved.update == far + moved.gradients  # each byte there and back; gradients there only
    assert far < moved.stored < 2 * far  # and compute shards back only
    assert moved.gradients == far // 3  # beside main weights and two moments
    assert 0 < moved.beside < 2 * state.layout.nbytes("weights")
    assert "in host memory" in repr(state)
    assert "GB/s" in repr(moved)
    assert fsdp.HostTransfer(10, 9, 4, 6, 5.0).seconds == 4


@each_rank(2)
def test_gradients_that_somebody_holds_stay() -> None:
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, spec_of("zero3", HOST), fsdp.adamw(lr=1e-2))
    forward_backward = T.forward_backward(model, loss_fn)
    places, held, copies = [], [], []
    for i in range(4):
        state, _ = forward_backward(state, batch(i, dist.get_rank()))
        state = fsdp.finish_reductions(state)
        places.append([x.local.data_ptr() for x in state.grads.values()])
        if i == 1:
            held, copies = [x.local for x in state.grads.values()], [x.local.clone() for x in state.grads.values()]
        state = fsdp.step(state)
    assert places[0] == places[1] != places[2] == places[3]
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))


@each_rank(2)
def test_two_buffers_have_memory_while_a_step_updates() -> None:
    params, model = fsdp.functionalize(net(torch.float32))
    state = fsdp.shard(params, spec_of("zero3", HOST), fsdp.adamw(lr=1e-2))
    for i in range(3):
        state = trained(state, model, 1, first=i)
        there = state._executor.sink.streams
        assert sum(buffer.untyped_storage().size() for buffer in there.buffers) == 0
    kept = sum(x.local.nbytes for x in buffers(state) if x.bucket.name in state.layout.trainable)
    assert 0 < there.nbytes <= 2 * (2 * kept + 128 * 512)  # a portion is at most all that there is, with gradients


def test_another_kind_of_memory_is_refused() -> None:
    with pytest.raises(fsdp.SpecError, match="expected one of 'device', 'pinned_host'"):
        fsdp.zero3("data", memory_kind="host")
    with pytest.raises(fsdp.SpecError, match="expected one of 'weights', 'grads', 'main'"):
        fsdp.zero3("data", memory_kind={"opt": HOST})
    with pytest.raises(fsdp.SpecError, match="Add 'main': 'pinned_host'"):
        fsdp.zero3("data", memory_kind={"grads": HOST})
    everything = dict.fromkeys(("main", "grads", "weights"), HOST)
    assert fsdp.zero3("data", memory_kind=everything) == fsdp.zero3("data", memory_kind=HOST)
    assert fsdp.zero3("data", memory_kind={"main": "device"}) == fsdp.zero3("data")
    some = fsdp.zero3("data", memory_kind={"main": HOST, "grads": HOST})
    assert str(some) == "zero3(data, memory_kind=pinned_host of grads and main)"
    assert pickle.loads(pickle.dumps(some)) == some
    assert hash(some) == hash(pickle.loads(pickle.dumps(some)))
    assert str(fsdp.zero2("data", memory_kind=HOST)) == "zero2(data, memory_kind=pinned_host)"
    plain = fsdp.Placement(main=("data",), memory_kind=HOST)
    assert "memory_kind=pinned_host" in str(plain)
    assert fsdp.zero1("data", memory_kind=HOST) == plain != fsdp.zero1("data")


def test_nothing_of_it_counts_where_nothing_lies_there() -> None:
    with torch.device("meta"):
        shapes, _ = fsdp.functionalize(net())
    state = fsdp.abstract_state(shapes, fsdp.Spec({"data": 2}, fsdp.zero3("data", memory_kind=HOST)), fsdp.adamw())
    assert set(state.weights) == set(state.main)  # compute copies, on the device
    assert not any(in_host_memory(x.local) for x in state.main.values())
