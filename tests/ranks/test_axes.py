"""Leaves along axes of the model's own: a cut GPT beside the plain one, on ranks along data × tp."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import tensor_parallel as cut
from support.ranks import by_rank
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import functional_fsdp as fsdp
from functional_fsdp import launch, simulate
from functional_fsdp import transforms as T

Tree = dict[str, torch.Tensor]
STEPS = 20
PLACEMENTS: dict[str, Any] = {
    "zero3": lambda: fsdp.zero3("data"),
    "zero1": lambda: fsdp.zero1("data"),
    "ddp norms": lambda: {"*norm*": fsdp.ddp("data"), "*": fsdp.zero2("data")},
    "hsdp": lambda: fsdp.hsdp("replica", "shard"),
    "hfsdp": lambda: fsdp.hfsdp("replica", "shard"),
}


def made(placement: str, sequence: bool, axes: Any = None, **more: Any) -> tuple[Any, fsdp.Spec, Any, Any]:
    mesh = fsdp.local_mesh(**(axes or {}))
    spec = fsdp.Spec(mesh, PLACEMENTS[placement](), own=cut.own(sequence), **more)
    params, model = fsdp.functionalize(cut.cut(mesh["tp"], sequence), spec)
    return mesh, spec, params, model


def trained(
    placement: str, sequence: bool, way: str, steps: int, micro: int = 1, exact: bool = False, axes: Any = None,
    **more: Any,
) -> tuple[list[float], list[float], Tree]:  # fmt: skip
    """Losses over the data ranks, norms, and whole weights. exact: sums in float32."""
    if exact:
        more["precision"] = fsdp.Precision(sum="fp32", wire=torch.float32)
    mesh, spec, params, model = made(placement, sequence, axes, **more)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=0.01, weight_decay=0.01))
    driven = T.forward_backward(model, cut.loss_fn)

    def whole(state: fsdp.State, data: Any, **_: Any) -> Any:
        state, params = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda p: cut.loss_fn(fsdp.bind(model, p), data))(params)
        return fsdp.reduce(state, grads), loss

    def train_step(state: fsdp.State, *data: torch.Tensor) -> Any:
        for k in range(micro):
            forward_backward = whole if way == "whole" else driven
            state, loss = forward_backward(state, data, last_microbatch=k == micro - 1, scale=1 / micro)
        state = T.divide(state, 2) if spec.average == "sum" else state
        state, norm = T.clip_by_global_norm(state, 1.0)
        state = T.skip_nonfinite(fsdp.step)(state) if way == "compiled" else fsdp.step(state)
        return *fsdp.pmean(state, loss), norm

    step = T.compile(train_step) if way == "compiled" else train_step
    losses, norms = [], []
    for i in range(steps):
        state, loss, norm = step(state, *cut.batch(i, cut.rank_on(mesh, spec.data)))
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, fsdp.full_params(state)


def same(found: list[Any], steps: int, ranks: int, within: float = 1e-9) -> None:
    losses, norms, weights = cut.whole_losses(steps, ranks, 1.0)
    for got, lengths, whole in found:
        assert got == pytest.approx(losses, abs=within)
        assert lengths == pytest.approx(norms, abs=within)
        torch.testing.assert_close(whole, weights, rtol=0, atol=within)


GRID = [
    ("zero3", {"data": 2, "tp": 2}), ("hsdp", {"replica": 2, "shard": 2, "tp": 2}), ("zero1", {"tp": 2, "data": 2}),
    ("zero1", {"tp": 4, "data": 2}),
    ("zero3", {"data": 1, "tp": 2}), ("zero3", {"data": 4, "tp": 2}),
    ("zero3", {"data": 1, "tp": 4}), ("zero3", {"data": 2, "tp": 4}), ("zero3", {"data": 4, "tp": 4}),
    ("zero3", {"data": 4, "tp": 1}), ("zero1", {"data": 2, "tp": 2}), ("ddp norms", {"data": 2, "tp": 2}),
    ("hfsdp", {"replica": 2, "shard": 2, "tp": 2}),
    ("hsdp", {"tp": 2, "replica": 2, "shard": 1}),
]  # fmt: skip
FEW = [GRID[0], pytest.param(*GRID[1], marks=pytest.mark.large), GRID[2]]  # below `hfsdp` has two axes of data


@pytest.mark.parametrize(("placement", "axes"), FEW, ids=lambda x: str(x).replace("'", ""))
def test_losses_norms_and_weights_are_the_plain_models(placement: str, axes: Any) -> None:
    ranks = torch.Size([n for axis, n in axes.items() if axis != "tp"]).numel()
    with simulate(**axes) as some:
        way = "whole" if placement == "zero1" else "driven"
        same(by_rank(some(trained, placement, placement == "zero3", way, 3)), 3, ranks)


SETTINGS = [
    ("zero3", {"data": 2, "tp": 2}, "mean", True, 2), ("hfsdp", {"replica": 2, "shard": 1, "tp": 2}, "sum", False, 2),
    ("ddp norms", {"tp": 2, "data": 2}, "sum", False, 1),
]  # fmt: skip


@pytest.mark.parametrize(("placement", "axes", "average", "exact", "micro"), SETTINGS, ids=lambda x: str(x))
def test_sums_over_the_axis_are_sums_whatever_the_data_has(
    placement: str, axes: Any, average: str, exact: bool, micro: int
) -> None:
    """Sums over the data, sums in float32, microbatches."""
    with simulate(**axes) as some:
        found = by_rank(some(functools.partial(trained, average=average), placement, True, "driven", 3, micro, exact))
    same(found, 3, 2, 1e-7 if exact else 1e-9)  # what float32 leaves of a sum


@pytest.mark.large
@pytest.mark.parametrize(("placement", "axes"), GRID, ids=lambda x: str(x).replace("'", ""))
def test_twenty_steps(placement: str, axes: Any) -> None:
    ranks = torch.Size([n for axis, n in axes.items() if axis != "tp"]).numel()
    with simulate(**axes) as some:
        same(by_rank(some(trained, placement, ranks != 2, "driven", STEPS)), STEPS, ranks)


def test_on_processes() -> None:
    same(launch(trained, ("zero3", True, "driven", 2), {"axes": {"data": 2, "tp": 2}}, nprocs=4), 2, 2)


@pytest.mark.large
def test_a_step_that_is_compiled_whole() -> None:
    same(launch(trained, ("zero3", True, "compiled", 3), {"axes": {"data": 2, "tp": 2}}, nprocs=4), 3, 2)


# ---------------------------------------------------------------- a state is global


def begun(sequence: bool = True, steps: int = 1, axes: Any = None, **more: Any) -> Any:
    _, spec, params, model = made("zero3", sequence, axes, **more)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=0.01, weight_decay=0.01))
    forward_backward = T.forward_backward(model, cut.loss_fn)
    for step in range(steps):
        state, _ = forward_backward(state, cut.batch(step, 0))
        state = fsdp.step(state)
    return state, model


def saved(folder: str) -> tuple[Tree, Tree]:
    state, _ = begun()
    fsdp.save(state, f"{folder}/state")
    fsdp.save_safetensors(state, f"{folder}/weights")
    state, params = fsdp.unshard(state)
    return fsdp.full_params(state), {name: one.clone() for name, one in params.items()}


def went_on(folder: str, how: str) -> tuple[Tree, Tree]:
    """Weights as they were read, and after one step more."""
    fresh, model = begun(steps=0)
    if how == "like":
        state = fsdp.load(f"{folder}/state", like=fresh)
    elif how == "spec":
        state = fsdp.load(f"{folder}/state", fresh.spec, fsdp.adamw(lr=0.01, weight_decay=0.01))
    else:
        state = fsdp.load_weights(fresh, f"{folder}/weights")
    read = fsdp.full_params(state)
    state, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(1, 0))
    return read, fsdp.full_params(fsdp.step(state))


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a state and with weights, these, a rank's parts of them, and the weights after a step more."""
    folder = str(tmp_path_factory.mktemp("tp2"))
    with simulate(data=2, tp=2) as ranks:
        whole, parts = by_rank(ranks(saved, folder))[0]
        after = {how: by_rank(ranks(went_on, folder, how))[0][1] for how in ("like", "weights")}
    return folder, whole, parts, after


@pytest.mark.parametrize(
    ("how", "axes"),
    [
        pytest.param("like", {"data": 1, "tp": 2}, marks=pytest.mark.large),
        ("like", {"data": 2, "tp": 1}), ("spec", {"data": 1, "tp": 4}),
        ("weights", {"data": 1, "tp": 4}), pytest.param("spec", {"data": 2, "tp": 4}, marks=pytest.mark.large),
    ],
    ids=str,
)  # fmt: skip
def test_a_state_saved_with_tp_2_is_read_with_any(how: str, axes: Any, there: Any) -> None:
    folder, whole, parts, after = there
    assert parts["blocks.0.mlp.up.weight"].shape == (16, 8)
    with simulate(**axes) as ranks:
        for read, then in by_rank(ranks(went_on, folder, how)):
            assert all(torch.equal(read[name], whole[name]) for name in whole)
            for name, want in after["weights" if how == "weights" else "like"].items():
                torch.testing.assert_close(then[name], want, rtol=0, atol=1e-9)


def kept(kind: str, folder: str, reads: bool) -> tuple[Tree, str]:
    """Weights after four steps, the last two by a state that was read; or what reading, moving and showing it says."""
    optimizer: Any = {
        "counts": lambda: fsdp.from_torch(torch.optim.NAdam, lr=0.01),
        "blocks": lambda: fsdp.adamw(lr=0.01, moments=fsdp.dynamic8),
    }[kind]()
    more = {"precision": fsdp.Precision(main=torch.float32)} if kind == "blocks" else {}
    _, spec, params, model = made("zero3", False, **more)
    state, said = fsdp.shard(params, spec, optimizer), ""
    if reads and kind == "blocks":
        with pytest.raises(fsdp.SpecError) as caught:
            fsdp.load(folder, spec, optimizer)
        plain = fsdp.adamw(lr=0.01)
        state, said = fsdp.load(folder, spec, plain, allow=["optimizer"]), str(caught.value)
    elif reads:
        state = fsdp.load(folder, spec, optimizer)
    for step in range(2 if reads else 0, 4):
        state, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(step, 0))
        state = fsdp.step(state)
        if step == 1:
            fsdp.save(state, folder)
    if not reads and kind == "blocks":
        for call in (
            lambda: fsdp.optimizer_state(state),
            lambda: fsdp.redistribute(state, fsdp.Spec(fsdp.local_mesh(data=4, tp=1), own=cut.own(False))),
        ):
            with pytest.raises(fsdp.SpecError) as caught:
                call()
            said += str(caught.value)
        state = fsdp.step(T.forward_backward(model, cut.loss_fn)(state, cut.batch(4, 0))[0])  # it is as good as before
    return fsdp.full_params(state), said


@pytest.mark.parametrize(("there", "here"), [(2, 4), (1, 2)])
def test_counts_by_leaf_are_read_with_any(there: int, here: int, tmp_path: Path) -> None:
    found = []
    for reads, tp in ((False, there), (True, here)):
        with simulate(data=1, tp=tp) as ranks:
            found += [weights for weights, _ in by_rank(ranks(kept, "counts", str(tmp_path / "state"), reads))]
    for weights in found:
        assert all(torch.allclose(weights[name], one, rtol=0, atol=1e-9) for name, one in found[0].items())


def test_moments_in_blocks_stay_cut_as_they_are(tmp_path: Path) -> None:
    with simulate(data=2, tp=2) as ranks, simulate(data=1, tp=4) as others:
        said = by_rank(ranks(kept, "blocks", str(tmp_path / "state"), False))[0][1]
        said += by_rank(others(kept, "blocks", str(tmp_path / "state"), True))[0][1]
    assert said.count("by blocks of each rank's part") == 3


def test_files_are_those_of_the_plain_model(there: Any) -> None:
    folder, whole, *_ = there
    found = load_file(Path(folder) / "weights" / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    plain = cut.plain()
    plain.load_state_dict(found)
    opened = fsdp.open_checkpoint(Path(folder) / "state")
    assert {name: tuple(one.shape) for name, one in opened.tensors.items()} == {
        n: tuple(w.shape) for n, w in whole.items()
    }
    one = fsdp.shard(fsdp.functionalize(cut.plain())[0], fsdp.Spec(fsdp.local_mesh()))
    read = fsdp.full_params(fsdp.load_weights(one, opened))
    assert all(torch.equal(read[name], whole[name]) for name in whole)


def streamed() -> Any:
    """Weights as they are streamed, and as deltas of each rank bring them up to date; and the whole ones."""
    state, model = begun(steps=0)
    weights = {name: one for _, some in fsdp.stream(state) for name, one in some.items()}
    first = {name: one.clone() for name, one in weights.items()}
    since, before = fsdp.snapshot(state), fsdp.full_params(state)
    state, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, 0))
    state = fsdp.step(state)
    return first, before, fsdp.delta(since, state), fsdp.full_params(state)


def test_streams_and_deltas_have_whole_leaves() -> None:
    with simulate(data=2, tp=2) as ranks:
        found = by_rank(ranks(streamed))
    weights, before, _, after = found[0]
    assert all(torch.equal(weights[name], before[name]) for name in before)
    for _, _, changed, _ in found:
        fsdp.apply_delta(weights, changed)
    assert weights.keys() == after.keys()
    assert all(torch.equal(weights[name], after[name]) for name in after)
    assert not any(torch.equal(before[name], after[name]) for name in after)
    equal = [sum(len(changed.values.get(name, ())) for _, _, changed, _ in found) for name in after]
    assert equal == [one.numel() for one in after.values()]  # each element once


def dcp(folder: str) -> Any:
    state, _ = begun()
    fsdp.save_dcp(state, folder)
    return fsdp.full_params(state), fsdp.optimizer_state(state)


def test_dcp_has_whole_leaves(tmp_path: Path) -> None:
    with simulate(data=2, tp=2) as ranks:
        whole, moments = by_rank(ranks(dcp, str(tmp_path / "dcp")))[0]
    read: Any = {
        "model": {name: torch.full_like(one, -1) for name, one in whole.items()},
        "optim": {"state": {name: {"exp_avg": torch.full_like(one, -1)} for name, one in whole.items()}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp_load(read, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(read["model"][name], one) for name, one in whole.items())
    assert all(torch.equal(read["optim"]["state"][name]["exp_avg"], moments[name]["mean"]) for name in whole)


def adapted(folder: str) -> Any:
    mesh = fsdp.local_mesh()
    names = [f"base_model.model.up.lora_{k}.default.weight" for k in "AB"]
    params = {name: torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}
    state = fsdp.shard(params, fsdp.Spec(mesh, own={"*lora_B*": ("tp", 0), "*": "tp"}))
    fsdp.save_adapter(state, folder, {"peft_type": "LORA"})
    return fsdp.full_params(state)


def test_adapters_have_whole_leaves(tmp_path: Path) -> None:
    with simulate(data=2, tp=2) as ranks:
        whole = ranks(adapted, str(tmp_path / "adapter")).get()[0]
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.replace(".weight", ".default.weight"): one.tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in whole.items()
    }


def test_whole_leaves_take_one_gather_a_bucket() -> None:
    with simulate(data=2, tp=2) as ranks:
        state, _ = ranks(begun, True, 0)
        ranks.traffic.clear()
        ranks(fsdp.full_params, state)
        buckets = [b for b in state.get()[0].layout.buckets.values() if b.cut]
        assert ranks.traffic.collectives(axis="tp", kind="all_gather") == 4 * len(buckets)
        assert sum(len(b.leaves) for b in buckets) > len(buckets)


def moved() -> tuple[Tree, ...]:
    state, model = begun()
    before = fsdp.full_params(state)
    mesh, other = state.spec.mesh, fsdp.local_mesh(data=1, tp=4)
    found = []
    for spec in (
        fsdp.Spec(mesh, fsdp.ddp("data"), own=cut.own(True)),
        fsdp.Spec(mesh, fsdp.zero3("data", "tp")),
        fsdp.Spec(other, own=cut.own(True)),
        fsdp.Spec(mesh, own=cut.own(True)),
    ):
        state = fsdp.redistribute(state, spec)
        found.append(fsdp.full_params(state))
    state, _ = T.forward_backward(model, cut.loss_fn)(state, cut.batch(1, 0))
    return before, *found, fsdp.full_params(fsdp.step(state))


def test_redistribute_cuts_otherwise(tmp_path: Path) -> None:
    with simulate(data=2, tp=2) as ranks:
        ranks(saved, str(tmp_path))
        want = by_rank(ranks(went_on, str(tmp_path), "like"))[0][1]
        for before, *others, after in by_rank(ranks(moved)):
            assert all(torch.equal(other[name], before[name]) for other in others for name in before)
            for name in want:
                torch.testing.assert_close(after[name], want[name], rtol=0, atol=1e-12)


def initialised() -> tuple[Tree, list[Any]]:
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, own=cut.own(False), units=["blocks.*"])
    state, model = fsdp.init(lambda: cut.GPT(mesh["tp"]), spec, fsdp.adamw(lr=1e-3), seed=3)
    state, loss = T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, 0))
    return fsdp.full_params(state), [loss.item(), list(model.embed.weight.shape)]


def test_init_has_the_bits_of_one_rank() -> None:
    spec = fsdp.Spec(fsdp.local_mesh(), units=["blocks.*"])
    state, model = fsdp.init(cut.GPT, spec, fsdp.adamw(lr=1e-3), seed=3)
    want = fsdp.full_params(state)
    _, loss = T.forward_backward(model, cut.loss_fn)(state, cut.batch(0, 0))
    with simulate(data=2, tp=2) as ranks:
        for whole, (found, shape) in by_rank(ranks(initialised)):
            assert all(torch.equal(whole[name], want[name]) for name in want)
            assert found == pytest.approx(loss.item(), abs=1e-6)
            assert shape == [12, 8]
