"""Gradients in few bits: a byte-level GPT with bfloat16 wires, and with packed ones, with feedback and without.

    python examples/wires.py                               # fp8_block, 60 steps, 2 processes
    python examples/wires.py --wire fp8_block nf4 --steps 300 --seeds 3 --json wires.json

Prints bytes on the wire over those of bfloat16, the loss of the last steps, mean over seeds and their range, and how
far the weights end from those of float32 wires. With feedback what packing loses of a gradient is added to the next
one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
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


def rows(wires: list[str]) -> dict[str, fsdp.Precision]:
    half = torch.bfloat16
    found = {"float32": fsdp.Precision(compute=half, wire=torch.float32), "bfloat16": fsdp.Precision(compute=half)}
    for wire in wires:
        found[f"{wire}, feedback"] = fsdp.Precision(compute=half, wire=CODECS[wire], feedback=True)
        found[wire] = fsdp.Precision(compute=half, wire=CODECS[wire])
    return found


def train(
    precision: fsdp.Precision, steps: int, width: int, seed: int
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The mean loss of all ranks at each step, the weights at the end, and bytes on the wire over those of bfloat16."""
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
    buckets = state.layout.trainable.values()
    share = sum(b.wire_bytes(b.numel) for b in buckets) / sum(2 * b.numel for b in buckets)
    return [*map(float, losses)], {path: p.cpu() for path, p in fsdp.full_params(state).items()}, share


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level GPT whose gradients travel in few bits.")
    parser.add_argument("--wire", choices=[*CODECS], nargs="+", default=["fp8_block"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count() or 2
    print(f"{'wire':>22} {'bytes':>6} {f'loss, last {LAST}':>14} {'range':>17} {'from float32':>13}")
    right: list[dict[str, torch.Tensor]] = []
    table = []
    for name, precision in rows(args.wire).items():
        found = [
            fsdp.launch(train, (precision, args.steps, args.width, seed), nprocs=ranks)[0] for seed in range(args.seeds)
        ]
        ends = [sum(losses[-LAST:]) / len(losses[-LAST:]) for losses, _, _ in found]
        right = right or [params for _, params, _ in found]
        far = [
            float(sum((p - q[k]).square().sum() for k, p in r.items()) ** 0.5)
            for r, (_, q, _) in zip(right, found, strict=True)
        ]
        loss, low, high, share = sum(ends) / len(ends), min(ends), max(ends), found[0][2]
        print(
            f"{name:>22} {share:>6.3f} {loss:>14.4f} {low:>8.4f} {high:>8.4f} {sum(far) / len(far):>13.4f}", flush=True
        )
        table.append({"wire": name, "bytes / bfloat16": share, "losses by seed": ends, "from float32 by seed": far})
    if args.json:
        args.json.write_text(
            json.dumps({"steps": args.steps, "width": args.width, "ranks": ranks, "rows": table}, indent=1)
        )


if __name__ == "__main__":
    main()
