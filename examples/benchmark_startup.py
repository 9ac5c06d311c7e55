"""From the start of a process to its sixth step, beside FSDP2: each in processes and caches of its own.

    python examples/benchmark_startup.py                                   # CPU (gloo): a tiny Llama on 2 ranks
    python examples/benchmark_startup.py --ranks 4 --size 8b --rounds 3    # GPUs (NCCL): Llama-3-8B
    python examples/benchmark_startup.py --ranks 1 --size 1b               # one GPU: Llama-3.2-1B
    python examples/benchmark_startup.py --ranks 2 --families qwen2,vit    # models of `benchmark_families.py`

| row       | what it is                                                                                             |
|-----------|--------------------------------------------------------------------------------------------------------|
| here      | `T.start_compilers` before the ranks connect, `fsdp.init`, `T.forward_backward(compile=True)`; on GPUs  |
|           | the whole step as a CUDA graph, `T.cuda_graph`                                                         |
| FSDP2     | `fully_shard` of each layer and of the model, `layer.compile()`                                        |

Each row runs twice in a round: cold, with empty caches of Inductor and Triton, and warm, with those that the cold run
left. Rows that shared a process would mislead: who comes second finds a warm cache. Python's modules are compiled to
bytecode before, as pip does where it may write, and on GPUs both rows run once, uncounted, with two layers: whoever
comes first reads libraries from the disk. The columns are seconds of rank 0:

| column        | what it is                                                                       |
|---------------|----------------------------------------------------------------------------------|
| import        | from the start of the process until everything is imported                       |
| groups        | until the ranks know each other, and have communicated once                      |
| build         | the model's weights, sharded, and the step                                       |
| 1, 2, ... 6   | each of the first six steps, until the device is done                            |
| sixth         | from the beginning of `build` to the end of the sixth step                       |
| whole         | from the start of the process to the end of the sixth step                       |

Below each row stands where the seconds of `sixth` went, by `T.startup`; the same columns in CPU seconds of rank 0 and
its compilers, which a busy machine does not change; events: modules imported, and by torch's own counters graphs that
Dynamo traced, that AOTAutograd and Inductor made, and that came from a cache; and of which packages those modules are.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import warnings  # noqa: E402
from argparse import Namespace  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

ROWS = ("here", "FSDP2")
STEPS = 6
LR = 3e-5
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
}  # fmt: skip
SHAPES = {"tiny": (2, 64), "1b": (1, 4096), "8b": (1, 4096)}

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def loss_of(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def llama(args: Namespace) -> tuple[Callable[[], Any], Callable[[torch.Generator], Batch]]:
    """The model of a size, and its batches."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sizes = SIZES[args.size] | ({"num_hidden_layers": args.layers} if args.layers else {})
    transformers.AttentionInterface.register("causal", sdpa_attention_forward)  # which needs no mask on the host
    config = transformers.LlamaConfig(**sizes, use_cache=False, attn_implementation="causal")  # type: ignore[call-arg]

    def batch(draw: torch.Generator) -> Batch:
        ids = torch.randint(1, config.vocab_size, SHAPES[args.size], generator=draw)
        return {"input_ids": ids, "labels": ids}

    return (lambda: transformers.LlamaForCausalLM(config)), batch


def without_cache(make: Callable[[], Any]) -> Any:
    """The model, whose layers do not differ by their place in a cache of keys and values."""
    model = make()
    for part in model.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return model


def here(build: Callable[[], Any], mesh: Any, dtype: torch.dtype, args: Namespace) -> Step:
    import functional_fsdp as fsdp
    from functional_fsdp import transforms as T

    cuda = mesh.device_type == "cuda"
    spec = fsdp.Spec(mesh, precision=fsdp.Precision(compute=dtype), schedule=fsdp.Schedule(overlap_update=True))
    state, model = fsdp.init(build, spec, fsdp.adamw(lr=LR), seed=0)
    forward_backward: Any = T.forward_backward(model, loss_of, compile=True)

    def train_step(state: fsdp.State, batch: Batch) -> tuple[fsdp.State, torch.Tensor]:
        state, loss = forward_backward(state, **batch)
        return fsdp.step(state), loss

    reads: Any = {"host_reads": "guard"} if args.family else {}  # some of them look at values
    run: Any = T.cuda_graph(train_step, **reads) if cuda else train_step
    kept = [state]

    def step(batch: Batch) -> torch.Tensor:
        kept[0], loss = run(kept[0], batch)
        return loss

    return step


def fsdp2(build: Callable[[], Any], mesh: Any, dtype: torch.dtype, args: Namespace) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if args.family:
        import benchmark_families

        return benchmark_families.fsdp2(build, mesh, dtype, compile=True)

    with torch.device("meta"):
        model = build()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(0)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "norm" in path:
                p.fill_(1.0)
            else:
                p.normal_(0.0, 0.02)
    with torch.device(mesh.device_type):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_of(model, **batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Calls(threading.Thread):
    """In which functions the main thread is, a hundred times a second, by the column that is under way."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.column = ""
        self.seconds: dict[str, Counter[str]] = {}  # by column and function, with all that it calls
        self.over = threading.Event()

    def run(self) -> None:
        last, main = time.time(), threading.main_thread().ident
        while not self.over.wait(0.01):
            now, frame, names = time.time(), sys._current_frames().get(main or 0), set()
            while frame is not None:
                code = frame.f_code
                names.add(f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_name}")
                frame = frame.f_back
            counted = self.seconds.setdefault(self.column, Counter())
            for name in names:
                counted[name] += now - last  # type: ignore[assignment]
            last = now

    def table(self, rows: int) -> dict[str, dict[str, float]]:
        """By column, the functions in which most of the time passed."""
        return {
            column: {name: round(took, 2) for name, took in counted.most_common(rows) if took >= 0.05}
            for column, counted in self.seconds.items()
        }


def cpu_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    return sum(os.times()[:4])


def late(before: set[str]) -> dict[str, int]:
    """Of which packages most modules were imported since."""
    found = Counter(".".join(name.split(".")[:2]) for name in sys.modules if name not in before)
    return dict(found.most_common(12))


def events(before: set[str]) -> dict[str, int]:
    """How often what takes long was done, by torch's counters."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Any = dynamo.counters if dynamo is not None else {}
    found = {"modules": len(sys.modules) - len(before)}
    for name, kind, keys in (
        ("graphs", "stats", ("unique_graphs",)),
        ("AOT graphs", "aot_autograd", ("total",)),
        ("AOT cached", "aot_autograd", ("autograd_cache_hit",)),
        ("Inductor graphs", "inductor", ("fxgraph_cache_miss", "fxgraph_cache_bypass")),
        ("Inductor cached", "inductor", ("fxgraph_cache_hit",)),
    ):
        found[name] = sum(counters.get(kind, {}).get(key, 0) for key in keys)
    return found


def worker(args: Namespace) -> None:
    """One rank of one row, in a process of its own. Rank 0 prints the seconds as JSON."""
    if args.family:
        import benchmark_families

        made, batch = benchmark_families.FAMILIES[args.family](torch.cuda.device_count() > 0)
    else:
        made, batch = llama(args)
    if args.worker == "here":
        importlib.import_module("functional_fsdp.transforms")
    warnings.simplefilter("ignore")
    seconds = {"import": time.time() - STARTED}
    cpu = {"import": cpu_seconds()}
    last = [time.time(), cpu_seconds()]

    def mark(name: str) -> None:
        if cuda:
            torch.cuda.synchronize()
        now = [time.time(), cpu_seconds()]
        seconds[name], cpu[name] = now[0] - last[0], now[1] - last[1]
        last[:] = now
        calls.column = {"groups": "build", "build": "1"}.get(name) or str(int(name) + 1)

    calls = Calls()
    if args.worker == "here":
        from functional_fsdp import transforms

        transforms.start_compilers()
    cuda = torch.cuda.device_count() > 0
    kind = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("data",))
    dist.all_reduce(torch.ones(1, device=kind))
    mark("groups")
    from functional_fsdp import transforms as T  # of the other row, whose own clock begins after it

    begin = time.time()
    last[:] = begin, cpu_seconds()
    imported = set(sys.modules)
    dtype = torch.bfloat16 if cuda else torch.float32
    if args.calls:
        calls.start()
    watch = T.startup(progress=False)
    report = watch.__enter__()
    step = (here if args.worker == "here" else fsdp2)(partial(without_cache, made), mesh, dtype, args)
    mark("build")
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    loss = None
    for number in range(STEPS):
        given = {name: part.to(kind) for name, part in batch(draw).items()}
        loss = step({name: part.to(dtype) if part.is_floating_point() else part for name, part in given.items()})
        mark(str(number + 1))
    end = time.time()
    watch.__exit__(None, None, None)
    calls.over.set()
    seconds["whole"] = sum(seconds.values())
    seconds["sixth"] = end - begin
    cpu["whole"] = sum(cpu.values())
    cpu["sixth"] = cpu["whole"] - cpu["import"] - cpu["groups"]
    assert loss is not None
    if dist.get_rank() == 0:
        found = {"seconds": seconds, "parts": report.seconds, "cpu": cpu, "events": events(imported)}
        found |= {"loss": loss.item(), "late": late(imported), "calls": calls.table(args.calls)}
        print("RESULT " + json.dumps(found), flush=True)
    del step  # NCCL waits for graphs that hold its collectives when groups are destroyed
    gc.collect()
    dist.destroy_process_group()


IMPORTED = (
    "transformers.models.llama.modeling_llama", "functional_fsdp.transforms", "torch.distributed.fsdp",
    "torch.distributed.run", "torch._dynamo.backends.common", "torch._inductor.compile_fx",
)  # fmt: skip


def bytecode(folder: Path) -> None:
    """Have what both rows import compiled there."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    subprocess.run([sys.executable, "-c", f"import {', '.join(IMPORTED)}"], check=True, capture_output=True)


def ran(row: str, args: Namespace, caches: Path) -> dict[str, Any]:
    """A row in processes of its own, with these caches."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
        "TMPDIR": str(caches),  # where compiled headers go
        "OMP_NUM_THREADS": "1" if not torch.cuda.device_count() else os.environ.get("OMP_NUM_THREADS", "8"),
    }  # fmt: skip
    given = ["--worker", row, "--size", args.size, "--layers", str(args.layers), "--calls", str(args.calls)]
    given += ["--family", args.family]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    done = subprocess.run([*command, __file__, *given], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{row}: no result\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def compared(args: Namespace) -> dict[str, list[dict[str, Any]]]:
    """Rows of one model, in alternating order; printed."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        rows = args.only.split(",")
        for row in rows if number % 2 == 0 else rows[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                for kind in ("cold", "warm"):
                    result = ran(row, args, Path(folder))
                    found.setdefault((row, kind), []).append(result)
                    said = "  ".join(f"{name} {value:.2f}" for name, value in result["seconds"].items())
                    print(f"{row:6} {kind}  {said}  loss {result['loss']:.4f}", flush=True)
                    for which in ("parts", "cpu"):
                        said = "  ".join(f"{name} {value:.2f}" for name, value in result[which].items())
                        print(f"       {which:6} {said}", flush=True)
                    print(f"       events {result['events']}\n       late   {result['late']}", flush=True)
                    for column, functions in result["calls"].items():
                        said = "".join(f"\n         {took:6.2f}  {name}" for name, took in functions.items())
                        print(f"       in {column}{said}", flush=True)
    columns = [*next(iter(found.values()))[0]["seconds"]]
    print(f"\n| row | caches | {' | '.join(columns)} |\n|---|---|{'---:|' * len(columns)}")
    middle = {
        key: {name: statistics.median(one["seconds"][name] for one in many) for name in columns}
        for key, many in found.items()
    }
    for (row, kind), values in middle.items():
        print(f"| {row} | {kind} | {' | '.join(f'{values[name]:.2f}' for name in columns)} |")
    for kind in ("cold", "warm"):
        if all((row, kind) in middle for row in ROWS):
            ratios = [middle["here", kind][name] / middle["FSDP2", kind][name] for name in ("sixth", "whole")]
            print(f"{kind}: here / FSDP2: to the sixth step {ratios[0]:.2f}, from the process's start {ratios[1]:.2f}")
    return {" ".join(key): value for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers")
    parser.add_argument("--families", help="models of `benchmark_families.py` instead, by comma")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--calls", type=int, default=0, help="so many functions of each column, by seconds within")
    parser.add_argument("--json", help="where the seconds go, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--family", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    compiled = tempfile.TemporaryDirectory()
    bytecode(Path(compiled.name))
    for row in args.only.split(",") if torch.cuda.device_count() else ():
        with tempfile.TemporaryDirectory() as folder:
            ran(row, Namespace(**vars(args) | {"size": "1b", "layers": 2, "calls": 0}), Path(folder))
    found: dict[str, Any] = {}
    for family in args.families.split(",") if args.families else [""]:
        args.family, name = family, family or args.size
        print(f"\n{name}")
        found[name] = compared(args)
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
