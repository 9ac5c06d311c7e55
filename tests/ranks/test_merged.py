"""Weights with an adapter in them: beside what PEFT has merged, on ranks, of packed bases, in files."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file
from support.ranks import by_rank

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp._spec.precision import Form
from functional_fsdp.convert import model_of

Tree = dict[str, torch.Tensor]
DATA = Path(__file__).parents[1] / "data" / "peers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("peft")
    with tarfile.open(DATA / "peft.tar.xz") as archive:
        archive.extractall(base, filter="data")
    return base / "peft"


def of_peft(folder: str, out: str, preset: str) -> Tree:
    there = fsdp.open_checkpoint(f"{folder}/checkpoint", base=f"{folder}/base")
    placement = getattr(fsdp, preset)("data")
    trainable = {"*lora_*": True, "*modules_to_save*": True, "*": False}
    spec = fsdp.Spec(fsdp.local_mesh(), placement, trainable=trainable)
    state, _ = fsdp.init(lambda: model_of(there, {}), spec, weights=there)
    config = json.loads(Path(f"{folder}/checkpoint/adapter_config.json").read_text())
    fsdp.save_merged(state, out, config, max_shard_size=2000)
    found: Tree = {}
    for _, named in fsdp.merged(state, config):
        assert not found.keys() & named.keys()
        found |= {name: leaf.clone() for name, leaf in named.items()}
    return found


@pytest.mark.parametrize(("preset", "ranks"), [("zero3", 1), ("zero3", 2), ("ddp", 2)])
def test_numbers_and_names_are_those_that_peft_has_merged(
    preset: str, ranks: int, folder: Path, tmp_path: Path
) -> None:
    """LoRA and DoRA of linears and of an embedding, and modules that are saved whole."""
    right = {
        name.removeprefix("merged/"): leaf
        for name, leaf in load_file(folder / "expected.safetensors").items()
        if name.startswith("merged/")
    }
    out = tmp_path / "whole"
    for found in launch(of_peft, (str(folder), str(out), preset), nprocs=ranks, simulate=True):
        for name, leaf in right.items():
            torch.testing.assert_close(found[name], leaf)
        assert {name for name in found if "lora" in name or "base" in name or "saved" in name} == set()
        index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        held = {name: load_file(out / file)[name] for name, file in index.items()}
        assert held.keys() == found.keys()
        assert all(torch.equal(held[name], leaf) for name, leaf in found.items())


class Lora(nn.Module):
    def __init__(self, n: int, m: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(n, m)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(n, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, m, bias=False)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = Lora(20, 33, 4), Lora(33, 20, 4), nn.BatchNorm1d(20)


RULES = {"*.base_layer.weight": fsdp.Precision(main=fsdp.nf4, compute=torch.bfloat16), "*": fsdp.Precision()}
CONFIG: dict[str, Any] = {"lora_alpha": 8, "use_rslora": True, "alpha_pattern": {"down": 2}}


def packed(out: str) -> tuple[Tree, dict[str, torch.dtype], list[int]]:
    torch.manual_seed(0)
    model = Net()
    params, _ = fsdp.functionalize(model)
    spec = fsdp.Spec(fsdp.local_mesh(), precision=RULES)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1), buffers=fsdp.buffers(model))
    fsdp.save_merged(state, out, CONFIG, dtype=torch.float32)
    kinds = {name: leaf.dtype for _, named in fsdp.merged(state, CONFIG) for name, leaf in named.items()}
    counts = [len(named) for _, named in fsdp.merged(state, CONFIG, rank=1)]
    wide: Tree = {}
    for _, named in fsdp.merged(state, CONFIG, dtype=torch.float32):
        wide |= named
    return wide, kinds, counts


def test_packed_bases_are_unpacked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    (found, kinds, none), (_, _, every) = launch(packed, (str(tmp_path / "a"),), nprocs=2, simulate=True)
    for module, alpha in (("up", 8), ("down", 2)):
        part = plain.get_submodule(module)
        weight = part.get_parameter("base_layer.weight").detach()
        form = Form(fsdp.nf4(), tuple(weight.shape), torch.bfloat16)
        base = form.unpack(form.pack(weight)).float()
        product = part.get_parameter("lora_B.default.weight") @ part.get_parameter("lora_A.default.weight")
        right = (base + alpha / 2 * product.detach()).bfloat16().float()  # alpha / sqrt(4)
        torch.testing.assert_close(found[f"{module}.weight"], right, rtol=1e-2, atol=0)  # one number of bfloat16
        assert torch.equal(found[f"{module}.bias"], part.get_parameter("base_layer.bias"))
        assert kinds[f"{module}.weight"] is torch.bfloat16
    assert {*found} == {*nn.ModuleDict({"up": nn.Linear(20, 33), "down": nn.Linear(33, 20),
                                        "norm": nn.BatchNorm1d(20)}).state_dict()}  # fmt: skip
    held = load_file(tmp_path / "a" / "model.safetensors")
    assert all(torch.equal(held[name], leaf) for name, leaf in found.items())
    assert sum(none) == 0
    assert sum(every) == len(found)


def whole(own: dict[str, Any] | None = None) -> Tree:
    torch.manual_seed(0)
    params, _ = fsdp.functionalize(Net())
    mesh = fsdp.local_mesh(data=1) if own is None else fsdp.local_mesh(data=1, tp=2)
    state = fsdp.shard(params, fsdp.Spec(mesh, own=own or {}))
    return {name: leaf.clone() for _, named in fsdp.merged(state, CONFIG) for name, leaf in named.items()}


def test_matrices_that_are_cut_are_joined() -> None:
    """Cut along what the product sums over, a rank's parts would have a product of the right shape."""
    right = whole()
    with fsdp.simulate(data=1, tp=2) as ranks:
        for own in ({"*lora_A*": ("tp", 0), "*lora_B*": ("tp", 1)}, {"*lora_B*": ("tp", 1)}):
            for (found,) in by_rank(ranks(lambda own: (whole(own),), {**own, "*": "tp"})):
                assert found.keys() == right.keys()
                for name, leaf in right.items():
                    torch.testing.assert_close(found[name], leaf)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    state, _ = fsdp.init(Net, fsdp.Spec(fsdp.local_mesh("cpu")))
    cases: list[tuple[type[Exception], Any, str, str]] = [
        (fsdp.SpecError, {"r": 4}, "default", "it says no lora_alpha"),
        (fsdp.TreeError, {"lora_alpha": 4}, "other", "no leaf of the state is of an adapter 'other'"),
        (fsdp.TreeError, {"lora_alpha": 4, "fan_in_fan_out": True}, "default", "does not fit 'up.base_layer.weight'"),
    ]
    for kind, config, adapter, said in cases:
        with pytest.raises(kind, match=re.escape(said)):
            fsdp.merged(state, config, adapter=adapter)
        with pytest.raises(kind, match=re.escape(said)):
            fsdp.save_merged(state, tmp_path / "a", config, adapter=adapter)
    size: Any = "5GB"
    with pytest.raises(fsdp.SpecError, match="max_shard_size: expected a number of bytes, and got '5GB'"):
        fsdp.save_merged(state, tmp_path / "a", {"lora_alpha": 4}, max_shard_size=size)
    assert [*tmp_path.iterdir()] == []
    alone = fsdp.shard({"q.lora_A.default.weight": torch.ones(2, 3)}, fsdp.Spec(fsdp.local_mesh("cpu")))
    with pytest.raises(fsdp.TreeError, match=r"the adapter of 'q' has no 'q\.lora_B\.weight' beside"):
        fsdp.merged(alone, {"lora_alpha": 4})
