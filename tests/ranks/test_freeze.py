"""freeze and unfreeze on a state that lives, beside torch.optim.AdamW on the plain module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.driven import raised
from support.presets import PRESETS
from support.problems import Tree, batch, largest, loss_fn, mesh_and_placement, net
from support.ranks import each_rank
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

FROZEN = ("blocks.0.*", "tail.pair")
STEPS = {0: "train", 1: "train", 2: "freeze", 3: "train", 4: "save", 5: "unfreeze", 6: "train", 7: "train"}


def plain(world: int) -> Iterator[Tree]:
    """Weights after each step."""
    model = net()
    first = {name for name, p in model.named_parameters() if p.requires_grad}
    some = {name: p for name, p in model.named_parameters() if name.startswith("blocks.0.") or name == "tail.pair"}
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if n in first], lr=1e-2, weight_decay=0.1)
    for step, what in STEPS.items():
        if what in ("freeze", "unfreeze"):
            for p in some.values():
                p.requires_grad_(what == "unfreeze")
                optimizer.state.pop(p, None)
        elif what == "train":
            optimizer.zero_grad()
            for rank in range(world):
                (loss_fn(model, batch(step, rank)) / world).backward()
            optimizer.step()
        yield {name: p.detach().clone() for name, p in model.named_parameters()}


ROWS = [(p, n) for p in PRESETS for n in (1, 2, 4)]


@pytest.mark.parametrize(("preset", "ranks"), marked(ROWS, [("zero3", 1), ("zero2", 2)]))
@each_rank("ranks")
def test_moments_of_what_trains_on_stay_and_others_begin_anew(preset: str, ranks: int, tmp_path: Path) -> None:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(lr=1e-2, weight_decay=0.1))
    forward_backward = T.forward_backward(model, loss_fn)
    weights, moments, grads = [], [], []
    for (step, what), want in zip(STEPS.items(), plain(ranks), strict=True):
        if what == "freeze":
            old, state = state, fsdp.freeze(state, *FROZEN)
            assert "freeze() has taken" in raised(lambda: fsdp.full_params(old))  # noqa: B023
        elif what == "unfreeze":
            state = fsdp.unfreeze(state, *FROZEN)
        elif what == "save":  # it goes on from files
            state = fsdp.load(fsdp.save(state, tmp_path / "saved"), like=state)
        else:
            state, _ = forward_backward(state, batch(step, dist.get_rank()))
            state = fsdp.finish_reductions(state)
            grads.append({leaf.path for b in state.grads.values() for leaf in b.bucket.leaves})
            state = fsdp.step(state)
        weights.append(fsdp.full_params(state))
        moments.append(fsdp.optimizer_state(state))
        assert largest(weights[-1], want) < 1e-9  # AdamW makes much of gradients that are noise
    chosen = {path for path in moments[0] if path.startswith("blocks.0.") or path == "tail.pair"}
    assert len(chosen) == 7
    for at in (2, 5):  # changed here
        for path in moments[at].keys() - chosen:
            for name in ("mean", "square"):
                assert torch.equal(moments[at][path][name], moments[at - 1][path][name]), path
        assert all(torch.equal(weights[at][path], w) for path, w in weights[at - 1].items())
    assert not chosen & moments[2].keys()
    assert not chosen & moments[3].keys()
    assert not any(moments[5][path][name].any() for path in chosen for name in ("mean", "square"))
    assert all(moments[5][path]["missed"] == 3 for path in chosen)
    assert all(torch.equal(weights[3][path], weights[1][path]) for path in chosen)
    assert not chosen & grads[2]
    assert chosen <= grads[3]
    assert int(state.count) == 5


def world_of_one(**spec: Any) -> fsdp.State:
    params = {"a": {"w": torch.ones(3), "b": torch.ones(2)}, "c": {"w": torch.ones(4)}}
    return fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), **spec), fsdp.sgd(lr=0.1, momentum=0.9))


def test_rules_of_the_spec_follow_the_newest_call() -> None:
    state = world_of_one(trainable={"a.*": False, "*": True})
    state = fsdp.unfreeze(state, "a.w")
    assert {leaf.path for b in state.layout.trainable.values() for leaf in b.leaves} == {"a.w", "c.w"}
    state = fsdp.freeze(state, "*")
    assert not state.layout.trainable
    state = fsdp.unfreeze(state, "*")
    assert len(state.layout.trainable) == 2
    state, params = fsdp.unshard(state)
    state = fsdp.step(fsdp.reduce(state, params))
    assert torch.allclose(fsdp.full_params(state)["a"]["b"], torch.full((2,), 0.9))


def test_wrong_patterns_and_moments_are_refused() -> None:
    state = world_of_one()
    with pytest.raises(fsdp.SpecError, match=r"freeze: the pattern 'z\.\*' matches no leaf. Paths look like 'a\."):
        fsdp.freeze(state, "z.*")
    with pytest.raises(fsdp.SpecError, match=r"unfreeze: expected patterns of leaves, got none"):
        fsdp.unfreeze(state)
    with pytest.raises(fsdp.SpecError, match=r"frozen by the spec. Call fsdp\.freeze\(state, pattern\)"):
        fsdp.redistribute(state, fsdp.Spec(fsdp.local_mesh(), trainable={"c.w": False, "*": True}))
    middle, params = fsdp.unshard(state)
    middle = fsdp.reduce(middle, params)
    with pytest.raises(fsdp.StaleStateError, match="freeze"):
        fsdp.freeze(middle, "c.w")
