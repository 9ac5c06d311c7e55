"""The models of benchmark.py: how each is built, called and cut into units, and the tokens that it learns.

| `--model`         | what it is                                                                           |
|-------------------|--------------------------------------------------------------------------------------|
| tiny, 0.16b, ...  | a GPT written here, a chain of stages (h, tokens) -> h: every row can run it         |
| mixed, tiny-mixed | state-space, attention and mixture-of-experts blocks in turn (0.75 B, see             |
|                   | `_benchmark_mixed.py`), a chain of stages, too                                       |
| llama, tiny-llama | Hugging Face's Llama from a configuration (1.1 B): rows that take any module         |
| llama3-8b         | the same with the sizes of Llama-3-8B, sequences of 8,192 tokens                     |
| moe, tiny-moe     | Hugging Face's Mixtral from a configuration (1.0 B, two of eight experts a token),   |
|                   | every expert on every rank, sharded as all else is: rows that take any module        |
| hf:Qwen3, ...     | any other causal language model of Hugging Face's, by the name that its classes begin |
|                   | with, of Llama's sizes (on CPUs of tiny-llama's)                                     |

`--layers`, `--hidden` and `--vocab` change sizes, as `--model llama3-8b --layers 2 --hidden 64 --vocab 512`.

Units are the same for every contestant: the embedding, each layer, and the last norm with the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from _benchmark_mixed import Experts, Mamba

from functional_fsdp import transforms as T


@dataclass(frozen=True)
class Config:
    vocab: int
    width: int
    depth: int
    heads: int
    hidden: int
    batch: int  # sequences a rank
    seq: int  # tokens a sequence
    kind: str = "gpt"  # or "mixed", or of Hugging Face's: "Llama", "Mixtral"
    kv_heads: int = 0  # of Hugging Face's
    experts: int = 0  # of Mixtral and "mixed"; two of them a token
    chunks: int = 0  # of tokens, for which head and loss are computed; 0: for all at once

    @property
    def stages(self) -> bool:
        """Whether units are a chain, so that a loop by hand can be written over them."""
        return self.kind in ("gpt", "mixed")

    @property
    def layers(self) -> str:
        """The pattern of the layers' paths: what is compiled where blocks are compiled."""
        return f"{parts(self)[1]}.*"

    def units(self) -> dict[str, tuple[str, ...]]:
        """The paths of the modules of each unit, in order of use."""
        first, _, last = parts(self)
        layers = [self.layers.replace("*", str(i)) for i in range(self.depth)]
        return {first: (first,), **{path: (path,) for path in layers}, "head": last}

    def build(self) -> nn.Module:
        """With random weights, on the device that is the default now."""
        if self.stages:
            return GPT(self)
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # of a name for which transformers makes no mask: else it looks, on the host, whether positions begin anew, and
        # makes one where it cannot look, as in a graph
        transformers.AttentionInterface.register("causal", sdpa_attention_forward)
        settings: dict[str, Any] = {
            "vocab_size": self.vocab, "hidden_size": self.width, "intermediate_size": self.hidden,
            "num_hidden_layers": self.depth, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.seq, "tie_word_embeddings": False, "attn_implementation": "causal",
            "pad_token_id": None,
        }  # fmt: skip
        if self.experts:
            settings |= {"num_local_experts": self.experts, "num_experts_per_tok": 2}
        config = getattr(transformers, f"{self.kind}Config")(**settings)
        model: nn.Module = getattr(transformers, f"{self.kind}ForCausalLM")(config)
        return model.train()

    def loss(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss [] of predicting each of the tokens [batch, seq + 1] from those before it."""
        if self.stages:
            loss: torch.Tensor = model(tokens)
            return loss
        if self.chunks:
            chunked: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
            return chunked
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.build().parameters())

    def sized(self, layers: int | None, width: int | None, vocab: int | None) -> Config:
        """The same with another number of layers, another width (and of all that goes by it), and other words."""
        new = replace(self, depth=layers or self.depth, vocab=vocab or self.vocab)
        if width is None:
            return new
        share = width / self.width
        heads = max(2, round(self.heads * share))
        kv_heads = max(1, heads * self.kv_heads // self.heads) if self.kv_heads else 0
        return replace(new, width=width, heads=heads, kv_heads=kv_heads, hidden=max(1, round(self.hidden * share)))

    def flops(self) -> float:
        """Operations of a token's forward and backward: six for each parameter, and those of causal attention."""
        return 6.0 * self.parameters() + 6.0 * self.depth * self.width * self.seq


MODELS = {
    "tiny": Config(vocab=4096, width=256, depth=4, heads=4, hidden=768, batch=4, seq=128),
    "0.16b": Config(vocab=50304, width=768, depth=12, heads=12, hidden=2048, batch=4, seq=1024),
    "1.2b": Config(vocab=32000, width=2048, depth=20, heads=16, hidden=5632, batch=2, seq=2048),
    "6.7b": Config(vocab=32000, width=4096, depth=32, heads=32, hidden=11008, batch=1, seq=4096),
    "tiny-mixed": Config(
        vocab=4096, width=128, depth=6, heads=4, hidden=192, batch=4, seq=96, kind="mixed", experts=4
    ),
    "mixed": Config(
        vocab=32000, width=1536, depth=18, heads=12, hidden=2048, batch=2, seq=2048, kind="mixed", experts=8
    ),
    "tiny-llama": Config(
        vocab=4096, width=128, depth=3, heads=4, hidden=384, batch=4, seq=64, kind="Llama", kv_heads=2
    ),
    "llama": Config(
        vocab=32000, width=2048, depth=22, heads=32, hidden=5632, batch=2, seq=2048, kind="Llama", kv_heads=4
    ),
    "llama3-8b": Config(
        vocab=128256, width=4096, depth=32, heads=32, hidden=14336, batch=1, seq=8192, kind="Llama", kv_heads=8
    ),
    "tiny-moe": Config(
        vocab=4096, width=128, depth=3, heads=4, hidden=128, batch=4, seq=64, kind="Mixtral", kv_heads=2, experts=4
    ),
    "moe": Config(
        vocab=32000, width=1024, depth=18, heads=16, hidden=2048, batch=2, seq=2048, kind="Mixtral", kv_heads=4,
        experts=8,
    ),
}  # fmt: skip


def named(model: str, cuda: bool) -> Config:
    """The model that `--model` names.

    Raises:
        ValueError: there is none.
    """
    if model in MODELS:
        return MODELS[model]
    kind = model.removeprefix("hf:")
    import transformers

    if kind == model or not hasattr(transformers, f"{kind}ForCausalLM"):
        raise ValueError(f"{model!r}: expected one of {', '.join(MODELS)}, or hf: and a family, as hf:Qwen3")
    return replace(MODELS["llama" if cuda else "tiny-llama"], kind=kind)


@cache
def parts(c: Config) -> tuple[str, str, tuple[str, ...]]:
    """The paths of the embedding, of the list of layers, and of what comes after them, the last norm and the head."""
    if c.stages:
        return "embed", "blocks", ("head",)
    with torch.device("meta"):
        model: Any = c.build()
    modules, embedding = dict(model.named_modules()), model.get_input_embeddings()
    first = next(path for path, part in modules.items() if part is embedding)
    layers = next(path for path, part in modules.items() if isinstance(part, nn.ModuleList) and len(part) == c.depth)
    own = [path.rpartition(".")[0] for path, _ in model.named_parameters()]
    last = [path for path in dict.fromkeys(own) if path != first and not path.startswith(f"{layers}.")]
    return first, layers, tuple(last)


class Embed(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.table = nn.Embedding(c.vocab, c.width)

    def forward(self, h: None, tokens: torch.Tensor) -> Any:
        return self.table(tokens[:, :-1])


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width, bias=False), nn.Linear(c.width, c.width, bias=False)
        self.gate_up, self.down = nn.Linear(c.width, 2 * c.hidden, bias=False), nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> Any:
        q, k, v = self.qkv(self.norm_attention(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(h)).chunk(2, dim=-1)
        return h + self.down(F.silu(gate) * up)


def block(c: Config, i: int) -> nn.Module:
    """The block at this place of a stack."""
    if c.kind == "gpt" or i % 3 == 1:
        return Block(c)
    return Mamba(c.width) if i % 3 == 0 else Experts(c.width, c.hidden, c.experts)


class Head(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(c.width), nn.Linear(c.width, c.vocab, bias=False)
        self.chunks = c.chunks

    def forward(self, h: torch.Tensor, tokens: torch.Tensor) -> Any:
        if self.chunks:
            return T.linear_cross_entropy(self.norm(h), self.out.weight, tokens[:, 1:], chunks=self.chunks)
        logits = self.out(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class GPT(nn.Module):
    """Tokens [batch, seq + 1] -> loss []. Every stage has the signature (h, tokens) -> h; each becomes a unit."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = Embed(c)
        self.blocks = nn.ModuleList(block(c, i) for i in range(c.depth))
        self.head = Head(c)

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.embed(None, tokens)
        for block in self.blocks:
            h = block(h, tokens)
        return self.head(h, tokens)


class ChunkedHead(nn.Linear):
    """The head of one of Hugging Face's models: hidden states and labels -> loss []."""

    chunks: int

    def forward(self, h: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return T.linear_cross_entropy(h, self.weight, labels, self.bias, chunks=self.chunks)


@cache
def _in_chunks(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        h = getattr(self, self.base_model_prefix)(input_ids=tokens, use_cache=False)[0]
        return self.get_output_embeddings()(h, labels)

    return type(f"{cls.__name__}InChunks", (cls,), {"forward": forward, "__module__": cls.__module__})


def in_chunks(model: Any, chunks: int) -> Any:
    """The model with its loss in chunks of tokens, for every contestant the same code: what `T.chunked_loss` does."""
    if isinstance(model, GPT):
        model.head.chunks = chunks
        return model
    head = model.get_output_embeddings()
    head.__class__, head.chunks = ChunkedHead, chunks
    kind: Any = type(model)
    model.__class__ = _in_chunks(kind)
    return model


def batches(c: Config, count: int, device: torch.device) -> list[torch.Tensor]:
    """Random tokens [batch, seq + 1], with frequencies like those of words (p ~ 1/k), in another order on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    words = torch.randperm(c.vocab, generator=generator)
    draws = (c.vocab ** torch.rand(count, c.batch, c.seq + 1, generator=generator)).long() - 1
    return list(words[draws.clamp(0, c.vocab - 1)].to(device))
