"""Gradients in few bits: a byte-level GPT with bfloat16 wires, and with packed ones, with feedback and without.

    python examples/wires.py                               # fp8_block, 60 steps, 2 processes
    python examples/wires.py --wire nf4 --steps 300 --seeds 3

Prints the loss of the last steps, mean over seeds and their range, and how far the weights end from those of float32
wires. With feedback what packing loses of a gradient is added to the next one.
"""

from __future__ import annotations

import argparse
from typing import Any

import _corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import GPT, Config

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

CODECS = {"fp8_block": fsdp.fp8_block(), "mxfp8": fsdp.mxfp8(), "int8": fsdp.int8(64), "nf4": fsdp.nf4()}
CONTEXT, LAST = 64, 20


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    return loss


def rows(wire: str) -> dict[str, fsdp.Precision]:
    half, codec = torch.bfloat16, CODECS[wire]
    return {
        "float32": fsdp.Precision(compute=half, wire=torch.float32),
        "bfloat16": fsdp.Precision(compute=half),
        f"{wire}, feedback": fsdp.Precision(compute=half, wire=codec, feedback=True),
        wire: fsdp.Precision(compute=half, wire=codec),
    }


def train(precision: fsdp.Precision, steps: int, width: int, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The mean loss of all ranks at each step, and the weights at the end."""
    mesh = fsdp.local_mesh()
    spec = fsdp.Spec(mesh, precision=precision)
    state, model = fsdp.init(lambda: GPT(Config(width=width, depth=2)), spec, fsdp.adamw(lr=1e-3), seed=seed)
    forward_backward = T.forward_backward(model, loss_fn)
    text, losses = _corpus.load().train, []
    for step in range(steps):
        batch = _corpus.batch(text, 16, CONTEXT, seed, step, dist.get_rank(), dist.get_world_size())
        state, loss = forward_backward(state, batch.to(mesh.device_type))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss)
    return [*map(float, losses)], {path: p.cpu() for path, p in fsdp.full_params(state).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level GPT whose gradients travel in few bits.")
    parser.add_argument("--wire", choices=[*CODECS], default="fp8_block")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count() or 2
    print(f"{'wire':>22} {f'loss, last {LAST}':>14} {'range':>17} {'from float32':>13}")
    right: list[dict[str, torch.Tensor]] = []
    for name, precision in rows(args.wire).items():
        found = [
            fsdp.launch(train, (precision, args.steps, args.width, seed), nprocs=ranks)[0] for seed in range(args.seeds)
        ]
        ends = [sum(losses[-LAST:]) / len(losses[-LAST:]) for losses, _ in found]
        right = right or [params for _, params in found]
        far = [
            sum((p - q[k]).square().sum() for k, p in r.items()) ** 0.5 for r, (_, q) in zip(right, found, strict=True)
        ]
        low, high = min(ends), max(ends)
        print(f"{name:>22} {sum(ends) / len(ends):>14.4f} {low:>8.4f} {high:>8.4f} {float(sum(far)) / len(far):>13.4f}")


if __name__ == "__main__":
    main()
