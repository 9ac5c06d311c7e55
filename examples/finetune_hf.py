"""Fine-tune a Hugging Face causal language model on the source text of Python's standard library, sharded.

    python examples/finetune_hf.py --save base                       # all weights of a small random Llama
    python examples/finetune_hf.py --model base --save tuned         # low-rank adapters on it, or on any local model
    python examples/finetune_hf.py --model base --lora 0 --dtype bfloat16 --accumulate 4 --remat
    python examples/finetune_hf.py --resume                          # go on from the newest checkpoint
    torchrun --nproc-per-node 2 examples/finetune_hf.py              # the same by torch's launcher
    torchrun --nproc-per-node 2 --max-restarts 3 examples/finetune_hf.py --resume  # and whoever dies is started again

What to read: `LoRA`, `train_step`, and in `main` the transforms, which know nothing of the model that they are given.
Text and progress are those of train_gpt.py. Nothing is downloaded: FOLDER holds a config.json. Where it has no weights
they are random ones, where it has no tokenizer a token is a byte.

    runs/finetune_hf/
      loss.png, result.json    the loss curve; the figures, a hash of the weights, a sample of what it writes
      checkpoints/step_N       four a run or one every --save-every steps, by torch.distributed.checkpoint
    tuned/                     for from_pretrained: whole weights, adapters merged into them

A run that was ended goes on as one of train_gpt.py does. `forward_backward` seeds dropout by step, microbatch and rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import _corpus
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from _report import Log, digest, draw, peak_memory
from torch import Tensor, nn
from train_gpt import DTYPES, PLACEMENTS, schedule
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import functional_fsdp as fsdp
from functional_fsdp import transforms as T


class LoRA(nn.Module):
    """A frozen linear layer and a trained update of low rank beside it (Hu et al. 2021): W x + 2 B A x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(base.weight.new_empty(rank, base.in_features).normal_(std=base.in_features**-0.5))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))  # so that it starts as the base

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + 2 * F.linear(F.linear(x, self.A), self.B)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        self.base.weight += 2 * self.B @ self.A
        return self.base


def build(args: argparse.Namespace) -> Any:
    """The plain module, in the dtype of main weights, with adapters where they are asked for."""
    torch.manual_seed(args.seed)
    folder, dtype = args.model, torch.promote_types(DTYPES[args.dtype], torch.float32)
    config: Any
    if folder is None:
        config = LlamaConfig(
            vocab_size=256, bos_token_id=None, eos_token_id=None,  # bytes
            hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        )  # fmt: skip
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if folder and any(file.match("*model*.safetensors") or file.match("*model*.bin") for file in folder.iterdir()):
        module = AutoModelForCausalLM.from_pretrained(folder, config=config, local_files_only=True, dtype=dtype)
    else:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if args.lora:
        module.requires_grad_(False)
        found = {path: part for path, part in module.named_modules() if fnmatch(path, args.layers)}
        layers = {path: part for path, part in found.items() if isinstance(part, nn.Linear)}
        if not layers:
            raise ValueError(f"--layers {args.layers!r} matches no nn.Linear of {type(module).__name__}")
        for path, layer in layers.items():
            module.set_submodule(path, LoRA(layer, args.lora))
    return module


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    """Mean nats per token of predicting each token of the windows [b, t + 1] from those before it."""
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def train_step(
    forward_backward: Callable[..., tuple[fsdp.State, Tensor]], state: fsdp.State, batch: Tensor
) -> tuple[fsdp.State, Tensor]:
    state, loss = forward_backward(state, batch)  # gathers, reduces and releases unit by unit
    state, _ = T.clip_by_global_norm(state, 1.0)
    state = fsdp.step(state)
    return fsdp.pmean(state, loss)


def main(args: argparse.Namespace) -> None:
    """What every rank runs."""
    two_axes = args.placement in ("hsdp", "hfsdp")
    mesh = fsdp.local_mesh(replica=2, shard=-1) if two_axes else fsdp.local_mesh()
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device(mesh.device_type)
    log = Log(args, rank)
    transformers.utils.logging.disable_progress_bar()

    # Data: tokens. Losses are told by the byte whatever the tokens, so that they compare.
    corpus, tokenizer = _corpus.load(), tokenizer_of(args.model)
    text, unseen = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    per_byte = len(unseen) / len(corpus.held_out)

    # State: main weights that train are float32 or more; frozen ones are sharded with them.
    dtype = DTYPES[args.dtype]
    precision = fsdp.Precision(main=torch.promote_types(dtype, torch.float32), compute=dtype)
    spec = fsdp.Spec(mesh, PLACEMENTS[args.placement], precision=precision)
    optimizer = fsdp.adamw(lr=schedule(args.steps, args.lr), betas=(0.9, 0.95), weight_decay=0.0)
    module = build(args)
    if (tokens := int(text.max()) + 1) > module.config.vocab_size:
        raise ValueError(f"the text has {tokens} tokens, the model {module.config.vocab_size}")
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, spec, optimizer, buffers=fsdp.buffers(module), seed=args.seed)
    total = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    del module, params  # from here on a rank holds its shards
    if newest := log.latest():
        state = fsdp.load(newest, like=state)
    start = state.steps
    losses = log.begin(start)
    log.say(
        f"text       {len(text):,} tokens of {corpus.files[0]} files to train on, "
        f"{len(unseen):,} tokens of {corpus.files[1]} others held out, {1 / per_byte:.2f} bytes a token\n"
        f"baselines  {corpus.bigram:.3f} nats a byte knowing the byte before (bigram), "
        f"{corpus.unigram:.3f} without (unigram)\n"
        f"model      {type(model).__name__}, {total:,} parameters, of which {trained:,} train\n\n{spec}\n\n{state}\n"
    )

    # Transforms: each wraps a model, or a function of a state and a batch.
    training = T.remat(model.train(), args.remat) if args.remat else model.train()
    forward_backward = T.accumulate(T.forward_backward(training, loss_fn), args.accumulate)
    evaluate = T.apply(model, loss_fn)
    generate = T.apply(model, lambda model, ids: model.generate(ids, max_new_tokens=100, do_sample=False))

    # Training.
    begin = time.perf_counter()
    for step in log.progress(start, args.steps):
        batch = _corpus.batch(text, args.batch, args.context, args.seed, step, rank, ranks).to(device)
        state, loss = train_step(forward_backward, state, batch)
        losses.append(loss * per_byte)
        if (step + 1) % 10 == 0 or step + 1 == args.steps:  # reading a loss waits for the device
            speed = (step + 1 - start) * args.batch * args.context / (time.perf_counter() - begin)
            losses[-10:] = map(float, losses[-10:])
            log.show(losses[-1], speed, peak_memory(device))
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            log.save(losses)
            fsdp.save(state, log.checkpoints / f"step_{step + 1}")
    seconds = time.perf_counter() - begin

    # What came of it. Each rank reads its part of the windows; all write the same sample, since all gather weights.
    windows = _corpus.windows(unseen, 16 * args.batch, args.context)[rank::ranks].to(device)
    each = []
    for some in windows.split(args.batch):
        state, loss = evaluate(state, some)
        each.append(loss * len(some) * per_byte / len(windows))
    state, held_out = fsdp.pmean(state, torch.stack(each).sum())
    prompt = encode(tokenizer, torch.tensor([*b"def "], dtype=torch.uint8))[None].long().to(device)
    state, ids = generate(state, prompt)
    weights = fsdp.state_dict(state, model)
    if rank == 0:
        if args.save:
            export(args, weights)
        title = f"{type(model).__name__}, {trained:,} of {total:,} parameters, {args.placement} on {ranks} ranks"
        draw(losses, float(held_out), corpus.unigram, corpus.bigram, title, log.out / "loss.png")
        log.end(
            steps=args.steps, losses=losses, held_out=float(held_out), bigram=corpus.bigram, unigram=corpus.unigram,
            seconds=seconds, tokens=(args.steps - start) * args.batch * args.context,
            memory=peak_memory(device), weights=digest(weights), sample=decode(tokenizer, ids[0]), check=None,
        )  # fmt: skip


def export(args: argparse.Namespace, weights: dict[str, Tensor]) -> None:
    """A folder for from_pretrained: the plain module with these weights, adapters merged into its own."""
    module = build(args)
    module.load_state_dict(weights)
    for path, part in list(module.named_modules()):
        if isinstance(part, LoRA):
            module.set_submodule(path, part.merged())
    module.save_pretrained(args.save)
    if tokenizer := tokenizer_of(args.model):
        tokenizer.save_pretrained(args.save)


def tokenizer_of(folder: Path | None) -> Any:
    """The folder's tokenizer; None where there is none, and a token is a byte."""
    found = folder and any(folder.glob("tokenizer*"))
    return AutoTokenizer.from_pretrained(folder, local_files_only=True) if found else None


def encode(tokenizer: Any, text: Tensor) -> Tensor:
    """Tokens [n] of bytes, uint8 [m]."""
    if tokenizer is None:
        return text
    string = bytes(text.tolist()).decode(errors="replace")
    parts = [string[i : i + 2**16] for i in range(0, len(string), 2**16)]  # which a fast tokenizer takes in parallel
    ids = tokenizer(parts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return torch.tensor([i for part in ids for i in part], dtype=torch.int32)


def decode(tokenizer: Any, ids: Tensor) -> str:
    return str(tokenizer.decode(ids)) if tokenizer else bytes(i % 256 for i in ids.tolist()).decode(errors="replace")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face causal language model, sharded.")
    add: Any = parser.add_argument
    add("--model", type=Path, help="local folder with config.json (default: a small random Llama)")
    add(
        "--lora", type=int, metavar="RANK", help="of adapters; 0 trains all weights (default: 8 with a --model, else 0)"
    )
    add("--layers", default="*_proj", help="glob of linear layers that get adapters (default: %(default)s)")
    add("--placement", choices=PLACEMENTS, default="zero3", help="what is sharded (default: %(default)s)")
    add("--steps", type=int, default=400, help="steps to train (default: %(default)s)")
    add("--batch", type=int, default=16, help="windows a step, shared among the ranks (default: %(default)s)")
    add("--context", type=int, default=128, help="tokens a window (default: %(default)s)")
    add("--accumulate", type=int, default=1, metavar="N", help="microbatches that a rank makes of its part")
    add("--remat", nargs="?", const="model.layers.*", metavar="GLOB", help="modules that recompute (alone: %(const)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add("--ranks", type=int, help="processes (default: one a GPU, or 2)")
    add("--dtype", choices=DTYPES, default="float32", help="of compute; main weights are float32 at least")
    add("--seed", type=int, default=0, help="decides adapters, data and random weights (default: %(default)s)")
    add("--out", type=Path, default=Path("runs/finetune_hf"), help="folder of results, replaced by a new run")
    add("--save-every", type=int, metavar="N", help="steps from checkpoint to checkpoint (default: a quarter of them)")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if any, of a run with the same flags")
    add("--save", type=Path, metavar="FOLDER", help="write the model there at the end, for from_pretrained")
    args = parser.parse_args()
    if args.lora is None:
        args.lora = 8 if args.model else 0
    args.save_every = args.save_every or max(1, args.steps // 4)
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there")
    return args


if __name__ == "__main__":
    args = arguments()
    if "RANK" in os.environ:  # torchrun has started the ranks
        main(args)
        dist.destroy_process_group()
    else:
        fsdp.launch(main, (args,), nprocs=args.ranks)
