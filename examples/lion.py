"""An optimizer of your own: Lion (Chen et al. 2023), as a pair of pure functions.

    python examples/lion.py                              # 2 ranks on the CPU, or one for each GPU
    torchrun --nproc-per-node 2 examples/lion.py

    init(main) -> opt                               what the optimizer remembers
    update(grads, opt, main, count) -> main, opt    the next weights, and what it remembers of this step

All trees have the structure of `main`. In a State that is `{bucket: FlatBuffer}`, this rank's part of flat buffers in
which many leaves lie end to end, so one elementwise operation updates a whole unit; on one device it may as well be the
parameters themselves. `tree_map` does not care, so the same pair serves both, and this file trains both ways and
compares. `count` is a tensor, the steps taken so far. Nothing here knows of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import functional_fsdp as fsdp

Schedule = Callable[[torch.Tensor], torch.Tensor]


def lion(lr: Schedule, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1) -> fsdp.Optimizer:
    """The sign of a momentum: one buffer of state instead of AdamW's two."""
    b1, b2 = betas

    def init(main: Any) -> Any:
        return tree_map(torch.zeros_like, main)

    def update(grads: Any, momentum: Any, main: Any, count: torch.Tensor) -> tuple[Any, Any]:
        rate = lr(count)
        main = tree_map(
            lambda w, m, g: w - rate * (torch.sign(b1 * m + (1 - b1) * g) + weight_decay * w), main, momentum, grads
        )
        momentum = tree_map(lambda m, g: b2 * m + (1 - b2) * g, momentum, grads)
        return main, momentum  # new tensors, or the same ones changed in place: step takes either

    return fsdp.Optimizer(init, update)


# ------------------------------------------------- a toy: fit a wave


def make_params() -> dict[str, torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

    generator = torch.Generator().manual_seed(0)
    return {"hidden.weight": 4 * draw(1, 64), "hidden.bias": 4 * draw(64), "out.weight": draw(64, 1)}


def loss_fn(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w["hidden.weight"] + w["hidden.bias"]) @ w["out.weight"]
    return (y - torch.sin(3 * x)).square().mean()


value_and_grads = torch.func.grad_and_value(loss_fn)  # (weights, x) -> (gradients, loss)


def main(steps: int = 200) -> None:
    mesh = fsdp.local_mesh()
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), mesh.device_type
    x = torch.linspace(-2, 2, 32 * ranks, dtype=torch.float64, device=device)[:, None]
    mine = x[rank::ranks]  # each rank has points of its own
    optimizer = lion(lr=lambda count: 3e-3 * (1 - count / steps))

    params = {path: leaf.to(device) for path, leaf in make_params().items()}
    momentum = optimizer.init(params)
    state = fsdp.shard(params, fsdp.Spec(mesh), optimizer)

    for step in range(steps):
        # sharded: the step of every rank
        state, weights = fsdp.unshard(state)
        grads, loss = value_and_grads(weights, mine)
        state = fsdp.step(fsdp.reduce(state, grads))

        # plain: the same optimizer on the same parameters, whole, and all of the points
        grads, plain_loss = value_and_grads(params, x)
        params, momentum = optimizer.update(grads, momentum, params, torch.tensor(step, device=device))

        if step % 40 == 0 or step == steps - 1:
            state, loss = fsdp.pmean(state, loss)
            if rank == 0:
                print(f"step {step:3}  loss {loss.item():.6f}  plain {plain_loss.item():.6f}")

    whole = fsdp.full_params(state)
    difference = max((whole[path] - params[path]).abs().max().item() for path in params)
    assert difference < 1e-9, f"the weights differ by {difference}"
    if rank == 0:
        print(f"largest difference of a weight after {steps} steps: {difference:.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started the ranks
        main()
        dist.destroy_process_group()
    else:
        fsdp.launch(main)
