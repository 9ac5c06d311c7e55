"""The main job: a byte-level GPT on the source text of Python's standard library, sharded over all ranks of a machine.

    python examples/train_gpt.py                              # every GPU, or 2 processes where there is none
    python examples/train_gpt.py --placement ddp --steps 200
    python examples/train_gpt.py --resume                     # go on from the newest checkpoint, with the same bits
    python examples/train_gpt.py --check --dtype float64      # the same steps unsharded beside it: how far apart?
    torchrun --nproc-per-node 2 examples/train_gpt.py         # the same by torch's launcher
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --resume     # and whoever dies is started again

What to read: `train_step`, ten lines, and the loop in `main`. The model is in _gpt.py, the text in _corpus.py.

    runs/train_gpt/
      loss.png                 losses, learning rate, norms of gradients
      result.json              the figures, a hash of the weights, a sample of what it writes
      checkpoints/step_N       four a run or one every --save-every steps, by torch.distributed.checkpoint

A run that was ended goes on from its newest checkpoint, on as many processes as there are now. The batch of a step is
shared among the ranks, and does not depend on their number. So the same number of processes gives the same bits, and
another gives the same losses but for rounding. Dropout is another matter: each rank draws masks of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import GPT, Config
from _report import Board, Log, digest, draw, peak_memory
from _unsharded import Unsharded
from torch import Tensor, nn

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp import transforms as T

PLACEMENTS = {
    "ddp": fsdp.ddp("data"),
    "zero1": fsdp.zero1("data"),
    "zero2": fsdp.zero2("data"),
    "zero3": fsdp.zero3("data"),
    "hsdp": fsdp.hsdp("replica", "shard"),
    "hfsdp": fsdp.hfsdp("replica", "shard"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DECAY = {"no_decay": 0.0, "default": 0.1}


def loss_fn(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """Mean nats per byte of predicting each byte of the windows [b, t + 1] from those before it."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train_step(model: nn.Module, state: fsdp.State, batch: Tensor) -> tuple[fsdp.State, Tensor, Tensor]:
    torch.manual_seed(extend.seeds(state)(dist.get_rank()))  # for dropout: the same again when the step is
    state, params = fsdp.unshard(state)  # whole weights, ordinary tensors

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return loss_fn(fsdp.bind(model, params), batch)

    grads, loss = torch.func.grad_and_value(loss_of)(params)
    state = fsdp.reduce(state, grads)  # averaged over the ranks
    state, norm = T.global_norm(state)  # of the whole gradient, to look at
    state = fsdp.step(state)  # each rank updates its shard
    state, loss = fsdp.pmean(state, loss)
    return state, loss, norm


def schedule(steps: int, peak: float = 3e-3) -> Callable[[Tensor], Tensor]:
    """Learning rate as a function of the count of steps taken: warm-up over a twentieth of them, a cosine to zero."""
    warmup = max(1, steps // 20)

    def rate(count: Tensor) -> Tensor:
        return peak * torch.clamp((count + 1) / warmup, max=1.0) * (1 + torch.cos(count * (math.pi / steps))) / 2

    return rate


def main(args: argparse.Namespace) -> None:
    """What every rank runs."""
    two_axes = args.placement in ("hsdp", "hfsdp")
    mesh = fsdp.local_mesh(replica=2, shard=-1) if two_axes else fsdp.local_mesh()
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type)
    if device.type == "cuda":  # else two runs of the same steps may differ in the last bit
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    log = Log(args, rank)
    board = Board(args.tensorboard if rank == 0 else None)

    # Data: the batch of a step is a pure function of (seed, step), of which each rank takes its part.
    corpus, context = _corpus.load(), 32 if args.tiny else 128
    config = Config(dropout=args.dropout, **({"width": 64, "depth": 2, "heads": 2} if args.tiny else {}))

    def batch_of(step: int, rank: int) -> Tensor:
        return _corpus.batch(corpus.train, args.batch, context, args.seed, step, rank, ranks).to(device)

    # State: what is sharded how, in which dtypes, and the optimizer.
    dtype, rate = DTYPES[args.dtype], schedule(args.steps)
    precision = fsdp.Precision(main=torch.promote_types(dtype, torch.float32), compute=dtype)
    spec = fsdp.Spec(mesh, PLACEMENTS[args.placement], precision=precision, labels={"*norm*": "no_decay"})
    optimizer = fsdp.adamw(lr=rate, betas=(0.9, 0.95), weight_decay=DECAY)
    state, model = fsdp.init(lambda: GPT(config), spec, optimizer, seed=args.seed)
    if newest := log.latest():
        state = fsdp.load(newest, like=state)
    start = state.steps
    losses = log.begin(start)
    log.say(
        f"text       {len(corpus.train):,} bytes of {corpus.files[0]} files to train on, "
        f"{len(corpus.held_out):,} bytes of {corpus.files[1]} others held out\n"
        f"baselines  {corpus.bigram:.3f} nats a byte knowing the byte before (bigram), "
        f"{corpus.unigram:.3f} without (unigram)\n"
        f"model      {sum(leaf.numel() for leaf in model.parameters()):,} parameters\n\n{spec}\n\n{state}\n"
    )
    beside = None
    if args.check:
        beside = Unsharded(GPT(config), fsdp.full_params(state), dtype, rate, optimizer.betas, DECAY)

    windows = _corpus.windows(corpus.held_out, (4 if args.tiny else 64) * args.batch, context)

    def held_out_loss(state: fsdp.State, every: int) -> tuple[fsdp.State, float]:
        """The loss on files that training never sees; each rank reads its part of every 4th window, say."""
        trained = fsdp.bind(model.eval(), fsdp.full_params(state))
        state, loss = fsdp.pmean(state, evaluate(trained, windows[::every][rank::ranks].to(device)))
        model.train()
        return state, float(loss)

    # Training.
    begin, shown = time.perf_counter(), start
    for step in log.progress(start, args.steps):
        state, loss, norm = train_step(model, state, batch_of(step, rank))
        losses.append(loss)
        log.norms.append(norm)
        if beside and rank == 0:
            beside.step(loss_fn, [batch_of(step, r) for r in range(ranks)], loss)
        if (step + 1) % 10 == 0 or step + 1 == args.steps:  # reading a loss waits for the device
            speed = (step + 1 - start) * args.batch * context / (time.perf_counter() - begin)
            for kept in (losses, log.norms):
                kept[-10:] = map(float, kept[-10:])  # small tensors kept for long would fragment the heap
            log.show(losses[-1], speed, peak_memory(device))
            for i in range(shown, step + 1):  # losses are means over ranks; one of them writes
                board.add(i + 1, loss=losses[i], norm=log.norms[i], learning_rate=float(rate(torch.tensor(i))))
            board.add(step + 1, tokens_per_second=speed)
            shown = step + 1
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            state, log.held_out[step + 1] = held_out_loss(state, 4)
            board.add(step + 1, held_out=log.held_out[step + 1])
            log.save(losses)
            fsdp.save(state, log.checkpoints / f"step_{step + 1}")
    seconds = time.perf_counter() - begin
    board.close()

    # What came of it.
    state, held_out = held_out_loss(state, 1)
    params = fsdp.full_params(state)
    trained = fsdp.bind(model.eval(), params)
    if rank == 0:
        rates = rate(torch.arange(args.steps)).tolist()
        title = f"GPT of {sum(p.numel() for p in params.values()):,} parameters, {args.placement} on {ranks} ranks"
        baselines = (corpus.unigram, corpus.bigram)
        draw(losses, held_out, *baselines, title, log.out / "loss.png", log.held_out, rates, log.norms)
        text = sample(trained, 32 if args.tiny else 500, context, args.seed, device)
        log.end(
            steps=args.steps, losses=losses, held_out=held_out, bigram=corpus.bigram, unigram=corpus.unigram,
            seconds=seconds, tokens=(args.steps - start) * args.batch * context, memory=peak_memory(device),
            weights=digest(params), sample=text, check=beside.differences(params) if beside else None,
        )  # fmt: skip


@torch.no_grad()
def evaluate(model: Callable[[Tensor], Tensor], windows: Tensor, at_once: int = 32) -> Tensor:
    """Mean nats a byte over the windows [n, t + 1]."""
    losses = [loss_fn(model, some) * len(some) for some in windows.split(at_once)]
    return torch.stack(losses).sum() / len(windows)


@torch.no_grad()
def sample(
    model: Callable[[Tensor], Tensor], length: int, context: int, seed: int, device: torch.device, prompt: str = "def "
) -> str:
    """Text that the model writes after the prompt, a byte at a time."""
    generator = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = model(text[:, -context:])[:, -1].float()
        text = torch.cat((text, torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)), dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's standard library, sharded.")
    add: Any = parser.add_argument
    add("--placement", choices=PLACEMENTS, default="zero3", help="what is sharded (default: %(default)s)")
    add("--steps", type=int, help="steps to train (default: 800, with --check 20)")
    add("--batch", type=int, help="windows a step, shared among the ranks: a multiple of their number (default: 16)")
    add("--dropout", type=float, default=0.0, metavar="P", help="after attention and MLP (default: %(default)s)")
    add("--ranks", type=int, help="processes (default: one a GPU, or 2)")
    add("--dtype", choices=DTYPES, default="float32", help="of compute; main weights are float32 at least")
    add("--seed", type=int, default=0, help="decides weights, data and sample (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder of results; a new run replaces the one there")
    add("--save-every", type=int, metavar="N", help="steps from checkpoint to checkpoint (default: a quarter of them)")
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in the folder, if there is one, of a run with the same --steps, --seed "
        "and --batch; so it is without this flag when torchrun --max-restarts starts the ranks again",
    )
    add("--tensorboard", type=Path, metavar="DIR", help="log to TensorBoard there: means over ranks, by one of them")
    add("--check", action="store_true", help="train unsharded beside it, on all ranks' batches, and compare")
    add("--tiny", action="store_true", help=argparse.SUPPRESS)  # for tests
    args = parser.parse_args()
    if args.check and (args.resume or args.dropout):
        parser.error("--check compares from the first step on, and without random numbers: no --resume, no --dropout")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs a package that is not installed: pip install tensorboard")
    args.steps = args.steps or (20 if args.check else 800)
    args.batch = args.batch or (12 if args.tiny else 16)
    args.save_every = args.save_every or max(1, args.steps // 4)
    return args


if __name__ == "__main__":
    args = arguments()
    if "RANK" in os.environ:  # torchrun has started the ranks
        main(args)
        dist.destroy_process_group()
    else:
        fsdp.launch(main, (args,), nprocs=args.ranks)
