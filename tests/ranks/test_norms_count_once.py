"""Each element counted once: norms of unique local parts on 4 ranks, beside the plain module's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.presets import PRESETS
from support.problems import batch, loss_fn, mesh_and_placement, net
from support.ranks import launch

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

KINDS = ("main", "weights", "grads")


def norm(state: fsdp.State, kind: str) -> tuple[float, int]:
    """The Euclidean norm over all ranks, and how many ranks hold the first element of the first block."""
    mine = fsdp.local_shards(state, kind, unique=True)  # type: ignore[arg-type]
    zero = torch.zeros((), dtype=torch.float64)
    squares = sum((part.double().square().sum() for part in mine.values()), zero)
    _, (total, held) = fsdp.psum(state, (squares, sum(part.numel() for part in mine.values())))
    return float(total.sqrt()), int(held)


def norms(preset: str) -> dict[str, tuple[float, int]]:
    mesh, placement = mesh_and_placement(preset)
    params, model = fsdp.functionalize(net())
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.sgd(lr=0.1))
    state, _ = T.forward_backward(model, loss_fn)(state, batch(0, dist.get_rank()), last_microbatch=False)
    if preset != "zero3":
        every = fsdp.local_shards(state, "grads")
        assert every
        partial = any("Partial" in repr(b) for b in state.grads.values())
        if partial:
            with pytest.raises(fsdp.ScheduleError, match=r"are partial, .* fsdp\.finish_reductions\(state\) first"):
                fsdp.local_shards(state, "grads", unique=True)
    state = fsdp.finish_reductions(state)
    found = {kind: norm(state, kind) for kind in KINDS if kind != "weights" or state.weights}
    for kind in found:  # views of the state's own buffers, of the same leaves
        mine, every = fsdp.local_shards(state, kind, unique=True), fsdp.local_shards(state, kind)  # type: ignore[arg-type]
        assert mine.keys() == every.keys()
        assert all(not part.numel() or part.data_ptr() == every[path].data_ptr() for path, part in mine.items())
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_each_element_is_on_one_rank(preset: str) -> None:
    model = net()
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(sum(loss_fn(model, batch(0, rank)) / 4 for rank in range(4)), trained)  # type: ignore[arg-type]
    weights = [p.detach() for p in model.parameters()]
    want = {"main": weights, "weights": weights, "grads": grads}
    for found in launch(norms, (preset,), nprocs=4):
        assert found.keys() >= {"main", "grads"}
        assert ("weights" in found) == (preset in ("zero1", "zero2", "hfsdp"))
        for kind, (total, held) in found.items():
            assert total == pytest.approx(torch.cat([t.flatten() for t in want[kind]]).norm().item(), abs=1e-12)
            assert held == sum(t.numel() for t in want[kind])


def experts() -> tuple[dict[str, tuple[float, int]], float]:
    import moe

    state, model = moe.sharded(fsdp.local_mesh(expert=2, data=2), fsdp.sgd(lr=0.5))
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    state, _ = T.forward_backward(model, moe.loss_fn)(state, tokens)
    state, whole = T.global_norm(state)
    return {kind: norm(state, kind) for kind in ("main", "grads")}, whole.item()


def test_experts_count_each_of_their_own() -> None:
    import moe

    moe.GROUP = None
    weights = torch.cat([p.detach().flatten() for p in moe.Model().parameters()]).double()
    for found, whole in launch(experts, nprocs=4, processes=True):
        assert found["main"][0] == pytest.approx(weights.norm().item(), rel=1e-6)
        assert found["main"][1] == found["grads"][1] == weights.numel()
        assert found["grads"][0] == pytest.approx(whole, rel=1e-5)
