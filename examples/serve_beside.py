"""A model of transformers that generates while it is trained: its weights lie in memory that both sides share.

    python examples/serve_beside.py --steps 30 --every 5         2 processes train, one more generates, all on the CPU

    rank 0, 1   step, step, ... ── delta ──┐ each rank writes its own runs
                                           ▼
                               /dev/shm/.../model.embed_tokens.weight, ...
                                           │ between two batches, when all ranks have written the same step
    server      generate, generate, ... ◄──┘

The first weights come unit by unit by `fsdp.stream`, later ones by `fsdp.delta`, so nothing is gathered for the server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


def make() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes))


def batch_of(step: int, rank: int) -> Tensor:
    """int64 [8, 17]: numbers that count up."""
    first = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return (first + torch.arange(17)) % 64


def loss_fn(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def shared(folder: Path, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Leaves in files that every process maps."""
    return {
        name: torch.from_file(str(folder / name), shared=True, size=shape.numel()).view(shape)
        for name, shape in shapes.items()
    }


def board(folder: Path) -> Tensor:
    """int64 [2, ranks]: which step each rank has begun to write, and which it has written."""
    return torch.from_file(str(folder / "board"), shared=True, size=4, dtype=torch.int64).view(2, 2)


def train(path: str, steps: int, every: int) -> float:
    folder, mesh = Path(path), fsdp.local_mesh("cpu")
    rank = mesh.get_rank()
    state, model = fsdp.init(make, fsdp.Spec(mesh), fsdp.adamw(lr=3e-3), seed=0)
    shapes = {leaf.path: torch.Size(leaf.shape) for bucket in state.layout.buckets.values() for leaf in bucket.leaves}
    weights, turn = shared(folder, shapes), board(folder)
    turn[0, rank] = 1
    for _, named in fsdp.stream(state, rank=0):
        for name, leaf in named.items():
            weights[name].copy_(leaf)
    turn[1, rank] = 1
    since = fsdp.snapshot(state)
    forward_backward = T.forward_backward(model, loss_fn)
    for step in range(1, steps + 1):
        state, loss = forward_backward(state, batch_of(step, rank))
        state = fsdp.step(state)
        if step % every == 0 or step == steps:
            turn[0, rank] = 1 + step
            fsdp.apply_delta(weights, fsdp.delta(since, state))
            turn[1, rank] = 1 + step
        time.sleep(0.02)  # so small a model would be trained before the server has begun
    return loss.item()


def serve(path: str, steps: int) -> None:
    """Generate, with the newest weights from batch to batch, until those of the last step have come."""
    folder, model = Path(path), make().eval()
    own = dict(model.named_parameters())  # a tied weight once, as stream gives it
    weights, turn, taken = shared(folder, {name: p.shape for name, p in own.items()}), board(folder), 0
    while taken < 1 + steps:
        before = turn.clone()
        if before.min() == before.max() > taken:
            with torch.no_grad():
                copies = {name: leaf.clone() for name, leaf in weights.items()}
                if torch.equal(turn, before):  # nobody has written meanwhile
                    taken = int(before.max())
                    for name, p in own.items():
                        p.copy_(copies[name])
        if taken:
            start = torch.arange(3).view(1, 3) + 20
            out = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=6, do_sample=False)
            print(f"step {taken - 1}: {out[0].tolist()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two times that weights are handed over")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.steps)
        return
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        server = subprocess.Popen([sys.executable, __file__, "--serve", folder, "--steps", str(args.steps)])
        try:
            print("loss", fsdp.launch(train, (folder, args.steps, args.every), nprocs=2)[0])
            server.wait(timeout=120)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
