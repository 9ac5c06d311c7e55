"""Three optimizers on the main job's train step, on 1 and 4 processes; beside each torch's own, unsharded.

    python examples/optimizers.py                         # a minute on 2 cores
    python examples/optimizers.py --steps 1000 --ranks 1 2

What to read: `OPTIMIZERS`, of which a run differs from another in one entry only; the train step is that of train_gpt.

    runs/optimizers/
      losses.png, result.json    all curves; the losses, and how far they are from the unsharded ones
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import _corpus
import torch
from _gpt import GPT, Config
from _report import draw_runs
from _unsharded import Muon
from torch import Tensor, nn
from train_gpt import loss_fn, train_step

import functional_fsdp as fsdp

LABELS = {"blocks.*.attention.*": "matrix", "blocks.*.mlp.*": "matrix"}  # and not embedding, head and norms
OPTIMIZERS = {
    "AdamW": fsdp.adamw(lr=3e-3),
    "RAdam": fsdp.from_torch(torch.optim.RAdam, lr=3e-3),
    "Muon": fsdp.partition({"matrix": fsdp.muon(lr=2e-2, ns_dtype=torch.float32), "default": fsdp.adamw(lr=3e-3)}),
}
Losses = dict[str, list[float]]  # by optimizer, each step's
CONTEXT, BATCH = 64, 16


def plain(name: str, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The same for whole leaves of one process."""
    if name == "Muon":
        return [Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-3)]
    return [getattr(torch.optim, name)([*matrices, *others], lr=3e-3)]


def sharded(steps: int) -> Losses:
    """What every rank runs."""
    mesh, text, found = fsdp.local_mesh(), _corpus.load().train, {}
    for name, optimizer in OPTIMIZERS.items():
        params, model = fsdp.functionalize(gpt(mesh.device_type))
        state = fsdp.shard(params, fsdp.Spec(mesh, labels=LABELS), optimizer)
        losses = []
        for step in range(steps):
            batch = _corpus.batch(text, BATCH, CONTEXT, 0, step, mesh.get_rank(), mesh.size())
            state, loss, _ = train_step(model, state, batch.to(mesh.device_type))
            losses.append(loss)
        found[name] = [*map(float, losses)]
    return found


def unsharded(steps: int, device: str) -> Losses:
    """Plain torch, on all ranks' batches."""
    text, label_of, found = _corpus.load().train, fsdp.Spec({"data": 1}, labels=LABELS).label_of, {}
    for name in OPTIMIZERS:
        model = gpt(device)
        parts: dict[str, list[nn.Parameter]] = {"matrix": [], "default": []}
        for path, p in model.named_parameters():
            parts[label_of(path)].append(p)
        optimizers = plain(name, parts["matrix"], parts["default"])
        losses: list[Tensor] = []
        for step in range(steps):
            loss = loss_fn(model, _corpus.batch(text, BATCH, CONTEXT, 0, step, 0, 1).to(device))
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.detach())
        found[name] = [*map(float, losses)]
    return found


def gpt(device: str) -> GPT:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return GPT(Config(width=64, depth=2, heads=2)).to(device)


def main(args: argparse.Namespace) -> None:
    curves = {"unsharded": unsharded(args.steps, "cuda" if torch.cuda.is_available() else "cpu")}
    for n in args.ranks:
        curves["1 rank" if n == 1 else f"{n} ranks"] = fsdp.launch(sharded, (args.steps,), nprocs=n)[0]
    args.out.mkdir(parents=True, exist_ok=True)
    draw_runs(curves, args.out / "losses.png")
    wanted = curves["unsharded"]
    apart = {
        run: {name: max(abs(a - b) for a, b in zip(losses[name], wanted[name], strict=True)) for name in losses}
        for run, losses in curves.items()
    }
    (args.out / "result.json").write_text(json.dumps({"losses": curves, "apart": apart}, indent=1))
    for name, losses in wanted.items():
        far = ", ".join(f"{apart[run][name]:.1e} on {run}" for run in curves if run != "unsharded")
        print(f"{name}  loss {losses[0]:.3f} to {losses[-1]:.3f}; from the unsharded losses at most {far}")
    print(f"{args.out}/losses.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Three optimizers, sharded and unsharded, in one plot.")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="processes (default: 1 and 4)")
    parser.add_argument("--out", type=Path, default=Path("runs/optimizers"), help="folder of results")
    main(parser.parse_args())
