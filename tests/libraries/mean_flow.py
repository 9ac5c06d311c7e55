"""MeanFlow (arXiv:2505.13447) on diffusers' DiT, unchanged and driven, beside plain torch. Run by hand:

    pip install --no-deps --target /tmp/diffusers diffusers==0.42.1
    PYTHONPATH=/tmp/diffusers:$PWD OMP_NUM_THREADS=1 python tests/libraries/mean_flow.py [--gloo] [--steps 50]

The model is `DiTTransformer2DModel`, with 4 channels of data and one of r. Its loss has a jvp by inputs, of which a
constant is made. Two ranks have data of their own; the plain module has both, in turn. Losses and weights are compared.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.func import jvp
from torch.nn import attention

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms._seed import seeded

RANKS, BATCH, SIZE, CLASSES, RATE = 2, 4, 8, 10, 1e-3
Batch = dict[str, torch.Tensor]


def dit() -> Any:
    torch.manual_seed(0)
    return import_module("diffusers").DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=5, out_channels=4, num_layers=4, sample_size=SIZE,
        patch_size=2, num_embeds_ada_norm=CLASSES,
    ).double()  # fmt: skip


def batch_of(step: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    r, t = torch.rand(2, BATCH, generator=generator, dtype=torch.float64).sort(0).values
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return {"x": draw(BATCH, 4, SIZE, SIZE), "noise": draw(BATCH, 4, SIZE, SIZE), "r": r, "t": t, "labels": labels}


def mean_flow(model: Any, batch: Batch) -> torch.Tensor:
    """The mean velocity u from r to t is what it would be if it obeyed u = v - (t - r) du/dt."""
    t = batch["t"].view(-1, 1, 1, 1)
    z, v = (1 - t) * batch["x"] + t * batch["noise"], batch["noise"] - batch["x"]

    def velocity(z: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        channel = r.view(-1, 1, 1, 1).expand(-1, 1, SIZE, SIZE)
        u: torch.Tensor = model(torch.cat([z, channel], 1), timestep=1000 * t, class_labels=batch["labels"]).sample
        return u

    at, along = (z, batch["r"], batch["t"]), (v, torch.zeros_like(batch["r"]), torch.ones_like(batch["t"]))
    with attention.sdpa_kernel(attention.SDPBackend.MATH):  # the fused ones have no forward-mode derivative
        u, du = jvp(velocity, at, along)  # type: ignore[misc]
    target = v - (batch["t"] - batch["r"]).view(-1, 1, 1, 1) * du
    error = (u - target.detach()).square().mean((1, 2, 3))
    return (error / (error.detach() + 1e-3)).mean() + error.mean()


def beside(steps: int) -> dict[str, Any]:
    """How far losses and weights of the driven model are from the plain module's, in steps with AdamW."""
    mesh, model = fsdp.local_mesh(), dit().train()
    module = copy.deepcopy(model)
    params, skeleton = fsdp.functionalize(model)
    spec = fsdp.Spec(mesh, fsdp.zero3("data"), schedule=fsdp.Schedule(debug=True))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=RATE, weight_decay=0.01), buffers=fsdp.buffers(model))
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.01)
    forward_backward, losses, far = T.forward_backward(skeleton.train(), mean_flow), [], []
    for step in range(steps):
        batch = batch_of(step, dist.get_rank())
        with seeded(state, 0):  # what drops labels draws the same
            want = mean_flow(module, batch)
        state, loss = forward_backward(state, batch)
        state = fsdp.step(state)
        optimizer.zero_grad()
        want.backward()
        for p in module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.step()
        losses.append(loss.item())
        far.append(abs(loss.item() - want.item()) / want.item())
    weights = fsdp.full_params(state)
    moved = max(float((weights[path] - p.detach()).abs().max()) for path, p in module.named_parameters())
    return {"units": len(state.units), "losses": losses, "losses differ by": max(far), "weights": moved}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gloo", action="store_true", help="processes, in the place of simulated ranks")
    args = parser.parse_args()
    for rank, found in enumerate(fsdp.launch(beside, (args.steps,), nprocs=RANKS, simulate=not args.gloo)):
        losses = found.pop("losses")
        print(f"rank {rank}: losses {losses[0]:.4f} ... {losses[-1]:.4f}", found)
        assert max(found["losses differ by"], found["weights"]) < 1e-9
