"""DTensor leaves: models of torch's `parallelize_module` beside the plain ones, on ranks along data × tp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import dtensors as cut
from support.driven import raised, refused
from support.ranks import by_rank
from support.tables import FULL
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import functional_fsdp as fsdp
from functional_fsdp import launch, simulate
from functional_fsdp import transforms as T

SUM = {"*norm*": fsdp.Along("tp", grads="sum")}


def begun(which: str, axes: Any = None, **more: Any) -> Any:
    mesh = fsdp.local_mesh(**(axes or {}))
    spec = fsdp.Spec(mesh, **more)
    module = cut.MODELS[which][1](mesh["tp"])
    params, model = fsdp.functionalize(module)
    return mesh, module, model, fsdp.shard(params, spec, fsdp.adamw(lr=0.01))


def trained(which: str, way: str, steps: int, axes: Any = None, own: Any = None) -> Any:
    """Losses and norms, whole weights, and whether the module is what it was."""
    debug = fsdp.Schedule(debug=True)
    mesh, module, model, state = begun(which, axes, own=own, schedule=debug)
    if way == "whole":  # which sees no state
        model = fsdp.functionalize(module, state.spec)[1]
    before = [*module.parameters()], [len(part._forward_pre_hooks) for part in module.modules()]
    loss_fn, batch = cut.MODELS[which][2:]

    def whole(state: Any, data: Any, **how: Any) -> Any:
        state, w = fsdp.unshard(state)
        loss, pullback = T.vjp(lambda p: loss_fn(fsdp.bind(model, p), data), w)
        return fsdp.reduce(state, pullback(w, torch.ones_like(loss))[0]), loss

    changed: Any = {"remat": T.remat, "units": T.compile_units}.get(way)
    model_ = model if changed is None else changed(model, "blocks.*")
    forward_backward = whole if way == "whole" else T.forward_backward(model_, loss_fn)
    seen = []
    for step in range(steps):
        state, numbers = cut.driven(state, forward_backward, [batch(step, mesh.get_local_rank("data"))])
        seen.append(numbers)
    after = [*module.parameters()], [len(part._forward_pre_hooks) for part in module.modules()]
    same = all(a is b and a.grad is None for a, b in zip(before[0], after[0], strict=True)) and before[1] == after[1]
    return seen, fsdp.full_params(state), same


LONG, SHORT = (20, 3) if FULL else (2, 2)  # steps: the order of use is that of the first
ROWS = [
    ("mlp", "driven", {"data": 2, "tp": 2}, None, LONG), ("mlp", "whole", {"tp": 2, "data": 1}, None, SHORT),
    pytest.param("llama", "driven", {"data": 2, "tp": 2}, None, LONG, marks=pytest.mark.large),
    ("llama", "driven", {"data": 1, "tp": 2}, SUM, SHORT),
    ("mlp", "remat", {"data": 1, "tp": 2}, None, SHORT),
    pytest.param("mlp", "units", {"data": 1, "tp": 2}, None, 3, marks=pytest.mark.large),
    pytest.param("mlp", "driven", {"data": 2, "tp": 4}, None, 20, marks=pytest.mark.large),
    pytest.param("llama", "whole", {"data": 2, "tp": 2}, SUM, 20, marks=pytest.mark.large),
]  # fmt: skip


@pytest.mark.parametrize(("which", "way", "axes", "own", "steps"), ROWS, ids=str)
def test_losses_norms_and_weights_are_the_plain_models(which: str, way: str, axes: Any, own: Any, steps: int) -> None:
    with simulate(**axes) as ranks:
        beside_the_plain_one(which, by_rank(ranks(trained, which, way, steps, None, own)), steps, axes["data"])


def beside_the_plain_one(which: str, found: list[Any], steps: int, ranks: int) -> None:
    numbers, weights = cut.plain(which, steps, ranks)
    for seen, whole, same in found:
        assert same
        assert torch.tensor(seen) == pytest.approx(torch.tensor(numbers), abs=1e-9)
        assert whole.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-9)


def test_on_processes() -> None:
    beside_the_plain_one("mlp", launch(trained, ("mlp", "driven", 2, {"data": 2, "tp": 2}), nprocs=4), 2, 2)


# ---------------------------------------------------------------- a state is global


def went_round(folder: str) -> Any:
    mesh, _, model, state = begun("llama")
    state, _ = cut.driven(state, T.forward_backward(model, cut.llama_loss), [cut.llama_batch(0, 0)])
    whole = fsdp.full_params(state)
    fsdp.save(state, f"{folder}/state")
    fsdp.save_safetensors(state, f"{folder}/weights")
    plain = cut.llama()
    plain.load_state_dict(fsdp.state_dict(state, model))
    module = fsdp.as_module(model, state)
    losses = [cut.llama_loss(one, cut.llama_batch(1, 0)).item() for one in (plain, module)]
    state = fsdp.load(f"{folder}/state", like=begun("llama")[3])
    forward_backward = T.forward_backward(model, cut.llama_loss)
    norms = [T.clip_by_global_norm(forward_backward(state, cut.llama_batch(1, 0))[0], 1.0)[1].item()]
    read = fsdp.full_params(fsdp.load_weights(begun("llama")[3], f"{folder}/weights"))
    state = fsdp.redistribute(state, fsdp.Spec(mesh, fsdp.zero3("data", "tp")))
    moved = fsdp.full_params(state)
    losses.append(T.apply(model, cut.llama_loss)(state, cut.llama_batch(1, 0))[1].item())
    norms += [T.clip_by_global_norm(forward_backward(state, cut.llama_batch(1, 0))[0], 1.0)[1].item()]
    same = all(torch.equal(one[name], whole[name]) for one in (read, moved) for name in whole)
    return same, losses, norms, isinstance(module.get_parameter("lm_head.weight"), DTensor), whole


def test_states_are_saved_read_and_moved_whole(tmp_path: Path) -> None:
    with simulate(data=1, tp=2) as ranks:
        found = by_rank(ranks(went_round, str(tmp_path)))
        for same, losses, norms, is_dtensor, _ in found:
            assert norms[0] == pytest.approx(norms[1], abs=1e-9)
            assert same
            assert is_dtensor
            assert losses == pytest.approx([losses[0]] * 3, abs=1e-9)
    params, _ = fsdp.functionalize(cut.llama())
    one = fsdp.load(tmp_path / "state", like=fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.01)))
    read = fsdp.full_params(one)
    assert all(torch.equal(read[name], whole) for name, whole in found[0][4].items())


def initialised(by_itself: bool) -> Any:
    mesh = fsdp.local_mesh()
    how = {"src_data_rank": None} if by_itself else {}
    state, model = fsdp.init(lambda: cut.cut_mlp(mesh["tp"], **how), fsdp.Spec(mesh), fsdp.adamw(lr=0.01), seed=3)
    state, loss = T.forward_backward(model, cut.mlp_loss)(state, cut.mlp_batch(0, 0))
    return fsdp.full_params(state), loss.item(), fsdp.shard(fsdp.full_params(state), state.spec).spec == state.spec


class Scaled(torch.nn.Module):
    """A table that is a DTensor, as modules of torchtitan have."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.up, table = torch.nn.Linear(4, 4), torch.arange(1, 5, dtype=torch.float32)
        self.register_buffer("table", DTensor.from_local(table, tp, [Shard(0)], run_check=False), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table: Any = self.table
        return self.up(x) * table.to_local()


def scaled() -> Any:
    mesh, weights = fsdp.local_mesh(), {"up.weight": torch.eye(4), "up.bias": torch.zeros(4)}
    state, model = fsdp.init(lambda: Scaled(mesh["tp"]), fsdp.Spec(mesh, own={"*": "tp"}), weights=weights)
    return T.apply(model)(state, torch.ones(4))[1].tolist(), model.table.shape


def test_init_makes_tables_that_are_dtensors_real() -> None:
    with simulate(data=1, tp=2) as ranks:
        assert by_rank(ranks(scaled)) == [([1, 2, 3, 4], (8,))] * 2


def test_init_has_the_bits_of_one_rank() -> None:
    state, model = fsdp.init(cut.mlp, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.01), seed=3)
    weights, (_, loss) = fsdp.full_params(state), T.forward_backward(model, cut.mlp_loss)(state, cut.mlp_batch(0, 0))
    with simulate(data=1, tp=2) as ranks:
        for whole, found, same in by_rank(ranks(initialised, True)):
            assert all(torch.equal(whole[name], weights[name]) for name in weights)
            assert found == pytest.approx(loss.item(), abs=1e-12)
            assert same
        with pytest.raises(fsdp.LaunchError, match="src_data_rank=None"):
            ranks(initialised, False).get()


# ---------------------------------------------------------------- rules


def test_rules_follow_from_placements() -> None:
    with simulate(data=1, tp=2) as ranks:
        said, again, layout = by_rank(ranks(ruled))[0]
    assert "blocks.*.up.weight: cut along tp in dim 0" in said
    assert "blocks.*.down.weight: cut along tp in dim 1" in said
    assert "*: equal along tp, gradients already equal" in said
    assert "zero3(data)" in said
    assert again
    assert layout


def ruled() -> Any:
    mesh = fsdp.local_mesh()
    params, _ = fsdp.functionalize(cut.cut_mlp(mesh["tp"]))
    spec = fsdp.Spec(mesh)
    state = fsdp.shard(params, spec)
    again = fsdp.shard(params, state.spec).spec == state.spec
    return str(state.spec), again, fsdp.make_layout(params, spec).hash == state.layout.hash


def one(what: str) -> Any:
    """Leaves, and how they are sharded."""
    mesh = fsdp.local_mesh()
    tp, x = mesh["tp"], torch.arange(12.0).view(6, 2)
    w = distribute_tensor(x, tp, [Shard(0)])
    more: dict[str, Any] = {}
    if what == "axis":
        w = distribute_tensor(x, DeviceMesh("cpu", tp.mesh, mesh_dim_names=("model",)), [Shard(0)])
    elif what == "ranks":
        other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("data", "tp"))
        w = distribute_tensor(x, other["tp"], [Shard(0)])
    elif what == "partial":
        w = DTensor.from_local(x, tp, [Partial()])
    elif what == "uneven":
        w = distribute_tensor(x[:5], tp, [Shard(0)])
    elif what == "rule":
        more = {"own": {"w": ("tp", 1)}}
    elif what == "averaged":
        w = distribute_tensor(x, mesh["data"], [Shard(0)])
        more = {"placement": fsdp.zero3("data")}
    elif what == "different":
        w = DTensor.from_local(x + mesh.get_rank(), tp, [Replicate()])
    src = 0 if what == "src" else None
    return raised(lambda: fsdp.shard({"w": w, "b": torch.ones(2)}, fsdp.Spec(mesh, **more), src=src))


REFUSED = {
    "axis": "the mesh of the spec has no axis 'model'", "ranks": "it lies on the ranks [",
    "partial": "expected Shard or Replicate", "uneven": "5 elements along dim 0 are cut for 2 ranks along 'tp'",
    "rule": "and it is a DTensor that is cut along tp in dim 0", "averaged": "averages over 'data'",
    "different": "ranks have different values", "src": "of which each rank has its part",
}  # fmt: skip


def test_what_cannot_be_is_refused_by_name() -> None:
    with simulate(data=2, tp=2) as ranks:
        for what, text in REFUSED.items():
            for said in ranks(one, what).get():
                assert text in said, (what, said)


def test_derivatives_that_torch_does_not_have_are_refused() -> None:
    def uses() -> None:
        _, _, model, state = begun("mlp")
        data = cut.mlp_batch(0, 0)
        state, params = fsdp.unshard(state)
        by_func = torch.func.grad(lambda p: cut.mlp_loss(fsdp.bind(model, p), data))
        refused(
            (lambda: by_func(params), "which torch.func does not know"),
            (lambda: T.forward_backward(model, cut.mlp_loss, second_order=True), "is a DTensor in the model"),
        )

    with simulate(data=1, tp=2) as ranks:
        ranks(uses).get()


def test_a_loss_that_is_a_dtensor_comes_back_plain() -> None:
    """Partial along tp."""

    def compared() -> None:
        mesh, _, model, state = begun("mlp")

        def loss_fn(model: Any, data: Any) -> Any:
            return DTensor.from_local(cut.mlp_loss(model, data) / 2, mesh["tp"], [Partial()])

        state, loss = T.forward_backward(model, loss_fn)(state, cut.mlp_batch(0, 0))
        _, right = T.forward_backward(model, cut.mlp_loss)(fsdp.drop_gradients(state), cut.mlp_batch(0, 0))
        assert type(loss) is torch.Tensor
        assert loss.item() == pytest.approx(right.item(), abs=1e-12)

    with simulate(data=1, tp=2) as ranks:
        ranks(compared).get()
