"""Weights leave and come in as Hugging Face's files, each rank its runs: no rank holds the model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file, save_file
from support.driven import raised, refused
from support.presets import PRESETS, ranks_of
from support.problems import mesh_and_placement
from support.ranks import each_rank, launch
from support.tables import marked

import functional_fsdp as fsdp


class Small(nn.Module):
    """Odd sizes, a tied leaf, a buffer, one without elements, integers."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor([1.5, 2.5]))


def small(seed: int) -> Small:
    torch.manual_seed(seed)
    made = Small()
    made.seen *= seed
    return made


def sharded(preset: str, seed: int) -> tuple[fsdp.State, nn.Module]:
    mesh, placement = mesh_and_placement(preset)
    module = small(seed)
    params, model = fsdp.functionalize(module)
    state = fsdp.shard(params, fsdp.Spec(mesh, placement), fsdp.adamw(), buffers=fsdp.buffers(module))
    return state, model


def written(preset: str, folder: str, size: int) -> None:
    state, _ = sharded(preset, 3)
    fsdp.save_safetensors(state, f"{folder}/whole")
    fsdp.save_safetensors(state, f"{folder}/parts", max_shard_size=size, dtype=torch.bfloat16)
    said = raised(lambda: fsdp.save_safetensors(state, f"{folder}/whole"))
    assert "FileExistsError" in said


@pytest.mark.parametrize("preset", PRESETS)
def test_the_library_reads_what_ranks_wrote(preset: str, tmp_path: Path) -> None:
    launch(written, (preset, str(tmp_path), 250), nprocs=ranks_of(preset, 3))
    expected = {name: value for name, value in small(3).state_dict().items() if name != "head.weight"}
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == sorted(p.name for p in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        for name, value in load_file(tmp_path / "parts" / file).items():
            assert index["weight_map"][name] == file
            assert torch.equal(value, expected[name] if name == "seen" else expected[name].bfloat16())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", "whole"]


def test_a_conjugation_that_torch_has_put_off_is_written(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    state = fsdp.shard({"w": torch.ones(2)}, fsdp.Spec(fsdp.local_mesh()), buffers={"z": z.conj()})
    fsdp.save_safetensors(state, tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")["z"].tolist() == [1 - 2j, 3 + 1j]


def read(preset: str, folder: str) -> None:
    """A model that was read from each kind of source is the one that was written."""
    expected = small(3).state_dict()
    mesh, placement = mesh_and_placement(preset)
    spec = fsdp.Spec(mesh, placement)
    sources: dict[str, Any] = {
        "folder": f"{folder}/whole",
        "file": f"{folder}/whole/model.safetensors",
        "index": f"{folder}/exact",
        "torch": f"{folder}/state.pt",
        "mapping": expected,
    }
    for name, source in sources.items():
        made, _ = fsdp.init(Small, spec, fsdp.adamw(), weights=source, seed=9)
        state, _ = sharded(preset, 4)
        loaded = fsdp.load_weights(state, source)
        for one in (made, loaded):
            held = fsdp.state_dict(one)
            assert [key for key, value in expected.items() if not torch.equal(held[key], value)] == [], name
        assert fsdp.step(fsdp.reduce(*fsdp.unshard(loaded))).steps == 1


@pytest.mark.parametrize("preset", marked([("hfsdp",), ("zero3",), ("ddp",)], [("hfsdp",)]))
def test_weights_come_in_from_any_source(preset: str, tmp_path: Path) -> None:
    launch(written, ("zero3", str(tmp_path), 400), nprocs=2)
    held = small(3).state_dict()
    torch.save(held, tmp_path / "state.pt")
    (tmp_path / "exact").mkdir()
    names = [name for name in held if name != "head.weight"]
    for i, some in enumerate((names[:3], names[3:])):
        save_file({name: held[name].clone() for name in some}, tmp_path / "exact" / f"model-{i}.safetensors")
    weights = {name: f"model-{i}.safetensors" for i, some in enumerate((names[:3], names[3:])) for name in some}
    (tmp_path / "exact" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    launch(read, (preset, str(tmp_path)), nprocs=ranks_of(preset, 3))


@each_rank(2)
def test_names_may_be_others_and_leaves_missing() -> None:
    held = {f"model.{name}": value for name, value in small(3).state_dict().items()}
    state, _ = sharded("zero3", 4)
    by = fsdp.load_weights(state, held, rename=lambda path: f"model.{path}")
    assert torch.equal(fsdp.full_params(by)["layers.0.weight"], held["model.layers.0.weight"])
    plain = small(3).state_dict()
    plain["other"] = plain.pop("scale") + 1
    by = fsdp.load_weights(state, plain, rename={"scale": "other"})
    assert fsdp.full_params(by)["scale"] == 2.5
    some = {"scale": torch.tensor(7.0), "more": torch.ones(2)}
    kept = fsdp.full_params(fsdp.load_weights(state, some, partial=True))
    assert kept["scale"] == 7.0
    assert torch.equal(kept["embed.weight"], small(4).embed.weight)
    made, _ = fsdp.init(Small, state.spec, weights=some, partial=True, seed=2)
    first, _ = fsdp.init(Small, state.spec, seed=2)
    one, other = fsdp.full_params(made), fsdp.full_params(first)
    assert one.pop("scale") == 7.0
    assert all(torch.equal(one[name], other[name]) for name in one)
    evaluated = fsdp.load_weights(state, held, rename="model.{}".format, optimizer=False)
    refused((lambda: fsdp.step(evaluated), "ScheduleError"))


def test_two_leaves_of_one_name_and_of_other_shapes_are_named() -> None:
    leaves = {"a": torch.ones(3, 3), "b": torch.ones(3)}
    state = fsdp.shard(leaves, fsdp.Spec(fsdp.local_mesh()))
    with pytest.raises(
        fsdp.TreeError, match=r"has 'b', which the model has not; it has 'a' as \[3, 3\], the model \[3\]"
    ):
        fsdp.load_weights(state, leaves, rename={"b": "a"})


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)


@each_rank(2)
def test_what_is_wrong_is_named_and_the_state_stays(tmp_path: Path) -> None:
    state, _ = sharded("zero3", 4)
    held, rank = small(3).state_dict(), dist.get_rank()
    if rank == 0:
        (tmp_path / "empty").mkdir()
        save_file({"scale": torch.ones(1000)}, tmp_path / "whole.safetensors")
        (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:500])
        (tmp_path / "text.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0hello")
        torch.save({"scale": Evil()}, tmp_path / "evil.pt")
    dist.barrier()
    nowhere = tmp_path / "nowhere"
    wrong: list[tuple[Any, str]] = [
        ({k: v for k, v in held.items() if "layers" not in k}, "lacks 'layers.0.weight' and 5 more"),
        ({**held, "extra": torch.ones(1)}, "has 'extra', which the model has not"),
        ({**held, "scale": torch.ones(2)}, "has 'scale' as [2], the model []"),
        ({**held, "scale": torch.tensor(3)}, "has 'scale' as torch.int64, the model torch.float32"),
        (nowhere, "FileNotFoundError"),
        (tmp_path / "empty", "has no *.safetensors and no pytorch_model.bin"),
        (tmp_path / "cut.safetensors", "cut.safetensors is no safetensors file"),
        (tmp_path / "text.safetensors", "text.safetensors is no safetensors file"),
        (tmp_path / "evil.pt", "evil.pt wants __builtin__.print to be called"),
        (7, "weights: expected a folder, a file, what open_checkpoint gives, or a mapping"),
        ({**held, "scale": torch.ones(1 + rank)}, "ranks have different weights in their sources"),
    ]
    refused(*((partial(fsdp.load_weights, state, source), said) for source, said in wrong))
    said = raised(partial(fsdp.load_weights, state, nowhere if rank else held))
    assert "FileNotFoundError" in said
    assert ("rank 1 met" in said) == (rank == 0)
    assert fsdp.step(fsdp.reduce(*fsdp.unshard(state))).steps == 1
