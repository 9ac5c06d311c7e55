"""Packed leaves on GPUs: the kernel's bits, steps of a packed base in every transport, compiled and in a graph; and
what a base of large matrices takes in nf4 and in bfloat16.

    pytest -s tests/gpu/test_codecs.py        two GPUs, or one that two ranks share; -s shows the figures
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from gpu.machine import deterministic, own_gpus
from torch.utils._pytree import tree_map

import functional_fsdp as fsdp
from functional_fsdp import launch
from functional_fsdp import transforms as T
from functional_fsdp._launch.launch import stop_workers
from functional_fsdp._optim.adamw import AdamW
from functional_fsdp.codecs import Form, kernels, packed_reductions
from functional_fsdp.codecs.rows import Rows

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products
pytestmark = [pytest.mark.timeout(170), pytest.mark.usefixtures("fresh_workers")]
RANKS, STEPS, WIDTH, DEPTH = 2, 6, 256, 3
LARGE, LAYERS, TOKENS = 4096, 6, 2048
WAYS: dict[str, tuple[str, bool, bool]] = {
    "eager": ("collective", False, False),
    "a graph": ("collective", False, True),
    "symmetric": ("symmetric", False, False),
    "copies": ("copy_engine", False, False),
    "compiled": ("collective", True, False),
    "compiled, copies, a graph": ("copy_engine", True, True),
}
CODECS = {"nf4": fsdp.nf4(), "nf4 nested": fsdp.nf4(nested=True), "int8": fsdp.int8(), "mxfp8": fsdp.mxfp8()}
CODECS |= {"fp8_block": fsdp.fp8_block(), "tiles": fsdp.fp8_block(tile=(128, 128))}
CODECS |= {"int4": fsdp.int4(), "dynamic8": fsdp.dynamic8()}
GATHERS = {"fp8_block": fsdp.fp8_block(), "mxfp8": fsdp.mxfp8(), "nf4": fsdp.nf4()}


class Lora(nn.Module):
    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.base = nn.Linear(n, m, bias=False)
        self.lora_A = nn.Parameter(torch.randn(8, n) / n**0.5)
        self.lora_B = nn.Parameter(torch.randn(m, 8) / 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Lora(width, 3 * width), nn.GELU(), Lora(3 * width, width)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(F.layer_norm(x, x.shape[-1:]))
        return x


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - x.float().sin()).square().mean()


def rules(codec: fsdp.Codec | None) -> dict[str, fsdp.Precision]:
    half = torch.bfloat16
    base = fsdp.Precision(main=half, compute=half) if codec is None else fsdp.Precision(main=codec, compute=half)
    return {"*.base.weight": base, "*": fsdp.Precision(compute=half)}


def start(codec: fsdp.Codec | None, transport: str, width: int, depth: int) -> tuple[fsdp.State, Any]:
    spec = fsdp.Spec(
        fsdp.local_mesh(), precision=rules(codec), transport=transport, trainable={"*lora*": True, "*": False}
    )
    return fsdp.init(lambda: Net(width, depth), spec, fsdp.adamw(lr=1e-3))


def batch(step: int, rows: int, width: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, width, generator=seeded).to("cuda", torch.bfloat16)


def losses_of(state: fsdp.State, model: Any, compile: bool, graph: bool, steps: int) -> tuple[fsdp.State, list[float]]:
    """So many steps on small batches, and the loss of each."""
    forward_backward = T.forward_backward(model, loss_fn, compile=compile)

    def train_step(state: fsdp.State, x: torch.Tensor) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, x)
        return fsdp.step(state), loss

    step: Any = T.cuda_graph(train_step) if graph else train_step
    losses = []
    for i in range(steps):
        state, loss = step(state, batch(i, 64, WIDTH))
        losses.append(loss.clone())
    return state, [*map(float, losses)]


def timed_steps(state: fsdp.State, model: Any, compile: bool = False) -> tuple[float, int]:
    """ms of the middle one of steps on large batches, and the peak in MiB."""
    forward_backward = T.forward_backward(model, loss_fn, compile=compile)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for i in range(8):
        torch.cuda.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        state, _ = forward_backward(state, batch(i, TOKENS, LARGE))
        state = fsdp.step(state)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begun))
    return sorted(times[2:])[3], torch.cuda.max_memory_allocated() >> 20


def trained(packed: bool, way: str, codec: str = "nf4") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Packed, or with the numbers that the bytes stand for in bfloat16."""
    transport, compile, graph = WAYS[way]
    state, model = start(CODECS[codec], transport, WIDTH, DEPTH)
    if not packed:
        plain = fsdp.Spec(
            fsdp.local_mesh(), precision=rules(None), transport=transport, trainable={"*lora*": True, "*": False}
        )
        state = fsdp.redistribute(state, plain)
    state, losses = losses_of(state, model, compile, graph, STEPS)
    params = {path: p.clone().cpu() for path, p in fsdp.full_params(state).items()}
    return losses, params


@deterministic()
def both(way: str, codec: str = "nf4") -> tuple[Any, Any]:
    return trained(True, way, codec), trained(False, way, codec)


def unpacked() -> dict[str, bool]:
    """Of each codec: whether a GPU packs and unpacks as a CPU, and a kernel as torch's operations."""
    found = {}
    for name, codec in CODECS.items():
        for shape in ((33, 100), (512, 768)):
            w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            form = Form(codec, shape, torch.bfloat16)
            bits = form.pack(w)
            same = torch.equal(form.unpack(bits.cuda()).cpu(), form.unpack(bits))
            with by_operations():
                same &= torch.equal(form.unpack(bits.cuda()).cpu(), form.unpack(bits))
            there = form.pack(w.cuda()).cpu()
            found[f"{name} {shape}"] = same and (there != bits).float().mean().item() < 5e-3
    return found


def by_operations() -> Any:
    """Without kernels."""
    return patch.object(kernels, "triton", None)


BLOCKED = {name: CODECS[name] for name in ("fp8_block", "mxfp8", "int4", "nf4", "dynamic8")} | {"int8": fsdp.int8(64)}
BLOCKED |= {"unsigned": fsdp.dynamic8(signed=False)}


def inputs(n: int) -> dict[str, torch.Tensor]:
    """Vectors of n numbers of many kinds."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).cuda()
    odd, half = x.clone(), x.clone()
    odd[3], odd[-1], odd[n // 2], half[: n // 2] = float("nan"), float("inf"), -float("inf"), 0
    made = {"random": x, "zeros": torch.zeros_like(x), "half zeros": half, "no numbers": odd}
    made |= {"bfloat16": x.bfloat16()} if n == 4096 else {}  # a kernel of its own
    made |= {"denormal": x * 1e-39, "small": x * 1e-36, "large": x * 1e38, "equal": torch.full_like(x, 0.3)}
    return made | {"wide": x * torch.logspace(-40, 38, n, device="cuda")}


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for which NaN it is."""
    if one.dtype.is_floating_point:
        both = one.float(), other.float()
        return torch.equal(both[0].isnan(), both[1].isnan()) and torch.equal(*(x.nan_to_num(0.0) for x in both))
    return torch.equal(one, other)


def fused() -> list[str]:
    """Where kernels have other bits than operations: what is done, with how many elements of which kind."""
    found = []

    def compare(said: str, run: Any, *args: Any) -> None:
        own = run(*args)
        with by_operations():
            others = run(*args)
        if not all(map(alike, own, others)):
            found.append(f"{said}: {sum(int((a != b).sum()) for a, b in zip(own, others, strict=True))} differ")

    for name, codec in BLOCKED.items():
        for n in (4, 100, 4096, 65541):
            for kind, x in inputs(n).items():
                for form in (codec, Rows(codec)):
                    said, values = f"{form} {name}, {n} {kind}", x.abs() if name == "unsigned" else x
                    if form is codec or kind != "no numbers":  # whose bytes are of one NaN or another
                        compare(f"{said}: pack", lambda form, x: [*form.pack(x).values()], form, values)
                    with by_operations():
                        planes = form.pack(values)
                    for dtype in (torch.float32, torch.bfloat16, torch.float16):
                        compare(
                            f"{said}: {dtype}", lambda *args: [args[0].unpack(*args[1:])], form, planes, (n,), dtype
                        )
        if "signed" not in name and name != "dynamic8":
            compare(f"{name} wires", sums, codec, 3, codec.block * 48)
    w = torch.randn(33, 100, generator=torch.Generator().manual_seed(0)).cuda()
    for form in (fsdp.int8(), fsdp.nf4(nested=True)):
        compare(str(form), lambda form: [form.unpack(form.pack(w), (33, 100), torch.bfloat16)], form)
    return found


def sums(codec: fsdp.Codec, ranks: int, n: int) -> list[torch.Tensor]:
    """Bytes of three ranks' parts, what is left, the sum and the mean."""
    seeded = torch.Generator().manual_seed(1)
    stage, before = (torch.randn(ranks * n, generator=seeded).bfloat16().cuda() for _ in range(2))
    planes = codec.planes((n,)).values()
    bits = torch.zeros(ranks * sum(torch.Size(s).numel() * d.itemsize for s, d in planes), dtype=torch.uint8).cuda()
    after, out, mean = torch.zeros_like(before), torch.empty(n).cuda(), torch.empty(n).cuda()
    packed_reductions.pack(codec, stage, bits, ranks, (before, after))
    packed_reductions.add_up(codec, bits, ranks, out, False)
    packed_reductions.add_up(codec, bits, ranks, mean, True)
    return [bits, after, out, mean]


def test_kernels_have_the_bits_of_operations() -> None:
    assert not launch(fused, (), nprocs=1)[0]


def launches() -> dict[str, tuple[int, int, float, float]]:
    """Of a large bucket: kernels that are launched, and ms; by kernels and by operations."""
    x, found = torch.randn(1 << 26, device="cuda"), {}
    for name, codec in BLOCKED.items():
        rows = Rows(codec)
        bits = torch.empty(rows.bytes_of(x.numel()), dtype=torch.uint8, device="cuda")
        jobs: dict[str, Any] = {
            "pack": lambda rows=rows, bits=bits: rows.pack_into(x, bits),
            "unpack": lambda rows=rows, bits=bits: rows.unpack(
                {"rows": bits.view(-1, rows.nbytes)}, (x.numel(),), torch.bfloat16
            ),
        }
        for what, run in jobs.items():
            both: list[Any] = []
            for how in (nullcontext, by_operations):
                with how():
                    both += [counted(run), timing(run)]
            found[f"{name} {what}"] = (both[0], both[2], both[1], both[3])
    return found


def counted(run: Any) -> int:
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if str(event.device_type).endswith("CUDA"))


def timing(run: Any) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(5):
        run()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended) / 5


def test_a_bucket_is_packed_and_unpacked_by_one_launch() -> None:
    """Printed: launches and ms for 64 Mi elements."""
    print()
    for name, (own, others, ms, slow) in launch(launches, (), nprocs=1)[0].items():
        print(f"{name:>22} {own:4} launch {ms:8.3f} ms   by operations {others:4} {slow:8.3f} ms")
        assert own == 1
        assert ms < slow


def measured(codec: fsdp.Codec | None, compile: bool) -> tuple[float, int, int]:
    """ms a step, the peak in MiB, and bytes of the base on a rank, of large matrices."""
    torch.cuda.reset_peak_memory_stats()
    state, model = start(codec, "collective", LARGE, LAYERS)
    ms, peak = timed_steps(state, model, compile)
    frozen = [b for b in state.layout.buckets.values() if not b.trainable]
    return ms, peak, sum(b.nbytes("main") for b in frozen)


def wired(way: str, wire: Any, feedback: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All weights train, gradients travel in a codec."""
    transport, compile, graph = WAYS[way]
    precision = fsdp.Precision(compute=torch.bfloat16, wire=wire, feedback=feedback)
    spec = fsdp.Spec(fsdp.local_mesh(), precision=precision, transport=transport)
    state, model = fsdp.init(lambda: Net(WIDTH, DEPTH), spec, fsdp.adamw(lr=1e-3))
    state, losses = losses_of(state, model, compile, graph, 2 * STEPS)
    found = {path: p.cpu() for path, p in fsdp.full_params(state).items()}
    return losses, found | {f"left {b}": one.local.cpu() for b, one in state.residual.items()}


@deterministic()
def wires() -> list[Any]:
    eager = [wired("eager", fsdp.fp8_block, True) for _ in range(2)]
    return [*eager, wired("a graph", fsdp.fp8_block, True), wired("eager", None, False)]


def timed(wire: Any) -> tuple[float, int]:
    """ms a step, and the peak in MiB, of large matrices that all train."""
    precision = fsdp.Precision(compute=torch.bfloat16, wire=wire, feedback=wire is not None)
    state, model = fsdp.init(
        lambda: Net(LARGE, 4), fsdp.Spec(fsdp.local_mesh(), precision=precision), fsdp.adamw(lr=1e-3)
    )
    return timed_steps(state, model)


def test_packed_wires_have_the_same_bits_in_each_run_and_in_a_graph() -> None:
    for eager, again, graph, plain in launch(wires, (), nprocs=RANKS):
        assert eager[0] == again[0] == graph[0]
        assert eager[0] == pytest.approx(plain[0], rel=2e-2)
        for path, p in eager[1].items():
            assert torch.equal(p, again[1][path]), path
            assert torch.equal(p, graph[1][path]), path
        assert any(p.any() for path, p in eager[1].items() if path.startswith("left "))


def trainable_of(rule: fsdp.Precision) -> dict[str, fsdp.Precision]:
    return {"*.base.weight": rule, "*": fsdp.Precision(compute=torch.bfloat16)}


def gathered(way: str, codec: str) -> tuple[list[float], dict[str, bool]]:
    """All weights train, matrices are gathered in a codec; whether compute sees what main weights are packed to, as a
    CPU packs them."""
    transport, compile, graph = WAYS[way]
    rule = fsdp.Precision(compute=torch.bfloat16, gather=GATHERS[codec])  # sums as copies add them up: packing shows
    rules = {key: replace(rule, sum="fp32") for key, rule in trainable_of(rule).items()}  # what another rounding does
    spec = fsdp.Spec(fsdp.local_mesh(), precision=rules, transport=transport)
    state, model = fsdp.init(lambda: Net(WIDTH, DEPTH), spec, fsdp.adamw(lr=1e-3))
    state, losses = losses_of(state, model, compile, graph, STEPS)
    main = {path: p.cpu() for path, p in fsdp.full_params(state).items()}
    _, seen = fsdp.unshard(state)
    right = {}
    for path, weight in seen.items():
        if type(weight) is fsdp.PackedWeight:
            form = Form(GATHERS[codec], tuple(weight.shape), torch.bfloat16)
            there = form.unpack(form.pack(main[path]))
            differ = (weight.dequantized().cpu() != there).float().mean().item()
            right[path] = differ < 5e-3  # a GPU may divide to the neighbour
    return losses, right


@deterministic()
def all_gathered(codec: str) -> list[Any]:
    return [gathered(way, codec) for way in WAYS if way != "symmetric"]


@pytest.mark.parametrize("codec", GATHERS)
def test_gathers_of_weights_that_train(codec: str) -> None:
    """The same losses by every transport and in a graph; compiled units keep float32 between operations."""
    ways = [way for way in WAYS if way != "symmetric"]
    for found in launch(all_gathered, (codec,), nprocs=RANKS):
        for way, (losses, right) in zip(ways, found, strict=True):
            assert len(right) == 2 * DEPTH
            assert all(right.values()), (way, right)
            assert losses == pytest.approx(found[0][0], rel=2e-2 if "compiled" in way else 1e-6), way
        assert found[0][0][-1] < found[0][0][0]


def moments(device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights and the planes of packed moments after some gradients."""
    mesh: Any = fsdp.local_mesh(device)
    seeded = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(512, 257, generator=seeded).to(device)}
    state = fsdp.shard(params, fsdp.Spec(mesh), fsdp.adamw(lr=1e-2, moments=fsdp.dynamic8))
    for _ in range(4):
        grad = torch.randn(512, 257, generator=seeded) * 1e-3
        state = fsdp.step(fsdp.reduce(state, {"w": grad.to(device)}))
    planes = [b.local.cpu() for which in state.opt[:2] for tree in which.values() for b in tree.values()]
    return fsdp.full_params(state)["w"].cpu(), planes


def test_packed_moments_are_those_of_a_cpu() -> None:
    """But for neighbours in the codebook."""
    weights, planes = moments("cpu")
    others, theirs = launch(moments, ("cuda",), nprocs=1)[0]
    assert (weights - others).abs().max() < 5e-3
    for one, other in zip(planes, theirs, strict=True):
        if one.dtype is torch.uint8:
            assert (one.int() - other.int()).abs().max() <= 1
            assert (one != other).float().mean() < 1e-2
        else:
            assert torch.allclose(one, other, rtol=1e-2)


def graphed_moments() -> list[list[float]]:
    found = []
    for graph in (False, True):
        spec = fsdp.Spec(fsdp.local_mesh(), precision=fsdp.Precision(compute=torch.bfloat16))
        state, model = fsdp.init(lambda: Net(WIDTH, DEPTH), spec, fsdp.adamw(lr=1e-3, moments=fsdp.dynamic8))
        found.append(losses_of(state, model, False, graph, 2 * STEPS)[1])
    return found


def test_packed_moments_in_a_graph() -> None:
    for eager, graph in launch(graphed_moments, (), nprocs=RANKS):
        assert eager == pytest.approx(graph, rel=1e-6)
        assert eager[-1] < eager[0]


def by_axis(wire: Any, transport: str) -> list[float]:
    """Gradients are reduced along "shard", and travel packed along "replica"."""
    precision = fsdp.Precision(compute=torch.bfloat16, wire=wire, feedback=wire is not None)
    mesh: Any = fsdp.local_mesh(replica=2, shard=-1)
    spec = fsdp.Spec(mesh, fsdp.hsdp("replica", "shard"), precision=precision, transport=transport)
    state, model = fsdp.init(lambda: Net(WIDTH, DEPTH), spec, fsdp.adamw(lr=1e-3))
    return losses_of(state, model, False, False, 2 * STEPS)[1]


def test_wires_along_the_slow_axis() -> None:
    """On two GPUs "shard" is of one rank; on four both axes are there."""
    for ranks in {2, 4 if torch.cuda.device_count() >= 4 else 2}:
        plain = launch(by_axis, (None, "collective"), nprocs=ranks)[0]
        found = launch(by_axis, ({"replica": fsdp.fp8_block}, "collective"), nprocs=ranks)[0]
        again = launch(by_axis, ({"replica": fsdp.fp8_block}, "collective"), nprocs=ranks)[0]
        assert found == pytest.approx(plain, rel=2e-2)
        assert found == pytest.approx(again, rel=1e-6)


def kept(keep: Any) -> tuple[float, int]:
    state, model = start(fsdp.nf4(), "collective", LARGE, LAYERS)
    spec = fsdp.Spec(
        fsdp.local_mesh(), precision=rules(fsdp.nf4()), schedule=fsdp.Schedule(keep=keep),
        trainable={"*lora*": True, "*": False},
    )  # fmt: skip
    return timed_steps(fsdp.redistribute(state, spec), model)


def test_figures_of_kept_bases() -> None:
    """Printed: a packed base that is gathered twice a step, and once. What is kept takes memory."""
    (ms, peak), (once, more) = (launch(kept, (keep,), nprocs=RANKS)[0] for keep in (None, "frozen"))
    print(f"\n{'nf4, gathered twice':>24} {ms:8.1f} ms {peak:8} MiB peak")
    print(f"{'keep=frozen':>24} {once:8.1f} ms {more:8} MiB peak")
    assert more > peak


def test_figures_of_wires() -> None:
    """Printed: a step with packed wires beside one with bfloat16's."""
    for name, wire in {"bfloat16": None, "fp8_block": fsdp.fp8_block()}.items():
        ms, peak = launch(timed, (wire,), nprocs=RANKS)[0]
        print(f"\n{name:>20} wires {ms:8.1f} ms {peak:8} MiB peak", end="")
        assert ms > 0
    print()


def test_kernels_have_the_bits_of_a_cpu() -> None:
    for found in launch(unpacked, (), nprocs=1):
        assert all(found.values()), found


@pytest.mark.parametrize("way", [way if way != "symmetric" else pytest.param(way, marks=own_gpus) for way in WAYS])
def test_steps_are_those_of_unpacked_weights(way: str) -> None:
    """The same bits; compiled units keep float32 between operations, and so beside what they unpack."""
    if way == "symmetric":  # processes have torch's symmetric memory by one backend only
        stop_workers()
    found = launch(both, (way,), nprocs=RANKS)
    if way == "symmetric":
        stop_workers()
    near = 2e-3 if "compiled" in way else 0
    for packed, plain in found:
        assert packed[0] == pytest.approx(plain[0], abs=near)
        for path, p in plain[1].items():
            assert torch.allclose(packed[1][path].float(), p.float(), atol=near, rtol=near), path


@pytest.mark.parametrize("codec", CODECS)
def test_steps_by_every_codec(codec: str) -> None:
    for packed, plain in launch(both, ("eager", codec), nprocs=RANKS):
        assert packed[0] == plain[0]


def test_figures_of_large_matrices() -> None:
    """Printed: what a base takes in nf4 and in bfloat16. The peak of the packed one is below the other's."""
    rows = {}
    for name, codec in {
        "bfloat16": None,
        "nf4": fsdp.nf4(),
        "nf4 nested": fsdp.nf4(nested=True),
        "mxfp8": fsdp.mxfp8(),
    }.items():
        for compile in (False, True) if name in ("bfloat16", "nf4") else (False,):
            rows[name, compile] = found = launch(measured, (codec, compile), nprocs=RANKS)[0]
            ms, peak, base = found
            said = f"{name + ' compiled' * compile:>20} {ms:8.1f} ms {peak:8} MiB peak"
            print(f"\n{said} {base >> 20:8} MiB of base a rank", end="")
    print()
    assert rows["nf4", False][2] < 0.3 * rows["bfloat16", False][2]
    for compile in (False, True):
        assert rows["nf4", compile][1] < rows["bfloat16", compile][1]


def stepped(codec: fsdp.Codec, dtype: torch.dtype) -> list[torch.Tensor]:
    """Planes of packed moments, and weights, after steps of which one is skipped, and one has no gradient of a leaf."""
    seeded = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(512, 257, generator=seeded).cuda(), "b": torch.randn(77, generator=seeded).cuda()}
    spec = fsdp.Spec(fsdp.local_mesh(), precision=fsdp.Precision(main=dtype, compute=dtype))
    state = fsdp.shard(params, spec, fsdp.adamw(lr=1e-2, moments=codec))
    for step in range(5):
        grads: dict[str, Any] = {
            path: 1e-3 * torch.randn(p.shape, generator=seeded).cuda().to(dtype) for path, p in params.items()
        }
        grads |= {"b": None} if step == 3 else {}
        state = fsdp.step(fsdp.reduce(state, grads), skip=torch.tensor(step == 1, device="cuda"))
    planes = [b.local.cpu() for which in state.opt[:2] for tree in which.values() for b in tree.values()]
    return [*planes, *(p.cpu() for p in fsdp.full_params(state).values())]


def updates() -> list[str]:
    """Where moments of the kernel have other bits than those of operations, or weights another number."""
    found, plainly = [], patch.object(AdamW, "change", AdamW.plainly)
    for codec in (fsdp.dynamic8(), fsdp.dynamic8(64), fsdp.fp8_block(128), fsdp.int8(64), fsdp.mxfp8()):
        for dtype in (torch.float32, torch.bfloat16):
            own = stepped(codec, dtype)
            with by_operations(), plainly:
                others = stepped(codec, dtype)
            for i, (one, other) in enumerate(zip(own, others, strict=True)):
                same = (one.int() - other.int()).abs() <= 1 if one.dtype is torch.uint8 else torch.isclose(one, other)
                if not same.all() or (one != other).float().mean() > (1e-3 if one.dtype is torch.uint8 else 1):
                    found.append(f"{codec} {dtype} {i}: {int((one != other).sum())} of {one.numel()} differ")
    return found


def update_time() -> dict[str, tuple[int, float, int]]:
    """Of 64 Mi elements: kernels that an update launches, ms, and MiB beside the state."""
    found = {}
    for name, how in {"one kernel": nullcontext, "by operations": by_operations, "plain moments": nullcontext}.items():
        moments = None if name == "plain moments" else fsdp.dynamic8
        state = fsdp.shard(
            {"w": torch.randn(1 << 26).cuda()}, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(moments=moments)
        )
        run = partial(
            state.optimizer.update, tree_map(torch.zeros_like, state.main), state.opt, state.main, state.count
        )
        with how():
            run()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found[name] = counted(run), timing(run), (torch.cuda.max_memory_allocated() - before) >> 20
    return found


def test_moments_are_updated_by_one_kernel_with_the_bits_of_operations() -> None:
    """Printed: what an update of 64 Mi elements takes."""
    assert not launch(updates, (), nprocs=1)[0]
    found = launch(update_time, (), nprocs=1)[0]
    for name, (kernels_, ms, more) in found.items():
        print(f"\n{name:>14} {kernels_:4} launches {ms:8.3f} ms {more:6} MiB", end="")
    assert found["one kernel"][1] < found["by operations"][1]
    assert found["one kernel"][2] < 1
