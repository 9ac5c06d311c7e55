"""Float8 training: linears that multiply in float8, by torchao, in a step that is otherwise the same.

    pip install torchao
    python examples/float8.py                    # every GPU (compute capability 8.9 and up), or 2 processes, emulated
    python examples/float8.py --steps 300 --compile

`converted` is all there is to it, before the model is sharded: torchao puts its linears in the place of torch's. Main
weights, gradients and optimizer stay as they are; a weight is gathered in bfloat16 and cast, with one scale a tensor,
where it is used. Trains a byte-level GPT twice, in bfloat16 and in float8, and prints both losses.
"""

from __future__ import annotations

import argparse
from typing import Any

import _corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import GPT, Config
from torch import nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

CONTEXT = 64


def converted(
    model: nn.Module, parts: tuple[str, ...] = ("blocks.",), emulate: bool = False, fsdp2_gathers: bool = False
) -> nn.Module:
    """The model with the linears of these parts in float8; others, as the head, are more sensitive.

    emulate: compute in float32 what float8 would give, where no device has it. fsdp2_gathers: FSDP2's gathers are in
    float8, too; of no account here.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    def chosen(part: nn.Module, path: str) -> bool:
        return path.startswith(parts)

    config = Float8LinearConfig(emulate=emulate, enable_fsdp_float8_all_gather=fsdp2_gathers)
    return convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    return loss


def train(float8: bool, steps: int, width: int, compile: bool) -> list[float]:
    """The mean loss of all ranks at each step."""
    mesh = fsdp.local_mesh()
    torch.manual_seed(0)
    model: nn.Module = GPT(Config(width=width, depth=2))
    if float8:
        model = converted(model, emulate=mesh.device_type == "cpu")
    params, skeleton = fsdp.functionalize(model)
    spec = fsdp.Spec(mesh, precision=fsdp.Precision(compute=torch.bfloat16))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-3))
    forward_backward = T.forward_backward(skeleton, loss_fn, compile=compile)
    text, losses = _corpus.load().train, []
    for step in range(steps):
        batch = _corpus.batch(text, 16, CONTEXT, 0, step, dist.get_rank(), dist.get_world_size())
        state, loss = forward_backward(state, batch.to(mesh.device_type))
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss)
        losses.append(loss)
    return [*map(float, losses)]


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level GPT in bfloat16 and in float8.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 64, for heads of whole float8 tiles")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ranks", type=int)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count() or 2
    for float8 in (False, True):
        losses = fsdp.launch(train, (float8, args.steps, args.width, args.compile), nprocs=ranks)[0]
        print(f"{'float8' if float8 else 'bfloat16':8}  first {losses[0]:.4f}  last ten {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
