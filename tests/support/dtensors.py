"""Models that torch's `parallelize_module` has cut: two layers of matrices, and a small Llama of transformers, by
torch's plans (columns, rows, sequence parallel norms, a cut vocabulary)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

WIDTH, VOCAB, LENGTH = 8, 24, 8
Data = tuple[torch.Tensor, torch.Tensor]
Tree = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + h


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "head": nn.Linear(WIDTH, 3)}).double()


def mlp_loss(model: Any, data: Data) -> torch.Tensor:
    h = data[0]
    for block in model["blocks"]:
        h = block(h)
    return (model["head"](h) - data[1]).square().mean()


def mlp_batch(step: int, rank: int) -> Data:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, WIDTH, generator=g).double(), torch.randn(6, 3, generator=g).double()


def cut_mlp(tp: Any, module: nn.Module | None = None, **how: Any) -> nn.Module:
    plan: Any = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(module or mlp(), tp, plan, **how)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=LENGTH, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def llama_loss(model: Any, data: Data) -> torch.Tensor:
    places = torch.arange(LENGTH)[None]
    logits = model(input_ids=data[0], position_ids=places).logits
    return F.cross_entropy(logits.flatten(0, 1), data[1].flatten())


def llama_batch(step: int, rank: int) -> Data:
    rows = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(100 * step + rank))
    return rows[:, :-1], rows[:, 1:]


def cut_llama(tp: Any) -> nn.Module:
    """torchtitan's plan, with the names of transformers."""
    cut = Shard(1)
    whole: Any = {"desired_input_layouts": (Replicate(),), "input_layouts": (cut,)}
    kwargs: Any = {
        "desired_input_kwarg_layouts": {"hidden_states": Replicate()}, "input_kwarg_layouts": {"hidden_states": cut},
    }  # fmt: skip
    layer: Any = {
        "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**kwargs), "mlp": PrepareModuleInput(**whole),
        **{f"self_attn.{k}_proj": ColwiseParallel() for k in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=cut), "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(output_layouts=cut),
    }  # fmt: skip
    plan: Any = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "model.norm": SequenceParallel(), "lm_head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
        **{f"model.layers.*.{name}": how for name, how in layer.items()},
    }  # fmt: skip
    return parallelize_module(llama(), tp, plan)


MODELS: dict[str, Any] = {
    "mlp": (mlp, cut_mlp, mlp_loss, mlp_batch),
    "llama": (llama, cut_llama, llama_loss, llama_batch),
}


def driven(state: Any, forward_backward: Any, data: list[Data]) -> Any:
    """A step of as many microbatches as there are; the mean loss, and the norm."""
    total: Any = 0.0
    for i, one in enumerate(data):
        state, loss = forward_backward(state, one, last_microbatch=i == len(data) - 1, scale=1 / len(data))
        total = total + loss.detach() / len(data)
    state, norm = T.clip_by_global_norm(state, 1.0)
    state = fsdp.step(state)
    state, total = fsdp.pmean(state, total)
    return state, (total.item(), norm.item())


def plain(which: str, steps: int, ranks: int) -> tuple[list[tuple[float, float]], Tree]:
    """Losses, norms and weights of the model that nobody has cut, on this process alone."""
    make, _, loss_fn, batch = MODELS[which]
    params, model = fsdp.functionalize(make())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=0.01))
    forward_backward, seen = T.forward_backward(model, loss_fn), []
    for step in range(steps):
        state, numbers = driven(state, forward_backward, [batch(step, rank) for rank in range(ranks)])
        seen.append(numbers)
    return seen, fsdp.full_params(state)
