"""Float8 training: linears that multiply in float8, by torchao, in a step that is otherwise the same.

    pip install torchao
    python examples/float8.py                    # every GPU (compute capability 8.9 and up), or 2 processes, emulated
    python examples/float8.py --steps 300 --compile
    python examples/float8.py --steps 300 --gather float8      # a third run, whose gathers are in float8, too

`converted` is all there is to it, before the model is sharded: torchao puts its linears in the place of torch's. Main
weights, gradients and optimizer stay as they are; a weight is gathered in bfloat16 and cast, with one scale a tensor,
where it is used. By the precisions of `gathered` it is gathered in float8: half of the bytes, the same numbers. Trains
a byte-level GPT in bfloat16 and in float8, and prints the losses side by side.
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
GATHERED = "float8 gathered"


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


def gathered(model: nn.Module, compute: torch.dtype = torch.bfloat16) -> dict[str, fsdp.Precision]:
    """The precisions of a converted model whose float8 linears' weights are gathered in float8."""
    linears = [path for path, part in model.named_modules() if type(part).__name__ == "Float8Linear"]
    narrow = fsdp.Precision(compute=compute, gather=torch.float8_e4m3fn)
    return {**{f"{path}.weight": narrow for path in linears}, "*": fsdp.Precision(compute=compute)}


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    return loss


def train(kind: str, steps: int, width: int, compile: bool) -> list[float]:
    """The mean loss of all ranks at each step."""
    mesh = fsdp.local_mesh()
    torch.manual_seed(0)
    model: nn.Module = GPT(Config(width=width, depth=2))
    if kind != "bfloat16":
        model = converted(model, emulate=mesh.device_type == "cpu")
    params, skeleton = fsdp.functionalize(model)
    wide = fsdp.Precision(compute=torch.bfloat16)
    spec = fsdp.Spec(mesh, precision=gathered(model) if kind == GATHERED else wide)
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
    parser.add_argument("--gather", choices=["bfloat16", "float8"], default="bfloat16")
    parser.add_argument("--ranks", type=int)
    args = parser.parse_args()
    ranks = args.ranks or torch.cuda.device_count() or 2
    kinds = ["bfloat16", "float8", *([GATHERED] if args.gather == "float8" else [])]
    curves = [fsdp.launch(train, (kind, args.steps, args.width, args.compile), nprocs=ranks)[0] for kind in kinds]
    print(f"{'step':>8}", *(f"{kind:>15}" for kind in kinds))
    for step in dict.fromkeys([*range(0, args.steps, max(args.steps // 10, 1)), args.steps - 1]):
        print(f"{step:>8}", *(f"{curve[step]:>15.4f}" for curve in curves))
    print(f"{'last ten':>8}", *(f"{sum(curve[-10:]) / len(curve[-10:]):>15.4f}" for curve in curves))


if __name__ == "__main__":
    main()
