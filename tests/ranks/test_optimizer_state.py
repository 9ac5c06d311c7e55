"""The optimizer's state by leaf path, out and in, beside torch.optim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.ranks import launch

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


def over(preset: str) -> float:
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
    return max(float((whole[path] - p.detach()).abs().max()) for path, p in model.named_parameters())


@pytest.mark.parametrize(("preset", "ranks"), [("zero3", 2), ("zero1", 2), ("zero3", 1)])
def test_an_optimizer_of_torch_goes_on_as_shards(preset: str, ranks: int) -> None:
    assert max(launch(over, (preset,), nprocs=ranks)) < 1e-6


def test_a_look_before_the_first_step_takes_none() -> None:
    def after(look: bool) -> torch.Tensor:
        state = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.1))
        if look:
            kept = fsdp.optimizer_state(state)["w"]
            assert (state.steps, [value.tolist() for value in kept.values()]) == (0, [[0.0] * 3] * 2)
        return fsdp.full_params(steps_of(state, range(2)))["w"]

    assert torch.equal(after(look=True), after(look=False))


def refused(folder: str) -> list[str]:
    mesh, said = fsdp.local_mesh(), []
    params = {"a": torch.ones(3, 4), "b": torch.ones(5)}
    state = steps_of(fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=0.1)), range(1))
    kept = fsdp.optimizer_state(state)

    def tried(source: Any, **kwargs: Any) -> None:
        with pytest.raises((fsdp.FsdpError, FileNotFoundError)) as caught:
            fsdp.load_optimizer_state(kwargs.pop("state", state), source, **kwargs)
        said.append(str(caught.value))

    tried({"a": kept["a"]})
    tried({**kept, "c": kept["b"]})
    tried({**kept, "a": {**kept["a"], "exp_avg": kept["a"]["mean"]}})
    tried({**kept, "b": {name: tensor[:3] for name, tensor in kept["b"].items()}})
    tried(kept, state=fsdp.shard(params, fsdp.Spec(mesh)))
    tried(Path(folder, "none"))
    tried(kept, steps=-1)
    tried(kept, steps=dist.get_rank())
    assert (
        fsdp.load_optimizer_state(state, kept, steps=1000).version.lineage.offset == 0
    )  # of what compiled steps count
    part = fsdp.load_optimizer_state(state, {"b": {"mean": torch.full((5,), 7.0)}}, partial=True)
    mixed = fsdp.optimizer_state(part)
    same = torch.equal(mixed["a"]["mean"], kept["a"]["mean"]) and torch.equal(mixed["b"]["square"], kept["b"]["square"])
    file = Path(folder, f"opt_{dist.get_rank()}.pt")
    torch.save({f"{name}.{path}": t for path, some in kept.items() for name, t in some.items()}, file)
    again = fsdp.optimizer_state(fsdp.load_optimizer_state(part, file))
    return [*said, str(mixed["b"]["mean"].tolist()), str(same), str(torch.equal(again["b"]["mean"], kept["b"]["mean"]))]


def test_what_is_missing_or_unexpected_is_named(tmp_path: Path) -> None:
    for found in launch(refused, (str(tmp_path),), nprocs=2):
        assert "lacks 'mean.b'" in found[0]
        assert "has 'mean.c' and 1 more; this optimizer keeps mean, square, for each leaf by its path" in found[1]
        assert "has 'exp_avg.a'" in found[2]
        assert "has 'mean.b' as [3], the model [5]" in found[3]
        assert "this state has no optimizer" in found[4]
        assert "there is no" in found[5]
        assert "steps=-1" in found[6]
        assert "ranks have different numbers" in found[7]
        assert found[8:] == [str([7.0] * 5), "True", "True"]
