"""Adapters that PEFT has written: onto their base, off it, and back into a folder."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import extend
from functional_fsdp.convert import model_of

DATA = Path(__file__).parents[1] / "data" / "peers"
LAYER = "base_model.model.model.layers.0"
NAMES = {  # some of those that peft.get_peft_model gives, PEFT 0.21.2
    "base_model.model.model.embed_tokens.lora_embedding_A.default": (2, 17),
    "base_model.model.model.embed_tokens.lora_magnitude_vector.default.weight": (8,),
    "base_model.model.model.embed_tokens.base_layer.weight": (17, 8),
    f"{LAYER}.self_attn.q_proj.base_layer.weight": (8, 8),
    f"{LAYER}.self_attn.q_proj.lora_A.default.weight": (2, 8),
    f"{LAYER}.self_attn.q_proj.lora_magnitude_vector.default.weight": (8,),
    f"{LAYER}.self_attn.k_proj.weight": (4, 8),
    f"{LAYER}.input_layernorm.original_module.weight": (8,),
    f"{LAYER}.input_layernorm.modules_to_save.default.weight": (8,),
    "base_model.model.model.norm.modules_to_save.default.weight": (8,),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("peft")
    with tarfile.open(DATA / "peft.tar.xz") as archive:
        archive.extractall(base, filter="data")
    return base / "peft"


def test_an_adapter_and_its_base_have_the_names_of_the_model(folder: Path) -> None:
    alone = fsdp.open_checkpoint(folder / "checkpoint")
    there = fsdp.open_checkpoint(folder / "checkpoint", base=folder / "base")
    assert {name: there.leaves[name][0] for name in NAMES} == NAMES
    assert not alone.keys() & {f"{LAYER}.self_attn.q_proj.base_layer.weight"}
    assert "PEFT LORA on Hugging Face" in repr(there)
    base = load_file(folder / "base" / "model.safetensors")
    for name, value in load_file(folder / "checkpoint" / "adapter_model.safetensors").items():
        assert any(torch.equal(value, there[mine]) for mine in there if mine.startswith(name.rpartition(".")[0]))
    assert torch.equal(there[f"{LAYER}.self_attn.k_proj.weight"], base["model.layers.0.self_attn.k_proj.weight"])
    names = "base_layer", "lora_A.default", "lora_B.default", "lora_magnitude_vector.default"
    w, a, b, magnitude = (there[f"{LAYER}.self_attn.q_proj.{name}.weight"] for name in names)
    moved = w + 6 / 2 * b @ a  # lora_alpha / r, as the config says
    moved *= (magnitude / moved.norm(dim=1))[:, None]
    merged = load_file(folder / "expected.safetensors")["merged/model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(moved, merged)


@each_rank("nprocs")
def there_and_back(nprocs: int, folder: Path, out: Path) -> None:
    there = fsdp.open_checkpoint(folder / "checkpoint", base=folder / "base")
    spec = fsdp.Spec(fsdp.local_mesh(), trainable={"*lora_*": True, "*modules_to_save*": True, "*": False})
    state, _ = fsdp.init(lambda: model_of(there, {}), spec, weights=there)
    config = json.loads((folder / "checkpoint" / "adapter_config.json").read_text())
    fsdp.save_adapter(state, out, config)
    with pytest.raises(fsdp.TreeError, match="no leaf of the state is of an adapter 'other'"):
        fsdp.save_adapter(state, f"{out}-other", adapter="other")
    assert all(torch.equal(leaf, there[name]) for name, leaf in fsdp.full_params(state).items())


@pytest.mark.parametrize("nprocs", [1, 2])
def test_an_adapter_comes_and_goes(nprocs: int, folder: Path, tmp_path: Path) -> None:
    there_and_back(nprocs=nprocs, folder=folder, out=tmp_path / "out")
    held, again = (load_file(one / "adapter_model.safetensors") for one in (folder / "checkpoint", tmp_path / "out"))
    del held["base_model.model.model.embed_tokens.base_layer.weight"]  # it is the base's
    assert held.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in held.items())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_a_folder_that_is_none_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder / "checkpoint", copy)
    (copy / "adapter_model.safetensors").unlink()
    with pytest.raises(fsdp.CheckpointError, match=r"adapter_model\.safetensors is missing"):
        fsdp.open_checkpoint(copy)
    for text, said in (("{}", "is damaged: KeyError"), ('{"peft_type": "IA3"}', "is of IA3; LORA is read")):
        (copy / "adapter_config.json").write_text(text)
        with pytest.raises(fsdp.CheckpointError, match=rf"adapter_config\.json {said}"):
            fsdp.open_checkpoint(copy)


class Adapted(nn.Module):
    """The leaves of a model whose embedding and head are tied, and saved whole with the adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.q = nn.Module(), nn.Module(), nn.Module()
        for one in (self.embed, self.head):
            one.modules_to_save = nn.ModuleDict({"default": nn.Linear(3, 4, bias=False)})
        self.q.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.head.modules_to_save.default.weight = self.embed.modules_to_save.default.weight  # type: ignore[union-attr]


@each_rank(2)
def test_a_tied_leaf_is_in_the_file_under_each_name_and_sets_in_a_config_are_lists(tmp_path: Path) -> None:
    state, _ = fsdp.init(Adapted, fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data")), seed=1)
    config = {"target_modules": {"b", "a"}, "peft_type": "LORA"}
    fsdp.save_adapter(state, tmp_path / "a", config, dtype=torch.bfloat16)
    held = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert sorted(held) == ["embed.weight", "head.weight", "q.lora_A.weight"]
    want = fsdp.full_params(state)["embed.modules_to_save.default.weight"].bfloat16()
    assert torch.equal(held["embed.weight"], want)
    assert torch.equal(held["head.weight"], want)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"] == ["a", "b"]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"config": "lora"}, "config='lora'.*expected the adapter's config"),
        ({"config": {"x": torch.ones(1)}}, "the config has a Tensor, which JSON has not"),
        ({"dtype": torch.int8}, "expected a floating dtype"),
    ]
    for wrong, said in wrongs:
        with pytest.raises(fsdp.SpecError, match=said):
            fsdp.save_adapter(state, tmp_path / "b", **wrong)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


class Normed(nn.Module):
    """The leaves of a model with a norm that is saved whole, and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.head = nn.Module(), nn.Module()
        self.q.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.head.modules_to_save = nn.ModuleDict({"default": nn.BatchNorm1d(3)})
        self.head.original_module = nn.BatchNorm1d(3)


@each_rank(2)
def test_buffers_of_modules_that_are_saved_whole_are_in_the_file_and_come_back(tmp_path: Path) -> None:
    state, _ = fsdp.init(Normed, fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data")), seed=1)
    held = {path: torch.full_like(t, 7) if "save" in path else t for path, t in state.buffers.items()}
    folder = tmp_path / "a"
    fsdp.save_adapter(extend.evolve(state, buffers=held), folder, {"peft_type": "LORA"}, dtype=torch.bfloat16)
    back = fsdp.load_weights(state, fsdp.open_checkpoint(folder), partial=True).buffers
    assert held.keys() == back.keys()
    assert all(torch.equal(back[path], t) for path, t in held.items())
    written = load_file(folder / "adapter_model.safetensors")
    norm = {"head.running_mean", "head.running_var", "head.num_batches_tracked", "head.weight", "head.bias"}
    assert written.keys() == {"q.lora_A.weight", *norm}
    assert (written["head.running_mean"].dtype, written["head.weight"].dtype) == (torch.float32, torch.bfloat16)
