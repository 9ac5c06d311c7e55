"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105): replicas train apart, and meet once in many steps.

    python examples/diloco.py                           2 replicas of 2 processes each, or of half the GPUs
    python examples/diloco.py int4                      the outer step's sums travel in 4 bits, or int8

    inner step    AdamW, sharded over "shard"           no gradient is averaged over "replica"
    outer step    start - now, averaged over "replica"  SGD with Nesterov momentum, from the round's start

The round's start and the outer momentum are extras of the state: sharded as main weights are, and saved with them. With
a codec what packing loses of a replica's way is added to its next one; it is an extra, too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import Linear, Sequential, Tanh
from torch.utils._pytree import tree_map

import functional_fsdp as fsdp
from functional_fsdp import State, extend
from functional_fsdp.codecs import Form


def begin(state: State) -> State:
    """The first round starts from the weights as they are, the same in all replicas."""
    start = tree_map(torch.clone, state.main)
    nothing = tree_map(torch.zeros_like, start)
    return fsdp.replace_extras(state, start=start, momentum=nothing, lost=tree_map(torch.clone, nothing))


def lost_of(way: torch.Tensor, wire: Any) -> torch.Tensor:
    """What packing loses."""
    form = Form(wire, tuple(way.shape), torch.float32)
    return way - form.unpack(form.pack(way.float()))


def outer_step(state: State, lr: float = 0.7, momentum: float = 0.9, wire: Any = None) -> State:
    """The replicas meet: all go on from one step that the start takes along their mean way. Consumes `state`."""
    start, moving, lost = (state.extras[name] for name in ("start", "momentum", "lost"))
    way = tree_map(lambda s, w, e: s - w + e, start, state.main, lost)
    lost = lost if wire is None else tree_map(lambda w: lost_of(w, wire), way)
    state, way = fsdp.pmean(state, way, axis="replica", wire=wire)
    moving = tree_map(lambda m, g: momentum * m + g, moving, way)
    start = tree_map(lambda s, m, g: s - lr * (g + momentum * m), start, moving, way)
    state = extend.change_weights(state, "outer_step()", lambda: tree_map(torch.Tensor.copy_, state.main, start))
    return fsdp.replace_extras(state, start=start, momentum=moving, lost=lost)


def main(wire: Any = None, rounds: int = 10, steps: int = 20) -> None:
    mesh = fsdp.local_mesh(replica=2, shard=-1)
    spec = fsdp.Spec(mesh, fsdp.zero3("shard"))
    state, model = fsdp.init(lambda: Sequential(Linear(1, 64), Tanh(), Linear(64, 1)), spec, fsdp.adamw(lr=3e-3))
    state, rank = begin(state), mesh.get_rank()
    if rank == 0:
        print(spec)  # gradients: mean over data ranks; none over replica, where ranks have weights of their own
    x = torch.linspace(-2, 2, 128, device=mesh.device_type)[rank :: mesh.size(), None]  # each rank has its points

    def loss_of(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return (fsdp.bind(model, params)(x) - x.sin()).square().mean()

    for _ in range(rounds):
        for _ in range(steps):
            state, params = fsdp.unshard(state)
            grads, loss = torch.func.grad_and_value(loss_of)(params)
            state = fsdp.step(fsdp.reduce(state, grads))  # the mean over the ranks of a replica
        state, loss = fsdp.pmean(outer_step(state, wire=wire), loss, axis=("replica", "shard"))
        if rank == 0:
            print(f"step {state.steps:3}  loss {loss.item():.6f}")


if __name__ == "__main__":
    codec = {"int4": fsdp.int4(), "int8": fsdp.int8(64)}[sys.argv[1]] if len(sys.argv) > 1 else None
    fsdp.launch(main, (codec,), nprocs=None if torch.cuda.is_available() else 4)
