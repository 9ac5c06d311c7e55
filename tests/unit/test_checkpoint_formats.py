"""Formats of checkpoints: what each refuses, in files that are made here; and this library's own as one of them."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.peers import PeerModel
from torch.distributed.checkpoint.metadata import MetadataIndex

import functional_fsdp as fsdp

DATA = Path(__file__).parents[1] / "data" / "peers"
SHAPES = OrderedDict(w=torch.Size((3, 5)), b=torch.Size((3,)))
FLAT = torch.arange(20.0)


def zero(folder: Path, stage: int, model: dict[str, Any] | None = None, optim: dict[str, Any] | None = None) -> Path:
    """A checkpoint of DeepSpeed's, of two ranks; `model` and `optim` change the first rank's files."""
    folder.mkdir()
    for rank in range(2):
        about = {
            "module": OrderedDict((name, torch.empty(shape)) for name, shape in SHAPES.items()), "buffer_names": [],
            "param_shapes": [SHAPES], "shared_params": {}, "dp_world_size": 2, "mp_world_size": 1, "global_steps": 4,
        }  # fmt: skip
        held = {"step": torch.tensor(4.0), "exp_avg": FLAT[:10] * 2 + rank, "exp_avg_sq": FLAT[:10] * 3 + rank}
        kept: dict[str, Any] = {"zero_stage": stage, "partition_count": 2}
        if stage == 3:
            kept |= {"fp32_flat_groups": [FLAT[:10] + rank], "optimizer_state_dict": {"state": {0: held}}}
        else:
            main = [(FLAT[:10] + 10 * rank)[: 10 - 2 * rank].clone()]
            kept |= {"single_partition_of_fp32_groups": main, "base_optimizer_state": {"state": {0: held}}}
        if rank == 0 or stage == 3:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save({**about, **(model or {} if rank == 0 else {})}, folder / name)
        if rank == 0:
            kept |= optim or {}
        torch.save({"optimizer_state_dict": kept}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def test_what_is_made_here_is_read(tmp_path: Path) -> None:
    """The cuts of stage 2, and of stage 3 where the first rank has 8 of 15 elements and one of padding on the last."""
    there = fsdp.open_checkpoint(zero(tmp_path / "two", 2))
    assert torch.equal(there["w"].view(-1), FLAT[:15])
    assert torch.equal(there["b"], FLAT[15:18])
    there = fsdp.open_checkpoint(zero(tmp_path / "three", 3))
    assert torch.equal(there["w"].view(-1), torch.cat([FLAT[:8], FLAT[:7] + 1]))
    assert torch.equal(there["b"], torch.cat([FLAT[8:10], FLAT[8:9] + 1]))
    assert there.step == 4


MODEL, OPTIM = "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
ZERO: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "parallel": (3, {"mp_world_size": 4}, {}, rf"{MODEL} is of 4 tensor-parallel ranks"),
    "no module": (3, {"module": None}, {}, rf"{MODEL} has no 'module'"),
    "shape": (3, {"param_shapes": [{"w": "3x5"}]}, {}, rf"{MODEL} has 'w' of the shape '3x5'"),
    "stage": (3, {}, {"zero_stage": 7}, rf"{OPTIM} is of ZeRO stage 7 and 2 ranks"),
    "world": (3, {}, {"partition_count": 3}, rf"{OPTIM} is of 3 ranks; 2 files of optimizer states are there"),
    "short": (3, {}, {"fp32_flat_groups": [FLAT[:7]]}, r"has 7 of the 8 elements of 'w' \[8\]|a file is cut short"),
    "slot": (2, {}, {"base_optimizer_state": {"state": {0: {"exp_avg": FLAT[:10], "m": FLAT[:10]}}}},
             r"rank_1_mp_rank_00_optim_states\.pt has no 'm', and zero_pp_rank_0"),
    "slot in three": (3, {}, {"optimizer_state_dict": {"state": {0: {"exp_avg": FLAT[:10]}}}},
                      r"only some ranks' files have 'exp_avg_sq'"),
    "group": (2, {"param_shapes": [SHAPES, {"c": torch.Size((2,))}]}, {}, r"no main weights of the group 1"),
    "something else": (2, {"param_shapes": 5}, {}, r"two is damaged, or of a version that is not read: as DeepSpeed"),
}  # fmt: skip


@pytest.mark.parametrize("how", ZERO)
def test_what_deepspeed_would_not_have_written_is_named(how: str, tmp_path: Path) -> None:
    stage, model, optim, said = ZERO[how]
    with pytest.raises(fsdp.CheckpointError, match=said):
        fsdp.open_checkpoint(zero(tmp_path / "two", stage, model, optim))


def fixture(name: str) -> Callable[[Path], Path]:
    def extracted(folder: Path) -> Path:
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        return folder / name / "checkpoint"

    return extracted


def test_checkpoints_of_this_library_are_read_as_any_other(tmp_path: Path) -> None:
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    params, _ = fsdp.functionalize(module := PeerModel(4))
    state = fsdp.shard(params, spec, fsdp.adamw(), buffers=fsdp.buffers(module))
    ones = {name: {"mean": torch.ones_like(p), "square": torch.full_like(p, 2.0)}
            for name, p in module.named_parameters() if p.requires_grad}  # fmt: skip
    state = fsdp.load_optimizer_state(state, ones, steps=7)
    fsdp.save(state, tmp_path / "ours")
    there = fsdp.open_checkpoint(tmp_path / "ours")
    assert (there.format, there.step, there.ties) == ("functional_fsdp", 7, {"head.weight": "embed.weight"})
    assert {*there.buffers} == {"scale", "seen"}
    assert {*there.frozen} == {"gate.weight"}
    assert all(torch.equal(there[name], value) for name, value in module.state_dict().items())
    made, _ = fsdp.init(PeerModel, spec, fsdp.adamw(), weights=there)
    made = fsdp.load_optimizer_state(made, there)
    assert made.steps == 7
    assert torch.equal(fsdp.optimizer_state(made)["blocks.0.up.bias"]["square"], torch.full((7,), 2.0))


# ---------------------------------------------------------------- Orbax

NEEDS = pytest.mark.skipif(find_spec("tensorstore") is None, reason="Orbax is read by tensorstore, which is not here")


def orbax(folder: Path, arrays: dict[str, torch.Tensor], kinds: dict[str, str] | None = None) -> Path:
    """Arrays of zarr in folders of their own, chunks of a row, as Orbax has them without its store."""
    tensorstore: Any = import_module("tensorstore")
    folder.mkdir(parents=True)
    tree = {}
    for name, held in arrays.items():
        store = {"driver": "file", "path": f"{folder}/{name}/"}
        chunks = [1, *held.shape[1:]] if held.dim() else []
        spec = {"driver": "zarr", "kvstore": store, "metadata": {"chunks": chunks}, "dtype": "float32", "create": True}
        tensorstore.open(spec, shape=[*held.shape]).result()[...] = held.numpy()
        keys = [{"key": key, "key_type": 2} for key in name.split(".")]
        tree[name] = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
    for name, kind in (kinds or {}).items():
        tree[name] = {"key_metadata": [{"key": name}], "value_metadata": {"value_type": kind}}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": False}))
    return folder


@NEEDS
def test_names_and_layouts_of_flax_become_those_of_torch(tmp_path: Path) -> None:
    arrays = {
        "params.dense.kernel": torch.arange(12.0).view(3, 4), "params.dense.bias": torch.ones(4),
        "params.conv.kernel": torch.ones(3, 2, 5), "params.norm.scale": torch.ones(4),
        "params.embed.embedding": torch.ones(5, 4),
        "params.own.scale": torch.ones(1), "params.own.kernel": torch.ones(1, 1),
        "batch_stats.norm.mean": torch.ones(4),
        "batch_stats.norm.var": torch.ones(4), "opt_state.0.mu.dense.kernel": torch.arange(12.0).view(3, 4) * 2,
        "opt_state.0.nu.dense.kernel": torch.ones(3, 4), "opt_state.0.count": torch.tensor(7.0),
        "step": torch.tensor(7.0),
    }  # fmt: skip
    there = fsdp.open_checkpoint(orbax(tmp_path / "a", arrays, {"name": "string", "nothing": "None"}))
    assert {*there} == {"dense.weight", "dense.bias", "conv.kernel", "norm.weight", "embed.weight", "own.scale",
                        "own.weight", "norm.running_mean", "norm.running_var"}  # fmt: skip
    assert torch.equal(there["dense.weight"], torch.arange(12.0).view(3, 4).t())
    assert there.buffers == {"norm.running_mean", "norm.running_var"}
    assert there.optimizer == {"dense.weight": ("exp_avg", "exp_avg_sq")}
    assert there.step == 7
    assert {*there.left} == {"name", "step"}
    state = fsdp.shard({"dense.weight": torch.zeros(4, 3)}, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw())
    state = fsdp.load_optimizer_state(state, there)
    assert torch.equal(fsdp.optimizer_state(state)["dense.weight"]["mean"], torch.arange(12.0).view(3, 4).t() * 2)


@NEEDS
def test_weights_that_are_called_params_are_those_of_the_model(tmp_path: Path) -> None:
    there = fsdp.open_checkpoint(orbax(tmp_path / "b", {**AVERAGES, "params.w": torch.full((2,), 3.0)}))
    assert torch.equal(there["w"], torch.full((2,), 3.0))
    assert {*there.left} == {"ema.w", "ema2.w"}


@NEEDS
def test_of_several_steps_the_newest_is_read_and_items_together(tmp_path: Path) -> None:
    for step in (9, 10):
        orbax(tmp_path / "run" / str(step) / "model", {"w": torch.full((2,), float(step))})
        orbax(tmp_path / "run" / str(step) / "optimizer", {"0.mu.w": torch.ones(2), "0.nu.w": torch.ones(2)})
    there = fsdp.open_checkpoint(tmp_path / "run")
    assert torch.equal(there["w"], torch.full((2,), 10.0))
    assert there.optimizer == {"w": ("exp_avg", "exp_avg_sq")}


def test_without_tensorstore_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    (tmp_path / "_METADATA").write_text("{}")
    with pytest.raises(fsdp.CheckpointError, match=r"is read by tensorstore|pip install tensorstore"):
        fsdp.open_checkpoint(tmp_path)


# ---------------------------------------------------------------- torch's DCP


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("alike", [False, True])
def test_moments_of_dcp_by_number_are_told_by_order_and_shapes_or_left(alike: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3 if alike else 4), torch.nn.Linear(3 if alike else 4, 3))
    left = ("0.bias", "1.weight") if alike else ("0.bias",)
    trained = [p for name, p in model.named_parameters() if name not in left]
    optimizer = torch.optim.AdamW(trained)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[attr-defined]
    there = fsdp.open_checkpoint(tmp_path / "a")
    if alike:  # of two matrices and two vectors one each
        assert not there.optimizer
        assert "moments by number, 2 of them, which fit several sets of leaves" in repr(there)
        return
    assert {*there.optimizer} == {"0.weight", "1.weight", "1.bias"}
    state = fsdp.shard(
        dict(model.named_parameters()), fsdp.Spec(fsdp.local_mesh("cpu"), trainable={"0.bias": False}), fsdp.adamw()
    )
    found = fsdp.optimizer_state(fsdp.load_optimizer_state(state, there))
    assert torch.equal(found["1.bias"]["mean"], optimizer.state[trained[2]]["exp_avg"])


@pytest.mark.parametrize("first", [True, False])
def test_statistics_of_batch_norms_have_no_moments(first: bool, tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(4)
    model: torch.nn.Module = torch.nn.Sequential(norm, torch.nn.Linear(4, 4)) if first else norm
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    there = fsdp.open_checkpoint(tmp_path / "last.pt")
    state = fsdp.shard(dict(model.named_parameters()), fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw())
    found = fsdp.optimizer_state(fsdp.load_optimizer_state(state, there))
    for name, p in model.named_parameters():
        assert torch.equal(found[name]["mean"], optimizer.state[p]["exp_avg"])
    with pytest.raises(fsdp.SpecError, match="names of a mapping are its own"):
        fsdp.load_optimizer_state(state, found, rename=str)


# ---------------------------------------------------------------- what nobody would have written


def without(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for one in folder.glob(pattern):
            one.unlink()

    return change


def metadata(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of what DCP says of a checkpoint."""

    def rewritten(folder: Path) -> None:
        about = pickle.loads((folder / ".metadata").read_bytes())
        change(about)
        (folder / ".metadata").write_bytes(pickle.dumps(about))

    return rewritten


def weights(info: Any = None, other: torch.Tensor | None = None) -> Callable[[Path], Path]:
    """A folder of two files of safetensors, each of which has `w`, and says so of it."""

    def made(folder: Path) -> Path:
        for name, tensor in (("a", torch.ones(2)), ("b", torch.ones(2) if other is None else other)):
            said = None if info is None else {"DCP_SHARDING_INFO": info}
            save_file({"w": tensor}, folder / f"{name}.safetensors", metadata=said)
        return folder

    return made


def records(changed: dict[str, bytes | None]) -> Callable[[Path], None]:
    """A change of records of a file of torch.save."""

    def rewritten(folder: Path) -> None:
        torch.save({"w": torch.ones(4)}, folder / "w.pt")
        with zipfile.ZipFile(folder / "w.pt") as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(folder / "x.pt", "w") as archive:
            for name, data in {**held, **{f"w/{name}": data for name, data in changed.items()}}.items():
                if data is not None:
                    archive.writestr(name, data)

    return rewritten


def as_it_is(folder: Path) -> None:
    pass


FIRST = MetadataIndex("embed.weight", torch.Size([0, 0]), 0)
RANK = "model_world_size_2_rank_0.pt"
INDEX = "model.safetensors.index.json"
PARTS = json.dumps({"w": {"saved_offsets": [2]}})
SHARD = "shard-0000{}-model-00001-of-00001.safetensors"
W, AVERAGES = {"w": torch.ones(3, 2)}, {name: torch.ones(2) for name in ("ema.w", "ema2.w", "opt.mu.w", "opt.nu.w")}
OUTSIDE = {"tree_metadata": {"x": {"key_metadata": [{"key": "../w"}], "value_metadata": {"value_type": "jax.Array"}}}}
Change = Callable[[Path], Any]
Make = Callable[[Path], Path]


def zeros(folder: Path) -> Path:
    return zero(folder / "two", 3)


def arrays(held: dict[str, torch.Tensor]) -> Make:
    return lambda folder: orbax(folder / "a", held)


#: what is made, how it is changed, the file that is opened (or the folder), and what the error says
SPOILT: dict[str, tuple[Make, Change, str, str]] = {
    "deepspeed: pipelines": (zeros, lambda f: (f / "layer_00-model_states.pt").touch(), "",
        r"layer_00-model_states\.pt: layers of pipelines"),
    "deepspeed: no models": (zeros, without("*model_states.pt"), "", r"has no \*_model_states\.pt"),
    "deepspeed: no optimizers": (zeros, without("*optim_states.pt"), "", r"has no \*_optim_states\.pt"),
    "deepspeed: a rank": (zeros, without(OPTIM), "", r"lacks the file of rank 0, beside zero_pp_rank_1"),
    "deepspeed: tensor-parallel": (zeros,
        lambda f: shutil.copy(f / OPTIM, f / OPTIM.replace("mp_rank_00", "mp_rank_01")), "",
        r"another tensor-parallel rank"),
    "deepspeed: a list": (zeros, lambda f: torch.save([1], f / OPTIM), "", rf"{OPTIM} has no 'optimizer_state_dict'"),
    "dcp: nowhere": (fixture("dcp-plain"), metadata(lambda m: m.storage_data.pop(FIRST)), "",
        r"says nothing of where 'embed\.weight' from \[0, 0\] on lies"),
    "dcp: a chunk": (fixture("dcp-plain"), metadata(lambda m: m.state_dict_metadata["embed.weight"].chunks.pop()), "",
        r"chunks for 42 of the 78 elements of 'embed"),
    "dcp: elsewhere": (fixture("dcp-plain"),
        metadata(lambda m: setattr(m.storage_data[FIRST], "relative_path", "../x")), "",
        r"names '\.\./x', which lies elsewhere"),
    "dcp: compressed": (fixture("dcp-plain"),
        metadata(lambda m: setattr(m.storage_data[FIRST], "transform_descriptors", ["zstd"])), "",
        r"through \['zstd'\] \(compressed\)"),
    "ranks: one twice": (fixture("rank-files"), lambda f: shutil.copy(f / RANK, f / "model_rank_0.pt"), "",
        r"has two files of rank 0: "),
    "ranks: of another world": (fixture("rank-files"),
        lambda f: shutil.copy(f / RANK, f / "model_world_size_3_rank_2.pt"), "",
        r"model_world_size_2_rank_0\.pt is of 2 ranks, and .* of 3"),
    "ranks: of no world": (fixture("rank-files"), lambda f: shutil.copy(f / RANK, f / "model_rank_2.pt"), "",
        r"is of \d ranks|is of a mesh \[2\] of ranks"),
    "ranks: a list": (fixture("rank-files"), lambda f: torch.save([1], f / RANK), "", r"rank_0\.pt holds a list"),
    "ranks: optimizers of more": (fixture("rank-files"), lambda f: torch.save({"state": {}}, f / "optim_rank_2.pt"), "",
        r"of 2 ranks|weights of 2 ranks and optimizer states of 3"),
    "ranks: one alone": (fixture("rank-files"), as_it_is, RANK,
        r"rank_0\.pt has DTensors, of which it is one rank's file\. Open the folder"),
    "files: a name twice": (weights(), as_it_is, "", r"has 'w' in two files, b\.safetensors and another"),
    "files: an index that leads away": (weights(),
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"w": "../a.safetensors"}})), "",
        r"index\.json is no index of weights: .* lies elsewhere"),
    "files: parts that differ": (weights(PARTS, torch.ones(2, 1)), as_it_is, "",
        r"'w' in parts of several dtypes or numbers of dims"),
    "files: one part": (weights(PARTS), as_it_is, "a.safetensors",
        r"a\.safetensors is one rank's part .* Open the folder"),
    "files: damaged notes": (weights("{"), as_it_is, "a.safetensors",
        r"a\.safetensors: its DCP_SHARDING_INFO is damaged"),
    "files: a shard too many": (fixture("hf-dcp"), lambda f: shutil.copy(f / SHARD.format(2), f / SHARD.format(4)), "",
        r"elements of|3 shards, one of number 00004"),
    "torch.save: the order of bytes": (lambda f: f, records({"byteorder": b"big"}), "x.pt",
        r"x\.pt .*another order of bytes"),
    "torch.save: no data": (lambda f: f, records({"data/0": None}), "x.pt", r"x\.pt .*has no 'data/0'"),
    "torch.save: short data": (lambda f: f, records({"data/0": b"123"}), "x.pt",
        r"x\.pt .*a tensor of 4 elements is beyond its 3 bytes"),
    "torch.save: a list": (lambda f: f, lambda f: torch.save([1], f / "w.pt"), "w.pt",
        r"w\.pt holds a list; expected a state dict"),
    "orbax: a chunk": (arrays(W), lambda f: (f / "w" / "1.0").unlink(), "", r"a: 'w' is damaged: .*chunk"),
    "orbax: an array's note": (arrays(W), lambda f: (f / "w" / ".zarray").write_text("{"), "",
        r"a: 'w' is damaged, or missing"),
    "orbax: an array": (arrays(W), lambda f: shutil.rmtree(f / "w"), "", r"a: 'w' is damaged, or missing"),
    "orbax: a list": (arrays(W), lambda f: (f / "_METADATA").write_text("[]"), "", r"_METADATA is damaged: TypeError"),
    "orbax: elsewhere": (arrays(W), lambda f: (f / "_METADATA").write_text(json.dumps(OUTSIDE)), "",
        r"names a leaf '\.\./w', which lies elsewhere"),
    "orbax: a name for two": (arrays({"a.kernel": torch.ones(2, 2), "a.weight": torch.ones(2, 2)}), as_it_is, "",
        r"'a\.weight' and 'a\.kernel' are both 'a\.weight' here"),
    "orbax: two averages": (arrays(AVERAGES), as_it_is, "",
        r"has weights below 'ema' and 'ema2', of which the optimizer may be"),
    "orbax: moments twice": (arrays({"p.w": torch.ones(2), "opt.0.mu.w": torch.ones(2), "opt.1.mu.w": torch.ones(2)}),
        as_it_is, "", r"has 'mu' of 'w' twice"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=NEEDS) if case.startswith("orbax") else case for case in SPOILT]
)
def test_what_nobody_would_have_written_is_named(case: str, tmp_path: Path) -> None:
    make, change, file, said = SPOILT[case]
    folder = make(tmp_path)
    change(folder)
    with pytest.raises(fsdp.CheckpointError, match=said):
        dict(fsdp.open_checkpoint(folder / file).items())


def test_records_that_are_not_changed_are_read(tmp_path: Path) -> None:
    records({})(tmp_path)
    assert torch.equal(fsdp.open_checkpoint(tmp_path / "x.pt")["w"], torch.ones(4))
