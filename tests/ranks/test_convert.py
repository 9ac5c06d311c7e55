"""Leaves that files cut otherwise: each rank reads and writes its runs of them, and a Mixtral goes both ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from support.cut import written
from support.driven import refused
from support.problems import mesh_and_placement
from support.ranks import each_rank, launch

import functional_fsdp as fsdp

SPELT: dict[str, Any] = {
    "experts": fsdp.Stacked(fsdp.Concatenated([f"experts.{e}.w1", f"experts.{e}.w3"]) for e in range(3)),
    "turned": fsdp.Transposed("kernel"),
    "q": fsdp.Sliced("qkv", 0, of=10),
    "k": fsdp.Sliced("qkv", 5, of=10),
    "v": fsdp.Sliced("qkv", 8, of=10),
    "head.weight": fsdp.Concatenated(["head.a", "head.b"], 1, sizes=[2, 5]),
    "scale": "other",
    "seen": fsdp.Transposed(fsdp.Sliced("watched", 1, of=4), 0, 1),
    "heard": fsdp.Transposed(fsdp.Sliced("watched", 0, of=4), 0, 1),
}


class Small(nn.Module):
    """Odd sizes, a frozen leaf, a tied one whose second path is the one that is spelt, and two buffers."""

    seen: torch.Tensor
    heard: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))
        self.turned = nn.Parameter(torch.randn(9, 7))
        self.q, self.k, self.v = (nn.Parameter(torch.randn(n, 6)) for n in (5, 3, 2))
        self.k.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.randn(2, 3))
        self.register_buffer("heard", torch.randn(2, 1))


def small(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small()


def sharded(preset: str, seed: int) -> fsdp.State:
    mesh, placement = mesh_and_placement(preset)
    module = small(seed)
    params, _ = fsdp.functionalize(module)
    return fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(), buffers=fsdp.buffers(module))


@each_rank(2)
def there_and_back(preset: str, folder: Path) -> None:
    """A model that is written otherwise and read again is the one that was written."""
    written = {**SPELT, "embed.weight": SPELT["head.weight"]}
    del written["head.weight"]  # which are tied
    state = sharded(preset, 3)
    fsdp.save_safetensors(state, folder, convert=written, max_shard_size=400)
    loaded = fsdp.load_weights(sharded(preset, 4), folder, convert=SPELT)
    made, _ = fsdp.init(Small, state.spec, weights=folder, convert=lambda _: SPELT, seed=9)
    for one in (loaded, made):
        held = fsdp.state_dict(one)
        assert [path for path, value in small(3).state_dict().items() if not torch.equal(held[path], value)] == []


@pytest.mark.parametrize("preset", ["zero3", "zero1", "hfsdp"])
def test_each_rank_writes_and_reads_its_runs_of_leaves_that_are_cut_otherwise(preset: str, tmp_path: Path) -> None:
    there_and_back(preset=preset, folder=tmp_path / "there")
    held: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "there").glob("*.safetensors"):
        held |= load_file(file)
    plain = small(3)
    expected = {"kernel": plain.turned.T, "qkv": torch.cat([plain.q, plain.k, plain.v]), "other": plain.scale}
    expected |= {"head.a": plain.embed.weight[:, :2], "head.b": plain.embed.weight[:, 2:]}
    expected |= {"watched": torch.cat([plain.heard.T, plain.seen.T])}
    for e in range(3):
        expected |= {f"experts.{e}.w1": plain.experts[e, :2], f"experts.{e}.w3": plain.experts[e, 2:]}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], value) for name, value in expected.items())


@each_rank(2)
def test_what_does_not_fit_is_named_as_files_name_it(tmp_path: Path) -> None:
    state, own = sharded("zero3", 3), {**SPELT, "embed.weight": "embed"}
    fsdp.save_safetensors(state, tmp_path / "whole", convert=own)
    held = load_file(tmp_path / "whole" / "model.safetensors")
    less = {name: value for name, value in held.items() if name != "experts.1.w3"}
    half, kernel = {"experts.1.w3": held["experts.1.w3"]}, {"kernel": held["kernel"]}
    other = {**own, "scale": f"other{dist.get_rank()}"}

    def load(weights: Any, convert: Any = own, **how: Any) -> Callable[[], Any]:
        return lambda: fsdp.load_weights(state, weights, convert=convert, **how)

    def save(convert: Any) -> Callable[[], Any]:
        return lambda: fsdp.save_safetensors(state, tmp_path / "never", convert=convert)

    refused(
        (load(less), "TreeError: weights: the mapping lacks 'experts.1.w3'. Give names by rename="),
        (load(half, partial=True), "lacks 'experts.0.w1' and 4 more"),
        (load({**held, "experts.3.w1": torch.ones(2, 5)}), "has 'experts.3.w1', which the model has not"),
        (load({**held, "kernel": held["kernel"].T}), "has 'kernel' as [9, 7], the model [7, 9]"),
        (load({**held, "q": torch.ones(5, 6)}, {**own, "q": "q"}), "has 'qkv' with 60 elements, the model 30 of them"),
        (load(held, {**own, "query": "q"}), "SpecError: convert: 'query' is no path of a leaf or buffer"),
        (load(held, [SPELT]), "convert: got a list; expected a mapping"),
        (load(held, other), "ranks have different conversions. The first one that differs: rank 0 has"),
        (save({**own, "v": "v"}), "'qkv' has 60 elements as [10, 6], and leaves fill 48 of them"),
        (save({**own, "q": fsdp.Sliced("qkv", 1, of=10)}), "'q' and 'k' have the same elements of 'qkv'"),
        (save({**own, "q": fsdp.Sliced("qkv", 0, of=12)}),
         "'qkv' is torch.float32 [12, 6] by other leaves and torch.float32 [10, 6] by 'k'"),
        (save({**own, "experts": fsdp.Stacked(["a", "b"])}),
         "'experts' is [3, 4, 5], and Stacked has 2 parts for the 3 elements along its dim 0"),
        (save(other), "ranks have different conversions"),
        (save({"query": "q"}), "'query' is no path of a leaf or buffer"),
    )  # fmt: skip
    load(kernel, {**own, "query": "q"}, partial=True)()
    assert [one.name for one in tmp_path.iterdir()] == ["whole"]


def llama(said: list[Any]) -> Any:
    """A Llama of which transformers has these conversions, with other numbers of query and key heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 5}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model._weight_conversions = said
    return model


def test_conversions_are_those_by_which_transformers_saves() -> None:
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        Split,
        Transpose,
        WeightConverter,
        WeightRenaming,
        revert_weight_conversion,
    )

    kept = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    said = [
        WeightRenaming("blocks.", "layers."),
        WeightConverter("self_attn.qkv.weight", [*kept], [Split(dim=0)]),
        WeightConverter("mlp.both", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Transpose(0, 1), Chunk(dim=0)]),
        WeightConverter(["down.left", "down.right"], "mlp.down_proj.weight", [Concatenate(dim=1)]),
    ]
    model = llama(said)
    expected = revert_weight_conversion(model, model.state_dict())
    found = written(model.state_dict(), fsdp.conversions_of(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found["model.blocks.0.self_attn.qkv.weight"].shape == (16, 8)
    assert found["model.blocks.0.mlp.both"].shape == (8, 24)
    assert fsdp.conversions_of(fsdp.functionalize(model)[1]) == fsdp.conversions_of(model)


def test_what_cannot_be_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Interleave, WeightConverter

    with pytest.raises(fsdp.SpecError, match="got a Linear; expected a PreTrainedModel of transformers"):
        fsdp.conversions_of(nn.Linear(2, 3))
    model = llama([WeightConverter("mixed", "mlp.up_proj.weight", [Interleave(dim=0)])])
    said = r"makes 'model.layers.0.mlp.up_proj.weight' of mixed by \[Interleave\(dim=0\)\]; expected .* met Interleave"
    with pytest.raises(fsdp.SpecError, match=said):
        fsdp.conversions_of(model)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    with pytest.raises(fsdp.SpecError, match=r"transformers \d.* keeps no conversions .* expected 5 or later"):
        fsdp.conversions_of(model)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(fsdp.SpecError, match="transformers is not installed"):
        fsdp.conversions_of(model)


def mixtral(folder: str) -> torch.Tensor:
    """The logits of a model that was read from transformers' files; it is written again as such."""
    from transformers import AutoConfig, MixtralForCausalLM

    config = AutoConfig.from_pretrained(f"{folder}/first")
    spec = fsdp.Spec(fsdp.local_mesh())
    state, model = fsdp.init(
        lambda: MixtralForCausalLM(config), spec, weights=f"{folder}/first", convert=fsdp.conversions_of
    )
    fsdp.save_safetensors(state, f"{folder}/second", convert=fsdp.conversions_of(model), max_shard_size=20_000)
    return fsdp.bind(model, fsdp.full_params(state))(torch.arange(20).view(2, 10)).logits.detach()


def test_a_mixtral_comes_from_transformers_files_and_goes_back(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 30}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True)
    model = MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "first")
    kept = load_file(tmp_path / "first" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in kept
    expected = model(torch.arange(20).view(2, 10)).logits
    for logits in launch(mixtral, (str(tmp_path),), nprocs=2):
        assert torch.equal(logits, expected)
    config.save_pretrained(tmp_path / "second")
    again = MixtralForCausalLM.from_pretrained(tmp_path / "second").eval()
    assert torch.equal(again(torch.arange(20).view(2, 10)).logits, expected)
    first = [*map(str, (tmp_path / "second", tmp_path / "ours", "--config", tmp_path / "second"))]
    convert.main(first)
    convert.main([str(tmp_path / "ours"), str(tmp_path / "third"), *first[2:]])
    held = load_file(tmp_path / "third" / "model.safetensors")
    assert held.keys() == kept.keys()
    assert all(torch.equal(held[name], value) for name, value in kept.items())
