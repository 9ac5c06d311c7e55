"""Other weights, gradients and extras in a State: whole or as shards, on every placement, beside the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from support.driven import refused
from support.presets import PRESETS
from support.problems import LOOPS, Tree, batch, largest, loss_fn, mesh_and_placement, net
from support.ranks import each_rank
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def begin(preset: str, optimizer: Any = None, **spec: Any) -> tuple[fsdp.State, Any]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net())
    return fsdp.shard(params, fsdp.Spec(mesh, placement, **spec), optimizer or fsdp.adamw(lr=1e-2)), model


def bits(state: fsdp.State) -> list[Any]:
    trees = (state.main, state.weights, state.opt, state.buffers, state.count, state.rng, state.extras)
    return [t.flatten().tolist() for t in pytree.tree_leaves(trees) if isinstance(t, torch.Tensor)]


# ---------------------------------------------------------------- weights


def homes(state: fsdp.State) -> dict[str, str]:
    """The path that holds the leaf of each path."""
    return dict(zip(state.layout.paths, state.layout.source, strict=True))


def forms(state: fsdp.State, whole: Tree) -> dict[str, Any]:
    """The same weights in every form that is taken."""
    trains = {path: p.requires_grad for path, p in net().named_parameters()}
    made = {path: nn.Parameter(whole[path], requires_grad=trains[path]) for path in trains}
    once = fsdp.shard({path: made[source] for path, source in homes(state).items()}, state.spec)
    return {
        "whole": whole,
        "shards": fsdp.local_shards(once),
        "buffers": once.main,
        "tied once": {path: whole[path] for path in state.layout.source},
        "on another dtype's way": {path: leaf.float().double() for path, leaf in whole.items()},
    }


@pytest.mark.parametrize("preset", marked([(p,) for p in PRESETS], [("hfsdp",)]))
@each_rank(2)
def test_every_reader_sees_the_new_weights(preset: str) -> None:
    """Weights are the new ones for every reader, and training from them is training from them."""
    state, model = begin(preset)
    data = batch(0, dist.get_rank())
    forward_backward = T.forward_backward(model, loss_fn)
    state = fsdp.step(forward_backward(state, data)[0])
    before = bits(state)
    new = {path: (leaf * 0.5 + 0.25).float().double() for path, leaf in fsdp.full_params(state).items()}
    for name, params in forms(state, new).items():
        for optimizer in (True, False):
            there = fsdp.replace_params(state, params, optimizer=optimizer)
            assert there.between_steps
            assert there.steps == 1
            assert fsdp.full_params(there).keys() == new.keys()
            assert largest(fsdp.full_params(there), new) == 0, name
            assert largest(fsdp.unshard(copy.deepcopy(there))[1], new) == 0, name
            there, logits = T.apply(model)(there, data[0])
            assert torch.equal(logits, fsdp.bind(model, new)(data[0])), name
    there = fsdp.replace_params(state, new)
    assert bits(there)[len(state.main) + len(state.weights) :] == before[len(state.main) + len(state.weights) :]
    moved = fsdp.step(forward_backward(there, data)[0])
    assert bits(state) == before, "a step of the new lineage wrote to the old one"
    assert fsdp.step(forward_backward(state, data)[0]).steps == moved.steps == 2


@pytest.mark.parametrize("preset", ["zero3", "hfsdp"])
@each_rank(2)
def test_a_step_goes_on_where_weights_were_replaced_in_its_middle(preset: str) -> None:
    """The new state has no gradients."""
    state, model = begin(preset)
    plain = fsdp.step(T.forward_backward(model, loss_fn)(copy.deepcopy(state), batch(0, dist.get_rank()))[0])
    middle, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()))
    there = fsdp.replace_params(middle, fsdp.full_params(middle))
    assert there.grads == {}
    assert there.between_steps
    assert bits(there) == bits(state)
    assert bits(fsdp.step(middle)) == bits(plain)


def test_without_an_optimizer_it_is_for_evaluation() -> None:
    state, _ = begin("zero1")
    there = fsdp.replace_params(state, fsdp.full_params(state), optimizer=False)
    assert there.opt == {}
    there = fsdp.reduce(*fsdp.unshard(there))
    with pytest.raises(fsdp.ScheduleError, match="this state has no optimizer"):
        fsdp.step(there)


WRONG: dict[str, tuple[Callable[[fsdp.State, Tree], Any], str]] = {
    "lacks": (lambda s, p: {k: v for k, v in p.items() if k != "tail.pair"},
              r"lacks 'tail\.pair' \(\d+ leaves, expected \d+\)"),
    "unknown": (lambda s, p: {**p, "more": torch.ones(2)}, r"has the unknown 'more'"),
    "shape": (lambda s, p: {**p, "tail.pair": torch.ones(3, dtype=torch.float64)},
              r"'tail\.pair' has shape \(3,\); expected its global shape \(2,\)"),
    "transposed": (lambda s, p: {**p, "blocks.0.up.weight": p["blocks.0.up.weight"].T},
                   r"has shape \(7, 21\); expected its global shape \(21, 7\)"),
    "dtype": (lambda s, p: {k: v.float() for k, v in p.items()},
              r"'embed\.weight' is torch\.float32; expected torch\.float64"),
    "no tensor": (lambda s, p: {**p, "tail.pair": 3.0}, r"'tail\.pair' is a float; expected a tensor"),
    "tied": (lambda s, p: {**p, "head.weight": p["head.weight"] + 1},
             r"'embed\.weight' and 'head\.weight' are one tied leaf, and were given different values"),
    "buckets": (lambda s, p: {"embed.weight": s.main["embed.weight"]},
                r"expected \{bucket: FlatBuffer\} for 'embed\.weight'"),
    "gradients": (lambda s, p: {k: b.but(b.local.float()) for k, b in s.main.items()},
                  r"the bucket 'embed\.weight' is .* expected .* elements of torch\.float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_anything_changes(name: str) -> None:
    state, _ = begin("zero1")
    before = bits(state)
    make, said = WRONG[name]
    with pytest.raises(fsdp.TreeError, match=said):
        fsdp.replace_params(state, make(state, fsdp.full_params(state)))
    assert bits(state) == before
    assert state.between_steps


def test_who_may_not_replace() -> None:
    state, _ = begin("zero3")
    params = fsdp.full_params(state)
    with pytest.raises(fsdp.ScheduleError, match=r"replace_params was called inside a torch\.func transform"):
        torch.func.grad(lambda x: fsdp.replace_params(state, params) and x)(torch.ones(()))
    after = fsdp.step(fsdp.reduce(*fsdp.unshard(state)))
    with pytest.raises(fsdp.StaleStateError, match="replace_params: this State was consumed by step"):
        fsdp.replace_params(state, params)
    assert fsdp.replace_params(after, params).steps == 1


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@each_rank(2)
def test_ranks_that_differ_are_told_so(preset: str) -> None:
    """One rank's weights are other ones, or do not fit; or parts that both ranks hold differ."""
    state, _ = begin(preset)
    before, params, mine = bits(state), fsdp.full_params(state), fsdp.local_shards(state)
    second = dist.get_rank() == 1
    other = {**params, "blocks.0.up.weight": params["blocks.0.up.weight"] + second}
    larger = {**params, "tail.pair": torch.ones(3, dtype=torch.float64) if second else params["tail.pair"]}
    parts = {path: part + second if path == "tail.pair" else part for path, part in mine.items()}
    met = "TreeError: replace_params: " + ("" if second else "rank 1 met TreeError: ")
    said = "replace_params: ranks have different values"
    refused(
        (lambda: fsdp.replace_params(state, other), said, "blocks.0.up.weight"),
        (lambda: fsdp.replace_params(state, larger), f"{met}the leaf 'tail.pair' has shape (3,)"),
        *([(lambda: fsdp.replace_params(state, parts), said, "tail.pair")] if preset == "ddp" else []),
    )
    assert bits(state) == before
    there = fsdp.replace_params(state, params)  # and ranks are together
    assert largest(fsdp.full_params(there), params) == 0


# ---------------------------------------------------------------- an average


@pytest.mark.parametrize("preset", marked([(p,) for p in PRESETS], [("zero2",), ("hsdp",)]))
@each_rank(2)
def test_an_average_of_the_weights_beside_the_plain_module(preset: str, tmp_path: Path) -> None:
    import ema

    plain = net()
    means = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    state, model = begin(preset, fsdp.sgd(lr=0.1))
    state = ema.with_ema(state)
    forward_backward = T.forward_backward(model, loss_fn)
    for step in range(3):
        optimizer.zero_grad()
        sum(loss_fn(plain, batch(step, rank)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        means = {name: p.detach().lerp(means[name], 0.5) for name, p in plain.named_parameters()}
        state = fsdp.step(forward_backward(state, batch(step, dist.get_rank()))[0])
        state = ema.update(state, 0.5)
        average = ema.averaged(state)  # in every step, and training goes on from the raw one
        _, loss = T.apply(model, loss_fn)(average, batch(9, 0))
        seen = fsdp.full_params(average)
        assert largest(seen, means) < 1e-12
    want = loss_fn(lambda x: torch.func.functional_call(plain, means, (x,)), batch(9, 0))
    assert abs(loss - want) < 1e-12
    assert largest(fsdp.full_params(state), {name: p.detach() for name, p in plain.named_parameters()}) < 1e-12
    _, raw = T.apply(model, loss_fn)(state, batch(9, 0))
    assert raw.item() != loss.item()
    loaded = ema.averaged(fsdp.load(fsdp.save(state, tmp_path / "saved"), like=state))
    assert all(torch.equal(leaf, seen[path]) for path, leaf in fsdp.full_params(loaded).items())


# ---------------------------------------------------------------- gradients


def test_gradients_of_another_state() -> None:
    state, model = begin("zero2", fsdp.sgd(lr=1.0))
    forward_backward = T.forward_backward(model, loss_fn)
    expected = fsdp.full_params(fsdp.step(forward_backward(copy.deepcopy(state), batch(0, 0))[0]))
    other, _ = forward_backward(copy.deepcopy(state), batch(0, 0))
    grads = fsdp.finish_reductions(other).grads
    middle, _ = forward_backward(state, batch(1, 0), last_microbatch=False)  # is replaced
    middle = fsdp.replace_grads(middle, grads)
    for buffer in grads.values():
        buffer.local.zero_()  # they were copied
    with pytest.raises(fsdp.ScheduleError, match="has the gradients of a whole round"):
        forward_backward(middle, batch(0, 0))
    assert largest(fsdp.full_params(fsdp.step(middle)), expected) == 0


@each_rank(2)
def test_gradients_that_were_put_into_a_state_are_those_that_the_next_ones_add_to() -> None:
    """Of two microbatches, each alone, and of both where the first's are replaced in between."""
    state, model = begin("zero3", fsdp.sgd(lr=1.0))

    def gradients(state: fsdp.State, micro: int) -> fsdp.State:
        return fsdp.finish_reductions(LOOPS["by_unit"](model, state, batch(0, dist.get_rank(), micro), True)[0])

    def local(state: fsdp.State) -> list[torch.Tensor]:
        return [buffer.local.clone() for buffer in state.grads.values()]

    first, second = (local(gradients(copy.deepcopy(state), micro)) for micro in range(2))
    assert any(one.abs().max() > 1e-3 for one in first if one.numel())
    state = gradients(state, 0)
    others = {name: buffer.but(buffer.local * 4) for name, buffer in state.grads.items()}
    state, _ = fsdp.unshard(fsdp.extend.evolve(state, grads=others), state.units[0])
    assert all(map(torch.equal, local(state), (4 * one for one in first)))
    both = local(gradients(fsdp.release(state, state.units[0]), 1))
    torch.testing.assert_close(both, [4 * a + b for a, b in zip(first, second, strict=True)], rtol=0, atol=1e-12)


def test_which_leaves_got_a_gradient_comes_along() -> None:
    """A leaf that got none keeps its weights under weight decay; of buffers alone every leaf counts."""
    params = {"a.w": torch.ones(3), "b.w": torch.ones(3)}
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0, weight_decay=0.1))
    both = fsdp.reduce(state, {path: torch.ones(3) for path in params})
    there = fsdp.finish_reductions(fsdp.reduce(fsdp.replace_params(state, params), {"w": torch.ones(3)}, "a"))
    one = fsdp.full_params(fsdp.step(fsdp.replace_grads(copied := fsdp.replace_params(state, params), there)))
    assert copied.version.lineage.steps == 1
    assert one["a.w"].tolist() == pytest.approx([-0.1] * 3)
    assert one["b.w"].tolist() == [1.0] * 3
    after = fsdp.full_params(fsdp.step(fsdp.replace_grads(both, there.grads)))
    assert after["b.w"].tolist() == pytest.approx([0.9] * 3)


def test_gradients_that_do_not_fit() -> None:
    state, _ = begin("zero3")
    with pytest.raises(fsdp.TreeError, match=r"replace_grads: expected \{bucket: FlatBuffer\} for .*; got 'tail'"):
        fsdp.replace_grads(state, {"tail": state.main["embed.weight"]})
    with pytest.raises(fsdp.TreeError, match="got a list"):
        fsdp.replace_grads(state, [])
    trainable = {name: state.main[name] for name in state.layout.trainable}
    wrong = {name: b.but(b.local[:-1]) for name, b in trainable.items()}
    with pytest.raises(fsdp.TreeError, match=r"the bucket .* of the same .* leaves at the same places"):
        fsdp.replace_grads(state, wrong)
    assert state.between_steps
    new = fsdp.replace_grads(state, trainable)
    assert fsdp.step(new).steps == 1
    params = {"a.w": torch.ones(3), "b.w": torch.ones(3)}
    other = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    other = fsdp.reduce(other, {"w": torch.ones(3)}, "a")  # finishing them consumes this one
    with pytest.raises(fsdp.TreeError, match=r"replace_grads: expected .*; got 'a', 'b'"):
        fsdp.replace_grads(fsdp.newest(state), other)
    with pytest.raises(fsdp.StaleStateError):
        fsdp.replace_grads(new, other)
    assert fsdp.step(fsdp.replace_grads(other, other)).steps == 1


# ---------------------------------------------------------------- extras


def test_an_extra_may_be_called_as_the_argument_is() -> None:
    state = fsdp.shard({"w": torch.ones(3)}, fsdp.Spec(fsdp.local_mesh()))
    assert fsdp.replace_extras(state, state=torch.ones(2)).extras["state"].tolist() == [1.0, 1.0]


def test_extras_are_named_checked_and_kept(tmp_path: Path) -> None:
    state, _ = begin("zero3")
    more = fsdp.replace_extras(state, seen=torch.zeros(()), ema=state.main)
    assert more.version is state.version
    assert state.extras == {}
    more = fsdp.replace_extras(more, seen=torch.ones(()))
    assert set(more.extras) == {"seen", "ema"}
    assert fsdp.replace_extras(more, seen=None, ema=None).extras == {}
    with pytest.raises(fsdp.TreeError, match=r"replace_extras: 'n\.0' is a int; expected a tensor, as checkpoints"):
        fsdp.replace_extras(more, n=[1])
    with pytest.raises(fsdp.TreeError, match="'w' requires a gradient, and would keep its graph"):
        fsdp.replace_extras(more, w=torch.ones(2, requires_grad=True))
    with torch.inference_mode():
        more = fsdp.replace_extras(more, seen=torch.full((), 2.0))
    assert not more.extras["seen"].is_inference()
    loaded = fsdp.load(fsdp.save(more, tmp_path / "saved"), like=more)
    assert loaded.extras["seen"].item() == 2
