"""Frozen leaves that are packed: sharded bytes, adapters that train, beside the plain model with unpacked weights."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from support.chains import Chain, mean_square
from support.commands import TORCHAO
from support.packed import of_whole_trees, unit_by_unit
from support.ranks import each_rank
from support.scenario import Scenario, Seen, all_alike, begun, plain
from support.tables import FULL

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp._common.tree import bytes_text
from functional_fsdp._spec.precision import Form

PEERS: dict[str, Any] = torch.load(Path(__file__).parents[1] / "data" / "packed.pt", weights_only=True)
Tree = dict[str, torch.Tensor]


class Lora(nn.Module):
    """A frozen linear and an adapter."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(3, n) / 8)
        self.lora_B = nn.Parameter(torch.randn(m, 3) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


class Net(nn.Module):
    """Matrices of which blocks are cut at their ends, and a table that is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 20).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(Lora(20, 33), nn.GELU(), Lora(33, 20)) for _ in range(2))
        self.head = Lora(20, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_fn(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


PACKED = ("embed.weight", "base.weight")
CODECS = {"nf4": fsdp.nf4(), "nf4 nested": fsdp.nf4(nested=True), "int8": fsdp.int8(), "mxfp8": fsdp.mxfp8()}
CODECS |= {"fp8_block": fsdp.fp8_block(64)}
OPTIMIZER: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}


def rules(codec: fsdp.Codec) -> dict[str, fsdp.Precision]:
    packed = fsdp.Precision(main=codec)
    return {"embed.weight": packed, "*.base.weight": packed, "*": fsdp.Precision()}


def rounded(codec: str) -> Net:
    """The plain model, with the numbers that the bytes stand for."""
    model = made()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if path.endswith(PACKED):
                form = Form(CODECS[codec], tuple(p.shape), p.dtype)
                p.copy_(form.unpack(form.pack(p)))
    return model


def scenario(preset: str, codec: str = "nf4", more: Any = {}, **spec: Any) -> Scenario:  # noqa: B006
    settings = {"precision": rules(CODECS[codec]), "units": ["embed", "blocks.*", "head"], **spec}
    return Scenario(**{
        "model": made, "loss_fn": loss_fn, "data": lambda step, rank, micro: batch(step, rank), "preset": preset,
        "optimizer": (lambda: fsdp.adamw(**OPTIMIZER), lambda p: torch.optim.AdamW(p, **OPTIMIZER)), "steps": 3,
        "update": lambda state: checked(fsdp.step(state)), "spec": settings, **more,
    })  # fmt: skip


def start(preset: str, codec: str = "nf4", **spec: Any) -> tuple[fsdp.State, Any]:
    return begun(scenario(preset, codec, **spec))


@cache
def reference(codec: str, ranks: int, steps: int = 3) -> list[Seen]:
    return plain(scenario("zero3", more={"model": lambda: rounded(codec), "steps": steps}), ranks)


def checked(state: fsdp.State) -> fsdp.State:
    """The base's bytes on a rank: those of its planes, divided, and padding."""
    for bucket in (b for b in state.layout.buckets.values() if b.packed):
        parts = bucket.slices("main")
        packed = sum(leaf.form.nbytes for leaf in bucket.leaves if leaf.form)
        most = 128 * (len(bucket.leaves) + parts * 4)
        assert packed <= bucket.numel < packed + most
        assert state.main[bucket.name].local.nbytes == bucket.numel // parts
        assert state.main[bucket.name].local.dtype is torch.uint8
        copied = bucket.numel if bucket.slices("weights") < parts else 0  # zero1, zero2, hfsdp keep what gathers read
        kept = [one.local.nbytes for name, one in state.weights.items() if name == bucket.name]
        assert sum(kept) == copied // bucket.slices("weights")
        assert bucket.name not in state.opt.mean
    params = fsdp.full_params(state)
    assert all((type(p) is fsdp.PackedWeight) is path.endswith(PACKED) for path, p in params.items())
    return state


def stage(model: Any, tokens: torch.Tensor, unit: str) -> Any:
    part = model.get_submodule(unit)

    def run(w: Any, h: torch.Tensor) -> torch.Tensor:
        if unit == "embed":
            return fsdp.bind(part, w)(tokens[:, :-1])
        out = fsdp.bind(part, w)(h)
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()) if unit == "head" else h + out

    return run


@pytest.mark.parametrize(
    ("preset", "ranks"), [("zero3", 1), *(pytest.param("zero3", n, marks=pytest.mark.large) for n in (2, 4))]
)
def test_many_steps_are_those_of_the_plain_model(preset: str, ranks: int) -> None:
    steps = 50 if FULL else 10
    all_alike(scenario(preset, more={"steps": steps}), ranks, other=reference("nf4", ranks, steps))


#: `test_packed_gathers` has them
OTHERS = [pytest.param(preset, marks=pytest.mark.large) for preset in ("ddp", "hfsdp")]


@pytest.mark.parametrize("preset", ["zero2", "zero1", "hsdp", *OTHERS])
def test_in_every_strategy(preset: str) -> None:
    all_alike(scenario(preset), 4, other=reference("nf4", 4))


@pytest.mark.parametrize("codec", [*CODECS])
def test_by_every_codec(codec: str) -> None:
    all_alike(scenario("zero3", codec), other=reference(codec, 2))


BY_HAND = {by: of_whole_trees(loss_fn, by, lambda path: path.endswith(PACKED)) for by in ("torch.func", "T.vjp")}
BY_HAND["unit by unit"] = unit_by_unit(stage)


@pytest.mark.parametrize("by", BY_HAND)
def test_by_hand(by: str) -> None:
    all_alike(scenario("zero3", more={"loop": BY_HAND[by]}), other=reference("nf4", 2))


@pytest.mark.parametrize(
    "schedule", [{"debug": True}, {"keep": "all"}, {"keep": "frozen"}, {"order": "recorded"}], ids=str
)
def test_schedules(schedule: dict[str, Any]) -> None:
    all_alike(scenario("zero3", schedule=fsdp.Schedule(**schedule)), other=reference("nf4", 2))


@each_rank(2)
def test_frozen_bases_are_gathered_once_a_step() -> None:
    """Units that are mostly frozen; those that train are gathered twice as ever. Plans and peaks show the bytes."""
    plans, arenas, gathers = list[fsdp.Plan](), list[int](), list[int]()
    for keep in (None, "frozen"):
        torch.manual_seed(0)
        params, model = fsdp.functionalize(Chain(nn.Linear(64, 64), (Lora(64, 64) for _ in range(3))))
        precision = {"*.base.weight": fsdp.Precision(main=fsdp.int8), "*": fsdp.Precision()}
        spec = fsdp.Spec(fsdp.local_mesh(), precision=precision, schedule=fsdp.Schedule(keep=keep))
        state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
        forward_backward = T.forward_backward(model, mean_square)
        arenas.append(T.step_memory(forward_backward, state, torch.ones(3, 64)).parts["arena"])
        state = fsdp.step(forward_backward(state, torch.ones(3, 64))[0])
        before = state._executor.run.issued["gather"].count
        state = fsdp.step(forward_backward(state, torch.ones(3, 64))[0])
        plans.append(state.cursor.plan)
        gathers.append(state._executor.run.issued["gather"].count - before)
    plain, plan = plans
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert {unit.name: unit.gathers for unit in plain.units} == {"inp": 2, "blocks.0": 2, "blocks.1": 2, "blocks.2": 1}
    assert {unit.name: unit.gathers for unit in plan.units} == {"inp": 2, **dict.fromkeys(blocks, 1)}
    kept = sum(plan.by_name[name].nbytes for name in blocks)
    assert arenas[1] == plan.arena >= kept > arenas[0] - plan.by_name["inp"].nbytes
    assert f"{bytes_text(kept)} of it kept" in str(plan)
    assert gathers[0] > gathers[1]
    assert "keeps what is frozen" in str(fsdp.Schedule(keep="frozen"))
    assert "keeps what is frozen" in str(fsdp.Spec({"data": 4}, schedule=fsdp.Schedule(keep="frozen")))


def test_compiled_units() -> None:
    """Unpacking is traced into the unit."""
    mesh: Any = fsdp.local_mesh()
    found = []
    for compile in (False, {"backend": "aot_eager"}):
        torch.manual_seed(0)
        params, model = fsdp.functionalize(nn.Sequential(Lora(20, 11)))
        state = fsdp.shard(params, fsdp.Spec(mesh, precision={"0.base.weight": fsdp.Precision(main=fsdp.nf4)}))
        seen: Any = T.forward_backward(model, mean_square, compile=compile)
        found.append(seen(state, torch.ones(3, 20))[1])
    assert torch.allclose(*found)


# ---------------------------------------------------------------- states that move


@each_rank(2)
def test_copies_checkpoints_and_other_layouts_keep_the_bytes(tmp_path: Path) -> None:
    state, model = start("zero3")
    forward_backward = T.forward_backward(model, loss_fn)
    rank = dist.get_rank()
    state = fsdp.step(forward_backward(state, batch(0, rank))[0])
    right = fsdp.full_params(state)
    bits = {path: p.bits for path, p in right.items() if type(p) is fsdp.PackedWeight}

    def same(other: fsdp.State) -> fsdp.State:
        for path, p in fsdp.full_params(other).items():
            assert torch.equal(p.bits if path in bits else p, bits[path] if path in bits else right[path]), path
        return other

    fsdp.save(state, tmp_path / "saved")
    mesh: Any = state.spec.mesh
    same(copy.deepcopy(state))
    same(pickle.loads(pickle.dumps(state)))
    same(fsdp.load(tmp_path / "saved", like=start("ddp")[0]))
    loaded = same(fsdp.load(tmp_path / "saved", state.spec, fsdp.adamw(**OPTIMIZER)))
    same(fsdp.replace_params(start("zero2")[0], right))
    same(fsdp.shard(right, fsdp.Spec(mesh, trainable={"*lora*": True, "*": False})))
    plain = made()
    plain.load_state_dict(fsdp.state_dict(state))
    for path, p in fsdp.as_module(model, state).named_parameters():
        assert torch.equal(plain.get_parameter(path), p.clone())
    for _, named in fsdp.stream(state):
        for path, leaf in named.items():
            assert type(leaf) is torch.Tensor
            assert torch.equal(leaf, plain.get_parameter(path))
    state = same(fsdp.redistribute(state, fsdp.Spec(mesh, fsdp.ddp("data"))))  # it stays packed
    frozen = {"*lora*": True, "*": False}
    wide = {"*.base.weight": fsdp.Precision(main=torch.float64), "*": fsdp.Precision()}
    state = fsdp.redistribute(state, fsdp.Spec(mesh, precision=wide, trainable=frozen))
    assert [b.main for b in state.layout.buckets.values() if b.packed] == [torch.uint8]  # the embedding
    for path, p in fsdp.full_params(state).items():
        assert torch.equal(p.clone(), plain.get_parameter(path))
    again = fsdp.Spec(mesh, precision=rules(fsdp.nf4()))
    state = same(fsdp.redistribute(state, again))  # its numbers are nf4's already
    state = fsdp.freeze(state, "head.*")
    state = same(fsdp.unfreeze(state, "head.lora_*"))
    outs = [forward_backward(one, batch(1, rank))[1] for one in (state, loaded)]
    assert torch.equal(*outs)


@each_rank(2)
def test_weights_of_files_are_packed_as_they_are_read(tmp_path: Path) -> None:
    plain, path = made(), tmp_path / "plain.pt"
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), path)
    dist.barrier()
    spec = fsdp.Spec(fsdp.local_mesh(), precision=rules(fsdp.nf4()))
    found = [fsdp.init(made, spec, weights=weights)[0] for weights in (path, plain.state_dict())]
    found.append(fsdp.shard(fsdp.functionalize(plain)[0], spec))
    trees = [[getattr(p, "bits", p) for p in fsdp.full_params(one).values()] for one in found]
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*trees, strict=True))


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    state, model = start("zero3")
    named = re.escape("the leaf 'embed.weight' is packed by nf4(), which these files do not have")
    with pytest.raises(fsdp.SpecError, match=f"save_safetensors: {named}"):
        fsdp.save_safetensors(state, tmp_path / "a")
    with pytest.raises(fsdp.SpecError, match=f"save_dcp: {named}"):
        fsdp.save_dcp(state, tmp_path / "b")
    fsdp.save(state, tmp_path / "c")
    with pytest.raises(fsdp.CheckpointError, match=r"leaves that are packed \('embed.weight', by nf4\(\)\)"):
        fsdp.open_checkpoint(tmp_path / "c")
    said = r"'embed.weight' packed by nf4\(\), and this state has it packed by int8\(\)"
    with pytest.raises(fsdp.SpecError, match=said):
        fsdp.load(tmp_path / "c", like=start("zero3", "int8")[0])
    with pytest.raises(fsdp.SpecError, match="is marked trainable, and it is packed"):
        fsdp.unfreeze(state, "embed.weight")
    forward_backward = T.forward_backward(model, loss_fn)

    def step(state: fsdp.State, tokens: torch.Tensor) -> Any:
        state, loss = forward_backward(state, tokens)
        return fsdp.step(state), loss

    with pytest.raises(fsdp.ScheduleError, match=r"compiled whole does not gather packed leaves, as 'embed.weight' is"):
        T.compile(step)(state, batch(0, 0))


def test_the_peak_of_a_step_counts_bytes_and_what_is_unpacked() -> None:
    found, peaks = [], []
    for spec in ({}, {"precision": fsdp.Precision()}):
        state, model = start("zero3", "nf4", **spec)
        found.append(T.step_memory(T.forward_backward(model, loss_fn), state, batch(0, 0)).parts)
        assert found[-1]["main weights"] == state.layout.nbytes("main")
        peaks.append(T.step_memory(T.forward_backward(model, loss_fn), state, batch(0, 0)).peak)
    assert found[0]["main weights"] < found[1]["main weights"] / 2
    assert peaks[0] < peaks[1]


# ---------------------------------------------------------------- weights of other packages


class Linear4bit(nn.Linear):
    """As bitsandbytes has it: a weight [n · m / 2, 1] of bytes, and a state beside it."""

    def __init__(self, planes: Tree, nested: bool) -> None:
        super().__init__(50, 34)
        outer = SimpleNamespace(absmax=planes.get("outer"), blocksize=256)
        self.weight = Params4bit(planes["data"].view(-1, 1))
        self.weight.quant_state = SimpleNamespace(
            absmax=planes["absmax"], shape=torch.Size((34, 50)), quant_type="nf4", blocksize=64, nested=nested,
            state2=outer if nested else None, offset=planes["mean"].view(()) if nested else None, dtype=torch.bfloat16,
        )  # fmt: skip


class Params4bit(nn.Parameter):
    quant_state: Any

    def __new__(cls, data: torch.Tensor) -> Params4bit:
        return torch.Tensor._make_subclass(cls, data, False)


class Int8Params(nn.Parameter):
    CB: Any
    SCB: Any

    def __new__(cls, data: torch.Tensor) -> Int8Params:
        return torch.Tensor._make_subclass(cls, data, False)


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "int8"])
def test_weights_of_bitsandbytes_are_taken_over(name: str) -> None:
    """Bytes that bitsandbytes has made, and what it reads them as; its classes are played."""
    planes, plain = PEERS[name]
    part: nn.Module
    if name == "int8":
        part = nn.Linear(50, 34)
        part.weight = Int8Params(planes["data"].view(34, 50))
        part.weight.CB, part.weight.SCB = part.weight.data, planes["absmax"]
    else:
        part = Linear4bit(planes, "nested" in name)
    model = nn.Sequential(nn.Linear(4, 50), part, nn.BatchNorm1d(34))
    found = fsdp.from_quantized(model)
    assert type(found[1]) is nn.Linear
    assert found[1].bias is part.bias
    assert found[0].weight is model[0].weight
    assert model[1] is part
    params, _ = fsdp.functionalize(found)
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
    weight = fsdp.full_params(state)["1.weight"]
    assert torch.equal(weight.clone(), plain)
    for key, plane in weight.form.planes(weight.bits).items():
        assert torch.equal(plane, planes[key].view(plane.shape))


def test_tensors_of_torchao_are_taken_over() -> None:
    with patch.object(sys, "path", [*sys.path, str(TORCHAO)]):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # type: ignore[import-not-found]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    quantize_(model, Int8WeightOnlyConfig())
    right: list[Any] = [part.get_parameter("weight").dequantize() for part in model]
    params, _ = fsdp.functionalize(fsdp.from_quantized(model))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()))
    found = fsdp.full_params(state)
    assert all(torch.equal(found[f"{i}.weight"].clone(), right[i]) for i in range(2))
    assert pickle.loads(pickle.dumps(state)).layout == state.layout
    with pytest.raises(fsdp.SpecError, match="it was taken over from a tensor, and packs no others"):
        found["0.weight"].form.pack(right[0])


def test_what_cannot_be_taken_over_is_refused() -> None:
    part = Linear4bit(PEERS["nf4"][0], False)
    part.weight.quant_state.packing_format_for_cpu = True  # type: ignore[attr-defined]
    with pytest.raises(fsdp.SpecError, match="of '1' has its bytes in another order"):
        fsdp.from_quantized(nn.Sequential(nn.Linear(2, 2), part))
    part.weight.quant_state.quant_type = "fp4"  # type: ignore[attr-defined]
    with pytest.raises(fsdp.SpecError, match="the weight of '1' is fp4; expected nf4"):
        fsdp.from_quantized(nn.Sequential(nn.Linear(2, 2), part))
    other = nn.Linear(50, 34)
    other.weight = Int8Params(PEERS["int8"][0]["data"].view(34, 50))
    other.weight.CB = other.weight.SCB = None
    with pytest.raises(fsdp.SpecError, match="the weight of '0' is not quantized yet"):
        fsdp.from_quantized(nn.Sequential(other))


def test_a_model_without_quantized_weights_is_refused() -> None:
    with pytest.raises(fsdp.SpecError, match="Net has no weight that bitsandbytes or torchao has quantized"):
        fsdp.from_quantized(made())


def test_a_module_that_does_not_freeze_them_is_driven() -> None:
    """The codec does."""
    mesh = fsdp.local_mesh()
    plain = made().requires_grad_(True)
    params, model = fsdp.functionalize(plain)
    state = fsdp.shard(params, fsdp.Spec(mesh, precision=rules(fsdp.nf4())), fsdp.sgd(lr=0.1))
    state, loss = T.forward_backward(model, loss_fn)(state, batch(0, 0))
    assert loss.item() == pytest.approx(reference("nf4", 1)[0].losses[0], abs=1e-9)
    assert {leaf.path for b in state.layout.trainable.values() for leaf in b.leaves}.isdisjoint(
        leaf.path for b in state.layout.buckets.values() if b.packed for leaf in b.leaves
    )
