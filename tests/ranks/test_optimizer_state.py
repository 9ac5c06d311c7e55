"""The optimizer's state by leaf path, out and in, beside torch.optim."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.driven import refused
from support.ranks import each_rank

import functional_fsdp as fsdp


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)


def torch_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 1.0 + i - 0.3 * step)
        optimizer.step()


def steps_of(state: fsdp.State, steps: range) -> fsdp.State:
    for step in steps:
        state, weights = fsdp.unshard(state)
        grads = {path: torch.full_like(w, 1.0 + i - 0.3 * step) for i, (path, w) in enumerate(weights.items())}
        state = fsdp.step(fsdp.reduce(state, grads))
    return state


def kept_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for path, p in model.named_parameters():
        found[path] = {"mean": optimizer.state[p]["exp_avg"], "square": optimizer.state[p]["exp_avg_sq"]}
    return found


@pytest.mark.parametrize(("preset", "ranks"), [("zero3", 2), ("zero1", 2), ("zero3", 1)])
@each_rank("ranks")
def test_an_optimizer_of_torch_goes_on_as_shards(preset: str, ranks: int) -> None:
    """Three steps of torch.optim, its state taken over, three more in both; and out again."""
    model, optimizer = plain()
    torch_steps(model, optimizer, range(3))
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, getattr(fsdp, preset)("data"))
    params, _ = fsdp.functionalize(model)
    state = fsdp.shard(params, spec, fsdp.adamw(lr=0.1, weight_decay=0.0))
    kept = kept_by(model, optimizer)
    state = fsdp.load_optimizer_state(state, kept, steps=3)
    assert state.steps == 3
    found = fsdp.optimizer_state(state)
    assert all(torch.equal(found[path][name], kept[path][name]) for path in kept for name in ("mean", "square"))
    assert {name for leaf in found.values() for name in leaf} == {"mean", "square"}
    state = steps_of(state, range(3, 6))
    torch_steps(model, optimizer, range(3, 6))
    whole = fsdp.full_params(state)
    assert all((whole[path] - p.detach()).abs().max() < 1e-6 for path, p in model.named_parameters())


def test_a_look_before_the_first_step_takes_none() -> None:
    def after(look: bool) -> torch.Tensor:
        state = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.1))
        if look:
            kept = fsdp.optimizer_state(state)["w"]
            assert (state.steps, [value.tolist() for value in kept.values()]) == (0, [[0.0] * 3] * 2)
        return fsdp.full_params(steps_of(state, range(2)))["w"]

    assert torch.equal(after(look=True), after(look=False))


@each_rank(2)
def test_what_is_missing_or_unexpected_is_named(tmp_path: Path) -> None:
    mesh = fsdp.local_mesh()
    params = {"a": torch.ones(3, 4), "b": torch.ones(5)}
    state = steps_of(fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=0.1)), range(1))
    kept = fsdp.optimizer_state(state)
    short = {**kept, "b": {name: tensor[:3] for name, tensor in kept["b"].items()}}
    of_torch = {**kept, "a": {**kept["a"], "exp_avg": kept["a"]["mean"]}}
    more = "has 'mean.c' and 1 more; this optimizer keeps mean, square, for each leaf by its path"
    load = partial(fsdp.load_optimizer_state, state)
    refused(
        (lambda: load({"a": kept["a"]}), "lacks 'mean.b'"),
        (lambda: load({**kept, "c": kept["b"]}), more),
        (lambda: load(of_torch), "has 'exp_avg.a'"),
        (lambda: load(short), "has 'mean.b' as [3], the model [5]"),
        (
            lambda: fsdp.load_optimizer_state(fsdp.shard(params, fsdp.Spec(mesh)), kept),
            "this state has no optimizer",
        ),
        (lambda: load(tmp_path / "none"), "there is no"),
        (lambda: load(kept, steps=-1), "steps=-1"),
        (lambda: load(kept, steps=dist.get_rank()), "ranks have different numbers"),
    )
    assert load(kept, steps=1000).version.lineage.offset == 0  # of what compiled steps count
    part = load({"b": {"mean": torch.full((5,), 7.0)}}, partial=True)
    mixed = fsdp.optimizer_state(part)
    assert mixed["b"]["mean"].tolist() == [7.0] * 5
    assert torch.equal(mixed["a"]["mean"], kept["a"]["mean"])
    assert torch.equal(mixed["b"]["square"], kept["b"]["square"])
    file = tmp_path / f"opt_{dist.get_rank()}.pt"
    torch.save({f"{name}.{path}": t for path, some in kept.items() for name, t in some.items()}, file)
    again = fsdp.optimizer_state(fsdp.load_optimizer_state(part, file))
    assert torch.equal(again["b"]["mean"], kept["b"]["mean"])
