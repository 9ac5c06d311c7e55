"""What driving costs the host: a module's own training step beside the same one driven, on one rank.

    python examples/benchmark_driving.py                     # CPU, one thread: processor milliseconds a step
    python examples/benchmark_driving.py --width 512 --batch 8

Both sides take turns in one process, AdamW fused on both. On one rank there is nothing to send: weights are lent as
they are stored, and gradients are written where they stay, so what is left is the schedule, and one copy of the
gradients. Times are of the processor, so that other processes count little.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from _gpt import GPT, Config
from train_gpt import loss_fn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def measured(width: int, depth: int, batch: int, seq: int, steps: int) -> tuple[float, float, float]:
    """Milliseconds a step of the module and driven, the medians; and by how much their last losses differ."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(Config(width=width, depth=depth, heads=width // 64))
    params, skeleton = fsdp.functionalize(model)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw(lr=1e-3, weight_decay=0.01))
    forward_backward = T.forward_backward(skeleton, loss_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    tokens = torch.randint(256, (batch, seq + 1))
    loss = torch.zeros(())

    def plain() -> None:
        nonlocal loss
        loss = loss_fn(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def driven() -> None:
        nonlocal state, loss
        state, loss = forward_backward(state, tokens)
        state = fsdp.step(state)

    times: dict[str, list[float]] = {"plain": [], "driven": []}
    losses = {}
    for step in range(steps + 4):
        for name, run in (("plain", plain), ("driven", driven)):
            begun = time.process_time()
            run()
            if step >= 4:
                times[name].append((time.process_time() - begun) * 1e3)
            losses[name] = loss.item()
    return (
        statistics.median(times["plain"]), statistics.median(times["driven"]), abs(losses["plain"] - losses["driven"])
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What driving costs beside the plain module, on one CPU rank.")
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    ((plain, driven, apart),) = fsdp.launch(
        measured, (args.width, args.depth, args.batch, args.seq, args.steps), nprocs=1
    )
    print(
        f"width {args.width}, {args.depth} blocks, {args.batch}×{args.seq} tokens: plain {plain:.1f} ms, driven "
        f"{driven:.1f} ms, driven / plain {driven / plain:.3f}; the last losses differ by {apart:.1e}"
    )


if __name__ == "__main__":
    main()
