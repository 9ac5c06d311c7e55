"""open_checkpoint: small checkpoints that other packages have made (tools/peers), read by any number of ranks."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import tarfile
import zipfile
from collections.abc import Container, Iterable
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from safetensors.torch import load_file, save_file
from support.driven import refused
from support.peers import DECAY, LR, MORE, STEPS, PeerModel, batch_of, loss_of
from support.ranks import each_rank

import functional_fsdp as fsdp
from functional_fsdp import convert, launch
from functional_fsdp import transforms as T
from functional_fsdp._io import foreign

DATA = Path(__file__).parents[1] / "data" / "peers"
DCP = ("dcp-nested", "dcp-flat", "dcp-top")
WITHOUT_MOMENTS = ("dcp-plain", "hf-dcp")
EXACT = (*DCP, "torchtitan", "lightning", "fabric", "accelerate2-sharded", "accelerate2-full", "accelerate1-sharded",
         "accelerate1-full", "rank-files", "deepspeed1", "deepspeed2", "deepspeed3", "deepspeed2-universal",
         "deepspeed3-universal", "megatron-fsdp", "orbax-nnx")  # fmt: skip
HALF = ("deepspeed1-bf16", "deepspeed2-bf16", "deepspeed3-bf16")
WHOLE = ("lightning", "accelerate1-full", "accelerate2-full", "orbax-nnx")  # nothing says which are buffers
MADE = (*EXACT, *HALF, *WITHOUT_MOMENTS)
EVERY = (*MADE, "orbax-linen")
NEEDS = pytest.mark.skipif(find_spec("tensorstore") is None, reason="Orbax is read by tensorstore, which is not here")


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A copy of a small checkpoint, by its name: {"checkpoint": path, "expected": {name: tensor}}."""
    base = tmp_path_factory.mktemp("peers")

    @lru_cache
    def of(name: str) -> Path:
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(base, filter="data")
        return next(p for p in ((base / name / "checkpoint"), base / name / "checkpoint.ckpt") if p.exists())

    return of


def expected(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path.parent / "expected.safetensors")


def taken(path: str | Path) -> int:
    """How many steps a peer's optimizer counts: Megatron-FSDP's has taken one before the first, without gradients."""
    return STEPS + (Path(path).parent.name == "megatron-fsdp")


FEW = ("dcp-nested", "accelerate2-full", "rank-files", "deepspeed2", "deepspeed3", "megatron-fsdp",
       "orbax-nnx")  # fmt: skip # a row for each way to read


def rows(names: Iterable[str], few: Container[str] = FEW) -> list[Any]:
    marks = {name: [NEEDS] if name.startswith("orbax") else [] for name in names}
    return [pytest.param(name, marks=marks[name] + ([] if name in few else [pytest.mark.large])) for name in marks]


def spelt(name: str, leaf: str) -> str:
    """What a peer calls a leaf."""
    return leaf.replace("blocks.", "blocks_") if name == "orbax-linen" else leaf


@pytest.mark.parametrize("name", rows(EVERY, EVERY))
def test_leaves_and_moments_have_the_bits_that_the_peer_had(name: str, unpacked: Any) -> None:
    path = unpacked(name)
    there = fsdp.open_checkpoint(path)
    said = {key if key == "losses" else spelt(name, key): value for key, value in expected(path).items()}
    weights = {key.removeprefix("weight/"): value for key, value in said.items() if key.startswith("weight/")}
    assert weights.keys() <= {*there, *there.ties}
    for leaf, value in weights.items():
        assert there[leaf].dtype is value.dtype, leaf
        assert torch.equal(there[leaf], value), leaf
    assert bool(there.optimizer) is (name not in WITHOUT_MOMENTS)
    if there.optimizer:
        assert there.step == taken(path)
        assert there.optimizer.keys() == {key.partition("/")[2] for key in said if key.startswith("exp_avg/")}
    assert "seen" in there.buffers
    assert ("scale" in there.buffers) is (name not in WHOLE)
    assert "gate.weight" not in there.buffers


SPELT = {"adamw": lambda: fsdp.adamw(lr=LR, weight_decay=DECAY),
         "from_torch": lambda: fsdp.from_torch(torch.optim.AdamW, lr=LR, weight_decay=DECAY)}  # fmt: skip


class BiasApart(nn.Linear):
    """As DeepSpeed's ZeRO-3 has linears: the product is rounded before the bias is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.matmul(self.weight.t())
        return out if self.bias is None else out + self.bias


def bias_apart() -> nn.Module:
    model = PeerModel()
    for part in model.modules():
        if type(part) is nn.Linear:
            part.__class__ = BiasApart
    return model


def went_on(
    path: str, way: str, kind: str = "zero3", again: bool = False, clips: float = 0, half: str = "", name: str = ""
) -> Any:
    """A running step by two commands: the losses of ten further steps, and what was read."""
    mesh = fsdp.local_mesh()
    precision = fsdp.Precision(compute=torch.bfloat16) if half else fsdp.Precision()
    spec = fsdp.Spec(mesh, getattr(fsdp, kind)("data"), precision=precision)
    make = bias_apart if half == "bias apart" else PeerModel
    names: Any = {"rename": partial(spelt, name)} if name == "orbax-linen" else {}
    state, model = fsdp.init(make, spec, SPELT[way](), weights=path, seed=7, **names)
    weights, buffers = fsdp.full_params(state), dict(fsdp.state_dict(state, model))
    moments: Any = {}
    if again:
        state = fsdp.load_optimizer_state(state, path, **names)
        assert state.steps == taken(path)
        moments = fsdp.optimizer_state(state)
    forward_backward = T.forward_backward(model, loss_of)
    losses = []
    world, ranks = mesh.size(), 2
    for step in range(STEPS, STEPS + (MORE if again and world == ranks else 0)):
        state, loss = forward_backward(state, batch_of(step, mesh.get_rank()))
        if clips:
            state, _ = T.clip_by_global_norm(state, clips)
        state = fsdp.step(state)
        state, loss = fsdp.pmean(state, loss.double())
        losses.append(loss.item())
    return weights, buffers, moments, losses


@pytest.mark.parametrize("way", ["adamw", pytest.param("from_torch", marks=pytest.mark.large)])
@pytest.mark.parametrize("name", rows([*EXACT, "orbax-linen"], (*FEW, "orbax-linen")))
def test_a_run_goes_on_as_the_peer_itself(name: str, way: str, unpacked: Any) -> None:
    path = unpacked(name)
    said = expected(path)
    clips = 1.0 if name.startswith("deepspeed") else 0.0  # its default
    args = str(path), way, "zero3", True, clips, "", name
    for _, _, moments, losses in launch(went_on, args, nprocs=2, simulate=True):
        for key, value in said.items():
            slot, _, leaf = key.partition("/")
            mine = {"exp_avg": "mean", "exp_avg_sq": "square"}.get(slot, "") if way == "adamw" else slot
            if slot in ("exp_avg", "exp_avg_sq") and leaf != "gate.weight":  # which trains nowhere
                assert torch.equal(moments[leaf][mine], value), key
        jax = 1e-6 if name.startswith("orbax") else 0.0  # which rounds otherwise
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), said["losses"], rtol=jax, atol=1e-6)


@pytest.mark.parametrize(("name", "half", "most"), [("deepspeed1-bf16", "as it is", 0.0),
                                                    ("deepspeed2-bf16", "as it is", 0.0),
                                                    ("deepspeed3-bf16", "bias apart", 1e-5)])  # fmt: skip
def test_a_run_in_bfloat16_goes_on_as_deepspeed(name: str, half: str, most: float, unpacked: Any) -> None:
    path = unpacked(name)
    for *_, losses in launch(went_on, (str(path), "adamw", "zero3", True, 1.0, half), nprocs=2, simulate=True):
        found = torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(found, expected(path)["losses"], rtol=0, atol=most)


@pytest.mark.parametrize(("nprocs", "kind"), [(1, "zero3"), (2, "zero1"), (4, "zero3")])
@pytest.mark.parametrize("name", rows(MADE))
def test_any_ranks_and_strategy_read_the_same(name: str, nprocs: int, kind: str, unpacked: Any) -> None:
    path = unpacked(name)
    said = expected(path)
    for weights, held, _, _ in launch(went_on, (str(path), "adamw", kind), nprocs=nprocs, simulate=True):
        for key, value in said.items():
            if key.startswith("weight/"):
                leaf = key.removeprefix("weight/")
                assert torch.equal((weights if leaf in weights else held)[leaf].to(value.dtype), value), leaf
        assert weights["head.weight"] is weights["embed.weight"]


@pytest.mark.parametrize("name", rows(MADE, ("dcp-flat", "accelerate2-full", "deepspeed1-bf16", "hf-dcp")))
def test_convert_keeps_ties_buffers_and_moments(name: str, unpacked: Any, tmp_path: Path) -> None:
    path = unpacked(name)
    said = expected(path)
    there = convert.main([str(path)])
    assert repr(there).count("\n") >= len(there)
    assert "embed.weight" in repr(there)
    folder = convert.main([str(path), str(tmp_path / "ours")])
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    optimizer = SPELT["adamw"]() if there.optimizer else None
    state = fsdp.load(folder, spec, optimizer)
    held = {**fsdp.full_params(state), **state.buffers}
    for key, value in said.items():
        if key.startswith("weight/"):
            assert torch.equal(held[key.removeprefix("weight/")], value), key
    home = dict(zip(state.layout.paths, state.layout.source, strict=True))
    assert home.get("head.weight", "embed.weight") == "embed.weight"
    assert not state.buffers["seen"].is_floating_point()
    assert not there.optimizer or state.steps == taken(path)
    if there.optimizer:
        assert torch.equal(fsdp.optimizer_state(state)["blocks.0.up.bias"]["mean"], said["exp_avg/blocks.0.up.bias"])
        kept = "gate.weight" in fsdp.optimizer_state(state)
        assert kept is (name == "megatron-fsdp")  # which keeps moments of frozen leaves


# ---------------------------------------------------------------- what is wrong is named


class Evil:
    """Harmless, and would run something if it were unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def spoilt(path: Path, where: str, how: str) -> Path:
    """A copy of a checkpoint of which one file is cut short, gone, or another rank's."""
    copy = path.parent / f"spoilt-{how}-{where.replace('/', '-')}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    file = copy / where
    if how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif how == "gone":
        file.unlink()
    elif how == "text":
        file.write_bytes(b"hello" * 100)
    elif how == "evil":
        file.unlink()
        torch.save({"model": Evil(print, "ran")}, file)
    return copy


ALL = ("cut", "gone", "text", "evil")
OF_RANK = "global_step3/zero_pp_rank_1_mp_rank_00"
SPOILT = [
    *[("dcp-nested", "__1_0.distcp", how) for how in ("cut", "gone")],
    *[("dcp-nested", ".metadata", how) for how in ("cut", "gone", "text")],
    *[("rank-files", "model_world_size_2_rank_1.pt", how) for how in ALL],
    ("rank-files", "optim_world_size_2_rank_0.pt", "gone"),
    *[("deepspeed3", f"{OF_RANK}_{kind}_states.pt", how) for kind in ("model", "optim") for how in ALL],
    ("deepspeed1", f"{OF_RANK}_optim_states.pt", "gone"),
    ("deepspeed2-universal", "zero/embed.weight/fp32.pt", "gone"),
    ("deepspeed2-universal", "zero/embed.weight/exp_avg.pt", "cut"),
    ("accelerate2-sharded", "pytorch_model_fsdp_0/__1_0.distcp", "cut"),
    ("accelerate2-full", "optimizer.bin", "evil"),
    ("hf-dcp", "shard-00001-model-00001-of-00001.safetensors", "gone"),
    ("hf-dcp", "shard-00002-model-00001-of-00001.safetensors", "cut"),
]


@pytest.mark.parametrize(("name", "file", "how"), SPOILT)
def test_what_is_cut_short_or_missing_is_an_error_that_names_it(name: str, file: str, how: str, unpacked: Any) -> None:
    copy = spoilt(unpacked(name), file, how)
    named = str(copy) if how == "gone" else Path(file).name
    with pytest.raises((fsdp.CheckpointError, FileNotFoundError), match=named):
        assert [*fsdp.open_checkpoint(copy).items()]


def test_chunks_of_another_checkpoint_are_refused(unpacked: Any) -> None:
    """The file of another rank, in which other boxes lie at the same places."""
    copy = spoilt(unpacked("dcp-nested"), ".metadata", "none")
    held = (copy / "__0_0.distcp").read_bytes()
    (copy / "__0_0.distcp").write_bytes((copy / "__1_0.distcp").read_bytes() + held)
    with pytest.raises(fsdp.CheckpointError, match=r"__0_0\.distcp"):
        assert [*fsdp.open_checkpoint(copy).items()]


def test_files_of_two_runs_in_one_folder_are_refused(unpacked: Any) -> None:
    copy = spoilt(unpacked("deepspeed3"), "latest", "mixed")
    name = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(unpacked("deepspeed1") / name, copy / name)
    with pytest.raises(fsdp.CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is of ZeRO stage 1"):
        fsdp.open_checkpoint(copy)
    (copy / "latest").write_text("global_step9")
    with pytest.raises(fsdp.CheckpointError, match=r"latest names 'global_step9'"):
        fsdp.open_checkpoint(copy)
    copy = spoilt(unpacked("rank-files"), "", "mixed")
    shutil.copy(copy / "model_world_size_2_rank_0.pt", copy / "model_world_size_2_rank_1.pt")
    said = r"rank_1\.pt has \[7, 6\] of 'embed\.weight' \[13, 6\]; rank 1 of 2"
    with pytest.raises(fsdp.CheckpointError, match=said):
        fsdp.open_checkpoint(copy)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_what_would_run_is_refused_by_name_and_never_run(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evils = Evil(exec, f"open({str(marker)!r}, 'w')"), Evil(marker.touch), Evil(getattr, "", "upper")
    for i, evil in enumerate(evils):
        file = tmp_path / f"evil{i}.pt"
        torch.save({"w": torch.ones(2), "x": evil}, file, pickle_protocol=max(protocol, 2))
        with pytest.raises(fsdp.CheckpointError, match=rf"evil{i}\.pt wants \S*(exec|getattr)\S* to be called"):
            fsdp.open_checkpoint(file)
        folder = tmp_path / f"dcp{i}"
        folder.mkdir()
        (folder / ".metadata").write_bytes(pickle.dumps(evil, protocol))
        with pytest.raises(fsdp.CheckpointError, match=r"\.metadata wants \S*(exec|getattr)\S* to be called"):
            fsdp.open_checkpoint(folder)
    assert not marker.exists()


def pickled(tmp_path: Path, data: bytes) -> Path:
    """A file of torch.save whose pickle is these bytes."""
    path = tmp_path / "made.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("made/data.pkl", data)
        archive.writestr("made/version", b"3\n")
    return path


HOSTILE = {
    "an inert object is given a method": b"cdeepspeed.x\nA\n)\x81}X\x0c\x00\x00\x00__setstate__cbuiltins\nset\nsb.",
    "a function of the table is changed": b"ctorch._utils\n_rebuild_parameter\n(N}X\x03\x00\x00\x00runcbuiltins\nset\n"
    b"stb.",
    "a storage that no file has": b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00(K\x04t(K\x01t\x89NtR.",
    "an extension": b"\x82\x01.",
    "nothing": b"",
}


@pytest.mark.parametrize("how", HOSTILE)
def test_pickles_that_are_made_by_hand_do_nothing(how: str, tmp_path: Path) -> None:
    with pytest.raises((fsdp.CheckpointError, fsdp.TreeError), match=r"made\.pt"):
        fsdp.open_checkpoint(pickled(tmp_path, HOSTILE[how]))


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Some bytes flipped, cut off, zeroed or put in, or another file of the folder."""
    held = bytearray(data)
    at = rng.randrange(len(held))
    how = rng.randrange(5)
    if how == 0:
        for _ in range(rng.choice([1, 3, 20])):
            held[rng.randrange(min(len(held), rng.choice([200, 3000, 10**6])))] = rng.randrange(256)
    elif how == 1:
        del held[at:]
    elif how == 2:
        held[at : at + 50] = bytes(len(held[at : at + 50]))
    elif how == 3:
        held[at:at] = rng.randbytes(3)
    return bytes(held) if how < 4 else rng.choice(others)


ATTACKED = (*MADE[:2], "lightning", "rank-files", "accelerate2-full", "deepspeed1", "deepspeed3",
            "deepspeed2-universal", "hf-dcp", "megatron-fsdp", "orbax-linen")  # fmt: skip


@pytest.mark.parametrize("name", rows(ATTACKED, ATTACKED))
def test_damage_anywhere_is_an_error_of_the_package_or_of_the_disk(name: str, unpacked: Any, tmp_path: Path) -> None:
    rng = random.Random(name)
    path = tmp_path / unpacked(name).name
    whole = unpacked(name)
    shutil.copytree(whole, path) if whole.is_dir() else shutil.copy(whole, path)
    files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    for _ in range(40):
        file = rng.choice(files)
        before = file.read_bytes()
        file.write_bytes(mutated(rng, before, [one.read_bytes() for one in files]))
        try:
            there = fsdp.open_checkpoint(path)
            assert repr(there)
            assert dict(there.items())
        except (fsdp.FsdpError, OSError) as error:
            assert str(path) in str(error)  # noqa: PT017
        file.write_bytes(before)


# ---------------------------------------------------------------- files of Hugging Face


def test_a_folder_of_float16_in_several_files_of_torch_save_is_widened(tmp_path: Path) -> None:
    model = PeerModel(3)
    held = {name: t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    names = [*held]
    folder = tmp_path / "half"
    folder.mkdir()
    files = {name: f"pytorch_model-0000{1 + (i > 3)}-of-00002.bin" for i, name in enumerate(names)}
    for file in {*files.values()}:
        torch.save({name: held[name] for name in names if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    there = fsdp.open_checkpoint(folder)
    assert all(torch.equal(there[name], value) for name, value in held.items())
    state = fsdp.load(convert.main([str(folder), str(tmp_path / "ours")]), fsdp.Spec(fsdp.local_mesh("cpu")))
    found = {**fsdp.full_params(state), **state.buffers}
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in held.items())
    assert found["gate.weight"].dtype is torch.float32
    (folder / files[names[-1]]).unlink()
    said = r"pytorch_model-00002-of-00002\.bin is missing: .*index\.json names it"
    with pytest.raises(FileNotFoundError, match=said):
        fsdp.open_checkpoint(folder)


def test_every_dtype_of_safetensors_is_read_or_named(tmp_path: Path) -> None:
    raw = torch.arange(8, dtype=torch.uint8)
    kinds = {
        "e8m0": raw.view(torch.float8_e8m0fnu), "float4": raw.clone().view(2, 4).view(torch.float4_e2m1fn_x2),
        "fnuz": raw.clone().view(torch.float8_e4m3fnuz), "complex64": torch.tensor([1 + 2j, 3]),
        "uint16": torch.tensor([1, 40000], dtype=torch.uint16), "uint32": torch.tensor([1, 2**31], dtype=torch.uint32),
        "uint64": torch.tensor([1, 2], dtype=torch.uint64),
    }  # fmt: skip
    save_file({"weight": torch.ones(4, 4), **kinds}, tmp_path / "a.safetensors")
    there = fsdp.open_checkpoint(tmp_path / "a.safetensors")
    for name, value in kinds.items():
        assert there[name].dtype is value.dtype
        assert torch.equal(there[name].view(torch.uint8), value.view(torch.uint8))
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    state, _ = fsdp.init(lambda: nn.Linear(4, 4), spec, seed=0)
    state = fsdp.load_weights(state, tmp_path / "a.safetensors", partial=True)
    assert torch.equal(fsdp.full_params(state)["weight"], torch.ones(4, 4))

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            for name, value in kinds.items():
                self.register_buffer(name, value.clone())

    params, _ = fsdp.functionalize(made := Tables())
    state = fsdp.shard(params, spec, buffers=fsdp.buffers(made))
    fsdp.save_safetensors(state, tmp_path / "out")
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[name].view(torch.uint8), value.view(torch.uint8)) for name, value in kinds.items())
    data = (tmp_path / "a.safetensors").read_bytes().replace(b'"F8_E8M0"', b'"F6_E2M3"')
    (tmp_path / "b.safetensors").write_bytes(data)
    with pytest.raises(fsdp.CheckpointError, match=r"b\.safetensors has 'e8m0' as F6_E2M3, a dtype that"):
        fsdp.open_checkpoint(tmp_path / "b.safetensors")


@pytest.mark.parametrize(("theirs", "mine"), [(torch.uint32, torch.int32), (torch.complex64, torch.int64),
                                              (torch.uint64, torch.int64), (torch.int8, torch.uint8)])  # fmt: skip
def test_values_that_a_leaf_cannot_hold_are_refused(theirs: torch.dtype, mine: torch.dtype) -> None:
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    state = fsdp.shard({"w": torch.ones(2)}, spec, buffers={"b": torch.zeros(2, dtype=mine)})
    with pytest.raises(fsdp.TreeError, match=f"has 'b' as {theirs}, the model {mine}"):
        fsdp.load_weights(state, {"w": torch.ones(2), "b": torch.zeros(2, dtype=theirs)})


@each_rank(2)
def test_a_mapping_of_dtensors_is_refused_by_name() -> None:
    from torch.distributed.fsdp import fully_shard

    def make() -> nn.Module:
        return nn.Linear(4, 7, bias=False)

    mesh = fsdp.local_mesh()
    made: Any = fully_shard(make(), mesh=mesh)
    held = made.state_dict()
    state, _ = fsdp.init(make, fsdp.Spec(mesh))
    said = "TreeError", "the mapping has a DTensor at 'weight'; expected plain tensors"
    refused(
        (lambda: fsdp.init(make, fsdp.Spec(mesh), weights=held), *said),
        (lambda: fsdp.load_weights(state, held), *said),
    )


@pytest.mark.parametrize("kind", ["encoder", "classifier", "seq2seq"])
def test_any_kind_of_model_of_transformers_is_converted_by_its_config(kind: str, tmp_path: Path) -> None:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 30, "num_labels": 3, "hidden_size": 8, "intermediate_size": 12}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    model: Any
    if kind == "encoder":
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    elif kind == "classifier":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    else:
        config = transformers.T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
        model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "theirs")
    folder = convert.main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--config", str(tmp_path / "theirs")])
    state = fsdp.load(folder, fsdp.Spec(fsdp.local_mesh("cpu")))
    found = fsdp.full_params(state)
    assert {*found} == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters(remove_duplicate=False))
    plain = convert.main([str(tmp_path / "theirs"), str(tmp_path / "plain")])
    held = fsdp.full_params(fsdp.load(plain, fsdp.Spec(fsdp.local_mesh("cpu"))))
    assert all(torch.equal(held[name], found[name]) for name in held)


def test_a_prefix_is_found_by_the_skeleton_or_given(tmp_path: Path) -> None:
    model = PeerModel(2)
    for prefix in ("net.", "a.b."):
        torch.save({f"{prefix}{name}": t for name, t in model.state_dict().items()}, tmp_path / "w.pt")
        spec = fsdp.Spec(fsdp.local_mesh("cpu"))
        state, _ = fsdp.init(PeerModel, spec, weights=tmp_path / "w.pt")
        assert torch.equal(fsdp.full_params(state)["gate.weight"], model.gate.weight)
        there = fsdp.open_checkpoint(tmp_path / "w.pt", prefix=prefix)
        assert torch.equal(there["gate.weight"], model.gate.weight)
    with pytest.raises(fsdp.SpecError, match=r"no weights below 'other\.'; there are a\.b\."):
        fsdp.open_checkpoint(tmp_path / "w.pt", prefix="other.")
    inner = model.get_submodule("blocks.0").state_dict()
    with pytest.raises(fsdp.TreeError, match="lacks"):
        fsdp.init(PeerModel, spec, weights=inner)


class Untied(PeerModel):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


def test_a_state_with_two_leaves_where_the_model_has_one_is_refused_at_first_use(unpacked: Any, tmp_path: Path) -> None:
    folder = convert.main([str(unpacked("dcp-plain")), str(tmp_path / "ours"), "--untied"])
    state = fsdp.load(folder, fsdp.Spec(fsdp.local_mesh("cpu")))
    _, skeleton = fsdp.functionalize(PeerModel())
    uses: list[Any] = [
        lambda: T.forward_backward(skeleton, loss_of)(state, batch_of(0, 0)),
        lambda: T.apply(skeleton)(state, batch_of(0, 0)),
        lambda: fsdp.as_module(skeleton, state),
    ]
    for use in uses:
        with pytest.raises(fsdp.TreeError, match=r"one weight at 'embed\.weight' and 'head\.weight', .* two leaves"):
            use()
    _, untied = fsdp.functionalize(Untied())
    assert fsdp.as_module(untied, state).head.weight is not None


def test_matrices_that_begin_alike_are_two_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a vocabulary and a head that were tied, and had further rows trained since."""
    monkeypatch.setattr(foreign, "MOST_TIED", 4)
    w = torch.arange(9.0).view(3, 3)
    held = {"embed.weight": w, "head.weight": torch.cat([w[:2], w[:1]]), "again.weight": w.clone()}
    torch.save(held, tmp_path / "w.pt")
    state = fsdp.load(convert.main([str(tmp_path / "w.pt"), str(tmp_path / "ours")]), fsdp.Spec(fsdp.local_mesh("cpu")))
    found = fsdp.full_params(state)
    assert found.keys() == held.keys()
    assert all(torch.equal(found[path], leaf) for path, leaf in held.items())
    assert {*state.layout.leaves} == {"embed.weight", "head.weight"}


def test_one_rank_s_transposed_view_is_no_tie(tmp_path: Path) -> None:
    w = torch.arange(9.0).view(3, 3)
    torch.save({"a": w, "b": w.t(), "c": w}, tmp_path / "model_world_size_1_rank_0.pt")
    there = fsdp.open_checkpoint(tmp_path)
    assert there.ties == {"c": "a"}
    assert torch.equal(there["b"], w.t())


# ---------------------------------------------------------------- what is said otherwise than one thinks


def test_conjugates_and_negatives_are_never_read_as_their_bytes(tmp_path: Path) -> None:
    z = torch.randn(3, dtype=torch.complex64)
    for i, odd in enumerate((z.conj(), z.conj().imag)):
        torch.save({"w": odd}, tmp_path / f"{i}.pt")
        with pytest.raises(fsdp.CheckpointError, match=r"save it by \.resolve_conj\(\)\.resolve_neg\(\)"):
            fsdp.open_checkpoint(tmp_path / f"{i}.pt")


class Alike(nn.Module):
    """Leaves of one shape, and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def trained(self, groups: Any) -> Any:
        optimizer = torch.optim.AdamW(groups)
        self.c(self.b(self.a(torch.randn(3, 4)))).square().sum().backward()
        optimizer.step()
        return optimizer


@pytest.mark.parametrize(("how", "some"), [
    ("matrices and vectors", ("a.weight", "b.weight", "c.weight")), ("by name", ("b.weight", "c.weight", "a.weight")),
    ("of one shape", ("b.bias", "c.bias")),
])  # fmt: skip
def test_moments_of_several_groups_are_told_apart_or_left(how: str, some: tuple[str, ...], tmp_path: Path) -> None:
    model = Alike()
    named = dict(model.named_parameters())
    groups: list[Any] = [[n for n in named if n not in some], some]
    groups = [{"params": [(n, named[n]) if how == "by name" else named[n] for n in group]} for group in groups]
    optimizer = model.trained(groups)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")  # as transformers' Trainer has it
    there = fsdp.open_checkpoint(tmp_path)
    if how == "of one shape":
        assert not there.optimizer
        assert "2 groups, of which two have leaves of one shape" in repr(there)
        return
    state = fsdp.shard(named, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw())
    found = fsdp.optimizer_state(fsdp.load_optimizer_state(state, there))
    assert all(torch.equal(found[n]["mean"], optimizer.state[p]["exp_avg"]) for n, p in named.items())


NAMES = {
    "state": (["state.proj.weight", "state.proj.bias", "out.weight"], []),  # a module that is called so
    "optimal": (["optimal.weight", "b.optim_head.bias", "out.weight"], []),
    "below": (["model.rng.scale", "model.callbacks.0.w", "model.w"], ["lr_scheduler.rates"]),
    "wrapped": (["_orig_mod.w", "w"], ["rng.state"]),  # two leaves that plain names would make one
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("which", NAMES)
def test_leaves_with_names_as_trainers_have_them_are_leaves(which: str, tmp_path: Path) -> None:
    names, others = NAMES[which]
    held = {name: torch.full((2, 2), float(i)) for i, name in enumerate((*names, *others))}
    dcp.save(held, checkpoint_id=tmp_path / "a", no_dist=True)  # type: ignore[attr-defined]
    there = fsdp.open_checkpoint(tmp_path / "a")
    found = {f"{there.contents.prefix}{name}": there[name] for name in there}
    assert sorted(found) == sorted(names)
    assert all(torch.equal(value, held[name]) for name, value in found.items())
    assert [*there.left] == others
    assert not there.optimizer


def test_two_checkpoints_in_one_folder_and_an_index_that_lies_are_refused(tmp_path: Path, unpacked: Any) -> None:
    both = shutil.copytree(unpacked("dcp-plain"), tmp_path / "both")
    save_file({"embed.weight": torch.zeros(2)}, both / "model.safetensors")
    with pytest.raises(fsdp.CheckpointError, match="both has two checkpoints, one as Dcp and one as HuggingFace"):
        fsdp.open_checkpoint(both)
    folder = tmp_path / "index"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(fsdp.CheckpointError, match=r"index\.json names 'b', which none of its files has"):
        fsdp.open_checkpoint(folder)


def test_an_error_of_the_package_comes_whole_and_odd_numbers_are_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(fsdp.CheckpointError, match=r"module\.pt wants torch.nn.*give the tensors: weights=\{name"):
        fsdp.open_checkpoint(tmp_path / "module.pt")
    kept = {"state": {"a": {"exp_avg": torch.ones(2), "step": float("nan")}}, "param_groups": [{"params": ["a"]}]}
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": kept, 3: 4}, tmp_path / "nan.pt")
    with pytest.raises(fsdp.CheckpointError, match="a count of steps is nan; expected one whole number"):
        repr(fsdp.open_checkpoint(tmp_path / "nan.pt"))
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": [kept, kept], 3: 4}, tmp_path / "two.pt")
    assert "not read: 3, two.pt: states of 2 optimizers" in repr(fsdp.open_checkpoint(tmp_path / "two.pt"))


@pytest.mark.parametrize(("way", "nprocs"), [("adamw", 2), ("AdamW", 2), ("NAdam", 1)])
@each_rank("nprocs")
def test_counts_of_leaves_in_our_own_checkpoints_come_with_the_moments(way: str, nprocs: int, tmp_path: Path) -> None:
    """Leaves that missed a step, in a checkpoint of this library's own, read as any other."""
    optimizer: Any = fsdp.adamw(lr=0.1) if way == "adamw" else fsdp.from_torch(getattr(torch.optim, way), lr=0.1)
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data"))
    tree = {"w": torch.ones(3), "a": {"w": torch.ones(5, 7), "s": torch.ones(1)}}  # "mean.a.w" is not of "w"

    def step(state: fsdp.State, some: float | None) -> fsdp.State:
        state, p = fsdp.unshard(state)
        one = None if some is None else torch.full_like(p["w"], some)
        grads = {"w": one, "a": {name: torch.full_like(t, 0.5) for name, t in p["a"].items()}}
        return fsdp.step(fsdp.reduce(state, grads))

    state = fsdp.shard(tree, spec, optimizer)
    for some in (None, 1.0, 3.0):
        state = step(state, some)
    fsdp.save(state, tmp_path / "a")
    again = fsdp.load_weights(fsdp.shard(tree, spec, optimizer), tmp_path / "a")
    again = fsdp.load_optimizer_state(again, tmp_path / "a")
    assert again.steps == state.steps
    mine, theirs = (fsdp.local_shards(step(one, 2.0)) for one in (state, again))
    assert all(torch.equal(t, theirs[name]) for name, t in mine.items())


@pytest.mark.parametrize("names", [("forward",), ("a", "a.b"), ("a..b",), ("",)])
def test_names_that_no_module_can_have_and_configs_that_are_none_are_named(names: Any, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "odd.pt")
    with pytest.raises(fsdp.SpecError, match=r"odd\.pt has names that a module cannot have: .*Give --config"):
        convert.main([str(tmp_path / "odd.pt"), str(tmp_path / "ours")])
    with pytest.raises(fsdp.SpecError, match=r"--config .*transformers finds no config there"):
        convert.main([str(tmp_path / "odd.pt"), str(tmp_path / "ours"), "--config", str(tmp_path)])
    assert not (tmp_path / "ours").exists()


class PerhapsTied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_tied_leaf_in_a_file_is_both_leaves_of_a_model_that_is_not_tied(tmp_path: Path) -> None:
    held = torch.randn(4, 3)
    torch.save({"head.weight": held, "embed.weight": held}, tmp_path / "tied.pt")
    spec = fsdp.Spec(fsdp.local_mesh("cpu"))
    for tied in (False, True):
        state, _ = fsdp.init(lambda: PerhapsTied(tied), spec, weights=tmp_path / "tied.pt")  # noqa: B023
        assert all(torch.equal(one, held) for one in fsdp.full_params(state).values())
    nan = torch.full((4, 3), float("nan"))
    state, _ = fsdp.init(lambda: PerhapsTied(True), spec, weights={"head.weight": nan, "embed.weight": nan.clone()})
    assert fsdp.full_params(state)["head.weight"].isnan().all()


@pytest.mark.parametrize("odd", ["another leaf", "another slot"])
def test_moments_that_a_state_has_no_place_for_are_refused_unless_partial(odd: str, tmp_path: Path) -> None:
    def moments(n: int) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n), "step": torch.tensor(5.0)}

    kept = {"a": moments(2)}
    if odd == "another leaf":
        kept["b"] = moments(3)
    else:
        kept["a"]["max_exp_avg_sq"] = torch.ones(2)
    optimizer = {"state": kept, "param_groups": [{"params": [*kept]}]}
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "x.pt")
    state = fsdp.shard({"a": torch.ones(2)}, fsdp.Spec(fsdp.local_mesh("cpu")), fsdp.adamw())
    with pytest.raises(fsdp.TreeError, match=r"has '(mean\.b|max_exp_avg_sq\.a)'.*leave them out by partial=True"):
        fsdp.load_optimizer_state(state, tmp_path / "x.pt")
    found = fsdp.load_optimizer_state(state, tmp_path / "x.pt", partial=True)
    assert found.steps == 5
    assert torch.equal(fsdp.optimizer_state(found)["a"]["mean"], torch.ones(2))
