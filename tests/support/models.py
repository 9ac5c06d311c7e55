"""Models that no one here wrote, and awkward ones: one line a case in CASES. Small, random, float64 unless said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH = 37, 6
Batch = dict[str, Any]


class Case(NamedTuple):
    """A model, a batch of a step and rank, and the loss function of the plain module and of the driven one alike."""

    make: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch]
    loss_fn: Callable[[Any, Batch], torch.Tensor]
    spec: dict[str, Any] = {}  # noqa: RUF012
    warns: str = ""


def batch_of(case: Case, step: int, rank: int, micro: int = 0) -> Batch:
    return case.data(torch.Generator().manual_seed(1000 * step + 10 * rank + micro + 7))


def tokens(g: torch.Generator, *names: str, length: int = LENGTH) -> Batch:
    return {name: torch.randint(0, VOCABULARY, (2, length), generator=g) for name in names}


def numbers(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


# ---------------------------------------------------------------- Hugging Face, from small random configs


def hf(model: str, config: str, settings: dict[str, Any], checkpointing: bool = False) -> Callable[[], nn.Module]:
    """A model of the transformers package by the names of its class and of its configuration's class."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        if checkpointing:
            new = hasattr(made, "activation_checkpointing_enable")  # its name in older versions of the package
            getattr(made, "activation_checkpointing_enable" if new else "gradient_checkpointing_enable")()
        return made

    return make


def causal(g: torch.Generator) -> Batch:
    batch = tokens(g, "input_ids")
    return {**batch, "labels": batch["input_ids"]}


def masked(g: torch.Generator) -> Batch:
    return {**tokens(g, "input_ids", "labels"), "attention_mask": torch.tensor([[1] * LENGTH, [1] * 4 + [0] * 2])}


def translation(g: torch.Generator) -> Batch:
    return tokens(g, "input_ids", "labels")


def image(g: torch.Generator) -> Batch:
    return {"pixel_values": numbers(g, 2, 3, 8, 8), "labels": torch.randint(0, 5, (2,), generator=g)}


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Hugging Face models know their loss."""
    return model(**batch).loss


ATTENTION = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12}
WORDS = {**ATTENTION, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
LLAMA = {**WORDS, "num_key_value_heads": 1}
GPT2 = {"n_layer": 3, "n_head": 2, "n_embd": 8, "vocab_size": VOCABULARY, "n_positions": 16,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
MIXTRAL = {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 1, "experts_implementation": "eager"}
BERT = {**WORDS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2,
      "dropout_rate": 0.0, "decoder_start_token_id": 0}  # fmt: skip
VIT = {**ATTENTION, "image_size": 8, "patch_size": 4, "num_labels": 5}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 3, "time_step_rank": 4}

# ---------------------------------------------------------------- torch's own


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(source), tgt=self.embed(target)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.rnn = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        out, (hidden, cell) = self.rnn(self.embed(source))
        return self.head(out) + hidden.mean() * cell.mean()


class Residual(nn.Module):
    """BatchNorm, and ReLUs in place: on what a unit was given, on what it returns, and after it was added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(*(Residual(6) for _ in range(3)))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.relu(self.stem(x)))
        return self.head(x.mean((2, 3)))


# ---------------------------------------------------------------- awkward ones


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def squeeze(self, x: torch.Tensor) -> torch.Tensor:
        """An entry point other than forward."""
        return torch.tanh(self.up(x)) @ self.down.weight.T


class Stack(nn.Module):
    """Layers, a class token and positions of its own, a head that is tied by reading the embedding's weight."""

    def __init__(self, depth: int = 3, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.start = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.norm = nn.LayerNorm(8)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.run(self.embed(source) + self.start))
        return F.linear(x, self.embed.weight)


class Twice(Stack):
    """The first layer is called again after the others."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        return self.layers[0](x)


class Never(Stack):
    """The second layer is never called, the last one's output is not used."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.layers[2](x)
        return x


class Sometimes(Stack):
    """Some ranks skip the second layer, or all of them: it hangs on the data."""

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(source) + self.start)
        if source.sum() % 2:
            x = self.layers[1](x)
        return F.linear(self.norm(self.layers[2](x)), self.embed.weight)


class Methods(Stack):
    """Layers used by another method than forward."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.squeeze(x)  # type: ignore[operator]
        return x


class Checkpointed(Stack):
    """Recomputation around layers, and around two of them at once."""

    def __init__(self, at_once: int = 1, reentrant: bool = False) -> None:
        super().__init__()
        self.at_once, self.reentrant = at_once, reentrant
        self.head = nn.Linear(8, VOCABULARY)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, len(self.layers), self.at_once):
            part = nn.Sequential(*self.layers[i : i + self.at_once])
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.run(self.embed(source) + self.start)))


class Adapter(nn.Module):
    """A frozen linear layer and a low-rank trained one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def adapted(only: int | None = None) -> nn.Module:
    """Everything is frozen but adapters in the layers, or in one of them."""
    model = Stack().requires_grad_(False)
    for i, layer in enumerate(model.layers):
        if only in (None, i):
            layer.up = Adapter(layer.up)  # type: ignore[arg-type]
    return model


@dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, Any]
    name: str = "layer"


class Nested(nn.Module):
    """Takes and gives containers, keywords, a dataclass; returns a weight as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = Layer(), nn.Parameter(torch.ones(8))

    def forward(self, pair: tuple[torch.Tensor, dict[str, Any]], *, power: int = 1) -> Output:
        x, about = pair
        y = self.inner(x) * about["scale"] ** power
        return Output(y, {"gain": self.gain, "list": [y.detach(), None, (y.mean(), 3)]})


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.parts = nn.ModuleDict({"0": Nested(), "1": Nested()})
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        x, total = self.embed(source), torch.zeros((), dtype=torch.float64)
        for part in self.parts.values():
            out = part((x, {"scale": 0.5}), power=2)
            assert out.name == "layer"
            x = out.hidden * out.extra["gain"]
            total = total + out.extra["list"][2][0].double()
        return self.head(x) + total


class Routed(nn.Module):
    """A layer whose experts are units of their own, nested in what is left of it: a rank may use any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.mix = nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        scores = self.router(y).mean((0, 1)).softmax(-1)
        best = int(scores.argmax())
        return x + self.mix(self.experts[best](y) * scores[best])


def source(g: torch.Generator) -> Batch:
    return tokens(g, "source", "labels")


def pair(g: torch.Generator) -> Batch:
    return tokens(g, "source", "target", "labels")


def pictures(g: torch.Generator) -> Batch:
    return {"x": numbers(g, 4, 3, 5, 5), "labels": torch.randint(0, 5, (4,), generator=g)}


def entropy(model: Any, batch: Batch) -> torch.Tensor:
    rest = {name: t for name, t in batch.items() if name != "labels"}
    logits = model(**rest)
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


NESTED_EXPERTS = {"units": {**{f"layers.{i}": (f"layers.{i}.norm", f"layers.{i}.router", f"layers.{i}.mix")
                              for i in range(3)},
                            **{f"layers.{i}.experts.{k}": f"layers.{i}.experts.{k}" for i in range(3)
                               for k in range(4)}}}  # fmt: skip

CASES: dict[str, Case] = {
    "llama": Case(hf("LlamaForCausalLM", "LlamaConfig", LLAMA), causal, own_loss),
    "llama, checkpointed": Case(hf("LlamaForCausalLM", "LlamaConfig", LLAMA, True), causal, own_loss),
    "gpt2": Case(hf("GPT2LMHeadModel", "GPT2Config", GPT2), causal, own_loss),
    "gpt2, checkpointed": Case(hf("GPT2LMHeadModel", "GPT2Config", GPT2, True), causal, own_loss),
    "mixtral": Case(hf("MixtralForCausalLM", "MixtralConfig", MIXTRAL), causal, own_loss),
    "mixtral, checkpointed": Case(hf("MixtralForCausalLM", "MixtralConfig", MIXTRAL, True), causal, own_loss),
    "bert": Case(hf("BertForMaskedLM", "BertConfig", BERT), masked, own_loss),
    "bert, checkpointed": Case(hf("BertForMaskedLM", "BertConfig", BERT, True), masked, own_loss),
    "t5": Case(hf("T5ForConditionalGeneration", "T5Config", T5), translation, own_loss),
    "t5, checkpointed": Case(hf("T5ForConditionalGeneration", "T5Config", T5, True), translation, own_loss),
    "vit": Case(hf("ViTForImageClassification", "ViTConfig", VIT), image, own_loss),
    "vit, checkpointed": Case(hf("ViTForImageClassification", "ViTConfig", VIT, True), image, own_loss),
    "mamba": Case(hf("MambaForCausalLM", "MambaConfig", MAMBA), causal, own_loss),
    "mamba, checkpointed": Case(hf("MambaForCausalLM", "MambaConfig", MAMBA, True), causal, own_loss),
    "nn.Transformer": Case(Translator, pair, entropy),
    "lstm": Case(Recurrent, source, entropy),
    "resnet": Case(ResNet, pictures, entropy),
    "loose parameters": Case(Stack, source, entropy),
    "a unit called twice": Case(Twice, source, entropy),
    "a unit called never": Case(Never, source, entropy),
    "a unit called on one rank": Case(Sometimes, source, entropy),
    "other entry points": Case(Methods, source, entropy),
    "checkpoint around a layer": Case(Checkpointed, source, entropy),
    "checkpoint around two": Case(lambda: Checkpointed(2), source, entropy),
    "adapters": Case(adapted, source, entropy),
    "one adapter": Case(lambda: adapted(1), source, entropy),
    "containers": Case(Containers, source, entropy),
    "nested units": Case(lambda: Stack(3, Routed), source, entropy, NESTED_EXPERTS),
    "qwen2": Case(hf("Qwen2ForCausalLM", "Qwen2Config", LLAMA), causal, own_loss),
}


def made(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return case.make().to(dtype).train()
