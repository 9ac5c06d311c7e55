"""This project and its peers side by side: the same model, weights, data, dtypes, units and optimizer.

    python examples/benchmark.py                              # CPU (gloo): a tiny GPT on 2 ranks, under a minute
    python examples/benchmark.py --model 1.2b --ranks 8       # GPUs (NCCL), bfloat16
    python examples/benchmark.py --model 1.2b --only all --apart --chart speed.png --json speed.json
    python examples/benchmark.py --model llama3-8b --apart rows --yardsticks none --only "FSDP2 compiled,graph compiled"
    torchrun --nproc-per-node 8 examples/benchmark.py --model 6.7b

| row             | what it is                                                                                       |
|-----------------|--------------------------------------------------------------------------------------------------|
| whole tree      | unshard, torch.func.grad_and_value, reduce, step                                                 |
| whole tree vjp  | the same with T.vjp, which is autograd underneath and frees residuals as it goes                 |
| unit by unit    | the loop of by_hand.py: a unit is gathered, used, released, gathered again, reduced              |
| driven          | the same by `T.forward_backward(model, loss_fn)`, which takes any module                         |
| float32 wire    | unit by unit, with gradients that travel and are added up in float32                             |
| exact sum       | unit by unit, with a bfloat16 wire that is added up in float32 in rank order                     |
| kept            | unit by unit, every unit gathered once: `Schedule(keep="all")`; see FSDP2 kept                   |
| budget          | unit by unit, with `--budget` of units gathered once: `Schedule(keep=bytes)`                     |
| compiled        | unit by unit, with layers compiled by `T.compile_units`; also "driven compiled", "kept compiled" |
| copy engine     | unit by unit, by reading other ranks' memory: `Spec(transport="copy_engine")`; also "copy engine |
|                 | compiled"                                                                                        |
| graph           | unit by unit, the whole step as a CUDA graph: `T.cuda_graph`; also "graph compiled", "... cast   |
|                 | once": shards are kept in the compute dtype, too, `Precision(gather=)`, and after the names of   |
|                 | transports: "copy engine graph compiled", also "... kept", "... cast once", and "... offloaded": |
|                 | driven, activations of the first eighth of layers wait in the host's memory: `T.offload`         |
| symmetric       | unit by unit, NCCL's symmetric memory: `Spec(transport="symmetric")`; "zero-CTA" too             |
| traced          | unit by unit, the whole step compiled: `T.compile`; also                                         |
|                 | "traced graph", "driven traced" and "driven traced graph"                                        |
| hsdp            | unit by unit on a mesh replica × shard (`--replicas`): sharded within each replica; also         |
|                 | "copy engine graph compiled hsdp"                                                                |
| hfsdp           | the same, main weights and optimizer state sharded over replicas, too; also "copy engine graph   |
|                 | compiled hfsdp". Both with symmetric memory, too: "symmetric hsdp", "symmetric graph compiled    |
|                 | hsdp"                                                                                            |
| FSDP2           | `fully_shard` of embedding, layers and head; the head stays gathered, as in torchtitan           |
| FSDP2 tuned     | its own options: two units prefetched explicitly, forward and backward; reductions in a process  |
|                 | group of their own; where torch has it, two of their inputs in flight                            |
| FSDP2 kept      | `reshard_after_forward=False` everywhere                                                         |
| FSDP2 float32   | `MixedPrecisionPolicy(reduce_dtype=torch.float32)`                                               |
| FSDP2 hsdp      | on the same mesh as "hsdp": `fully_shard(mesh=)` of two dims; also "FSDP2 compiled hsdp"         |
| FSDP2 compiled  | with `layer.compile()`; also "FSDP2 tuned compiled"                                              |
| float8          | layers whose linears multiply in float8, by torchao, gathered in the compute dtype; also "copy   |
|                 | engine graph compiled float8" and, with its gathers in float8, "FSDP2 float8 compiled"           |
| float8 gathered | the same, and these linears' weights are gathered in float8: `Precision(gather=)`; also "copy    |
|                 | engine graph compiled float8 gathered"                                                           |
| SimpleFSDP      | parameters as DTensors behind properties, the whole model one graph, collectives joined and      |
|                 | moved by torch's manual overlap pass: `_benchmark_simple_fsdp.py`                                |
| DDP             | `DistributedDataParallel`; with bfloat16, of a bfloat16 copy, and float32 main weights beside it |
| DDP compiled    | with `layer.compile()`                                                                           |
| ... chunked     | head and loss in 8 chunks of tokens, so that no table of all logits is made: "driven chunked     |
| loss            | loss", "driven traced chunked loss", "graph compiled chunked loss", "copy engine graph compiled  |
|                 | chunked loss"; FSDP2 with the same code: "FSDP2 chunked loss", "FSDP2 compiled chunked loss"     |
| FSDP2 compiled  | layers with torch's selective checkpoints, by torchtitan's policy: attention and every other     |
| selective       | matrix product are saved                                                                         |
| Megatron-FSDP   | `megatron_fsdp.fully_shard_model` where that package is installed, and GPUs; also with layers'   |
|                 | `forward` compiled, "Megatron-FSDP compiled"                                                     |
| resident        | what no sharding can beat: whole weights stay in place, nothing is sent, and each rank updates   |
|                 | its share of main weights; the weights that compute sees never change. "resident compiled" and   |
|                 | "resident graph compiled" too                                                                    |

`--only` names rows, or `all`; by default there are a few, by device. Rows that cannot run (unit by unit, of a model
that is no chain of stages) are left out, and a note says why; "float32 wire", "exact sum", "kept" and "budget" are
driven there. Models are in `_benchmark_models.py`, rows in `_benchmark_rows.py`, the peers' in `_benchmark_peers.py`.

The contestants take turns in rounds, in rotating order, so that drift of the machine meets all of them. Before a turn
ranks meet and devices are synchronized; a turn is `--steps` steps without a pause. Weights and data are random, never
zeros, on which a GPU computes faster. Weights begin as numbers of the compute dtype, since Megatron-FSDP's can begin as
nothing else.

This project's rows have `Schedule(overlap_update=True)`: nothing here reads weights between `reduce` and `step`.

`--apart` runs groups of rows in processes of their own, one after another (`--apart rows`: each row), since some
libraries exclude each other in one process, and not all rows of a large model fit beside each other. Each set of
processes has the yardsticks beside its rows (`--yardsticks`), and all ratios are within one set. The table then has the
yardsticks once, and notes have their times in the other sets.

| column       | what it is                                                                                           |
|--------------|------------------------------------------------------------------------------------------------------|
| step         | a turn's time by its steps, on the slowest rank; the median over rounds                              |
| spread       | the fastest and the slowest round                                                                    |
| host         | until the host returned from one step that began with an idle device (GPU only)                      |
| peak         | most bytes of tensors alive in a step, the state included, that of the other contestants not; of any |
|              | rank; counted by the caching allocator on GPU, by torch's memory profiler on CPU; of a graph as it   |
|              | was captured; with symmetric memory, of which the allocator does not know                            |
| reserved     | what the caching allocator held for it at most in a step that began with empty caches (GPU only);    |
|              | others' memory subtracted, but a step may use gaps in it: exact for a row that is alone (`--apart    |
|              | rows --yardsticks none`)                                                                             |
| device       | likewise, what the driver has less for it: NCCL and symmetric memory included, which the caching     |
|              | allocator does not see; what the first one of a process loads is on its account (GPU only)           |
| loss         | mean over ranks at the last step; the rows must agree to 3 digits, those in float8 to 2              |
| FSDP2 / this | FSDP2's time by this row's in the same round, the median over rounds; above 1: faster than FSDP2     |
| best / this  | the same with the fastest peer there, if it is not FSDP2; a note names it                            |
| this / bound | this row's time by that of "resident graph compiled", or the next there is; 1 is what no sharding    |
|              | can beat                                                                                             |
| this / hand  | this row's time by that of "unit by unit" in the same round, the median over rounds; what driving    |
|              | costs is "driven" here: at most 1.05 is what it should be                                            |

| tokens/s     | of each rank; this and the next four with `--efficiency`, and for llama3-8b                          |
| TFLOP/s      | of each rank: 6 operations for each parameter and token, and 6 × layers × width × sequence of causal |
|              | attention; "% of peak" is its share of the GPU's peak in this dtype (`fsdp.Hardware`)                |
| J / token    | what the GPU used in the turns, by NVML (pynvml), the mean over ranks                                |
| sixth step s | from the building of the model to the end of the sixth step; of rows that share a process only the   |
|              | first finds no compiled code of others                                                               |

Columns in which nothing was measured are left out. `--kernels` adds a line for each row: which kernels and copies moved
data between GPUs in one step of rank 0, how many, and their milliseconds in all, waits for other ranks included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _benchmark_meter import Meter
from _benchmark_models import MODELS, Config, batches, named
from _benchmark_report import Row, Table, agree, chart, merged
from _benchmark_rows import BOUNDS, BY_HAND, CONTESTANTS, PEER, default, missing
from _benchmark_setting import WARMUP, Setting

import functional_fsdp as fsdp

# ---------------------------------------------------------------- measuring


class Runner:
    """A contestant, its data and what was measured of it."""

    def __init__(self, name: str, config: Config, setting: Setting, data: list[torch.Tensor], meter: Meter) -> None:
        self.name, self.data, self.meter = name, iter(data), meter
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []  # a step, by rounds
        self.host: list[float] = []
        self.joules: list[float] = []
        self.sixth: list[float] = []  # seconds until the sixth step was over, and the first six of them
        start = time.perf_counter()

        def build() -> None:
            torch.manual_seed(0)
            with meter.device:
                model = config.build()
            if setting.rounded:
                with torch.no_grad():
                    for p in model.parameters():
                        p.copy_(p.to(setting.dtype))
            self.step = CONTESTANTS[name].build(model, setting)
            del model
            self.run(1)  # after the first step optimizers have their state

        self.resident, _ = meter.memory(build)
        self.spent = time.perf_counter() - start

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self.step(next(self.data)))

    def warm_up(self, steps: int) -> None:
        """Steps after the first one. The sixth of all is noted, if it is among them."""
        for _ in range(steps):
            self.spent += self.meter.time(lambda: self.run(1))[0]
            if len(self.losses) == 6:
                self.sixth = [self.spent]

    def turn(self, steps: int) -> None:
        before = self.meter.joules()
        self.seconds.append(self.meter.time(lambda: self.run(steps))[0] / steps)
        after = self.meter.joules()
        if before is not None and after is not None:
            self.joules.append((after - before) / steps)
        if self.meter.cuda:
            self.host.append(self.meter.time(lambda: self.run(1))[1])

    def efficiency(self, config: Config, dtype: torch.dtype) -> dict[str, float]:
        """Figures by tokens, of a rank."""
        tokens = config.batch * config.seq
        rate = tokens / median(self.meter.slowest(self.seconds))
        found = {"tokens_s": rate, "tflops": rate * config.flops() / 1e12}
        if self.meter.cuda:
            found["share"] = 1e12 * found["tflops"] / fsdp.Hardware.here().peak(dtype)
        if self.sixth:
            (found["sixth_s"],) = self.meter.slowest(self.sixth)
        if self.joules:
            total = torch.tensor(median(self.joules) / tokens, dtype=torch.float64, device=self.meter.device)
            dist.all_reduce(total)
            found["joules"] = total.item() / dist.get_world_size()
        return found

    def row(self) -> Row:
        """All of it but the ratios."""
        once = partial(self.run, 1)
        _, most = self.meter.memory(once, lead_in=once)
        held: list[float] = [a + b for a, b in zip(self.resident, most, strict=True)]
        for graph in getattr(self.step, "graphs", {}).values():  # a replay's memory is set aside when it is captured
            held[0] = max(held[0], self.resident.tensors + graph.peak)
            held[1:] = [size + graph.reserved for size in held[1:]]
        shared = getattr(self.step, "shared", 0) if self.meter.cuda else 0  # symmetric: the allocator does not know it
        held[:2] = [size + shared for size in held[:2]]
        sizes = map(int, self.meter.slowest(held))
        peak, reserved, device = sizes
        seconds, host = self.meter.slowest(self.seconds), self.meter.slowest(self.host)
        loss = self.losses[-1].double() / dist.get_world_size()
        dist.all_reduce(loss)
        return Row(
            self.name,
            step_ms=1e3 * median(seconds),
            fastest_ms=1e3 * min(seconds),
            slowest_ms=1e3 * max(seconds),
            host_ms=1e3 * median(host) if host else None,
            peak_bytes=peak,
            reserved_bytes=reserved if self.meter.cuda else None,
            device_bytes=device if self.meter.cuda else None,
            loss=loss.item(),
        )


def compared(rows: dict[str, Row], rounds: dict[str, list[float]]) -> list[Row]:
    """The rows with their ratios, from the seconds of each round, and what they were compared with."""
    peers = sorted((row.step_ms, name) for name, row in rows.items() if CONTESTANTS[name].whose == "peer")
    best = peers[0][1] if peers and peers[0][1] != PEER else None
    bound = next((name for name in BOUNDS if name in rows), None)

    def by_round(over: str | None, under: str | None) -> float | None:
        if over not in rounds or under not in rounds:
            return None
        return median(a / b for a, b in zip(rounds[over], rounds[under], strict=True))

    return [
        replace(
            row,
            ratio=by_round(PEER, name),
            best_ratio=by_round(best, name),
            best_peer=best,
            to_bound=by_round(name, bound),
            bound=bound,
            by_hand=by_round(name, BY_HAND),
        )
        for name, row in rows.items()
    ]


def measure(args: Namespace) -> Table:
    """Run on every rank; the table is the same on all of them."""
    whole = args.placement in ("hsdp", "hfsdp")  # every row
    hybrid = whole or any(CONTESTANTS[name].hybrid for name in args.only)
    both = fsdp.local_mesh(args.device, replica=args.replicas, shard=-1) if hybrid else None
    mesh = both if both and whole else fsdp.local_mesh(args.device, data=-1)
    cuda = mesh.device_type == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    meter = Meter(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    base = named(args.model, cuda)
    sized = base.sized(args.layers, args.hidden, args.vocab)
    config = replace(sized, batch=args.batch or base.batch, seq=args.seq or base.seq)
    dtype = getattr(torch, args.dtype or ("bfloat16" if cuda else "float32"))
    setting = Setting(mesh, both, config, args.placement, dtype, budget=int(2**20 * (args.budget or 0)))
    setting = replace(setting, rounded=args.start == "rounded")
    warmup = max(args.warmup, WARMUP + 1 if any("graph" in name for name in args.only) else 1)
    data = batches(config, warmup + args.rounds * (args.steps + cuda) + 3, meter.device)

    runners = [Runner(name, config, setting, data, meter) for name in args.only]
    for runner in runners:
        runner.warm_up(warmup - 1)
    for r in range(args.rounds):
        first = r % len(runners)
        for runner in runners[first:] + runners[:first]:
            runner.turn(args.steps)
    rounds = {runner.name: meter.slowest(runner.seconds) for runner in runners}
    found = {runner.name: runner.row() for runner in runners}
    if args.efficiency:
        more: dict[str, Any] = {each.name: each.efficiency(config, dtype) for each in runners}
        found = {name: replace(row, **more[name]) for name, row in found.items()}
    rows = compared(found, rounds)
    if args.kernels and cuda:
        seen = {runner.name: meter.kernels(partial(runner.run, 1)) for runner in runners}
        rows = [replace(row, between=sent(seen[row.name])) for row in rows]
    return Table.of(rows, args, config, dtype)


def sent(kernels: dict[str, tuple[int, float]]) -> str:
    return "; ".join(f"{count} {name} {ms:.1f} ms" for name, (count, ms) in kernels.items()) or "nothing"


# ---------------------------------------------------------------- the command


def arguments(given: list[str] | None = None) -> Namespace:
    """Of the command, or of these words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="tiny", metavar="NAME", help=f"{', '.join(MODELS)}, or hf:Qwen3 and the like")
    add("--ranks", type=int, help="default: one for each GPU, or 2 on the CPU; torchrun decides for itself")
    add("--device", choices=("cpu", "cuda"), help="default: CUDA where there is any")
    add("--batch", type=int, help="sequences a rank; default by model")
    add("--seq", type=int, help="tokens a sequence; default by model")
    add("--layers", type=int, help="of the model; default by model")
    add("--hidden", type=int, help="the model's width, by which heads and MLPs go; default by model")
    add("--vocab", type=int, help="words; default by model")
    add("--efficiency", action="store_true", help="columns by tokens; the default of llama3-8b")
    add("--steps", type=int, default=3, help="steps of a turn")
    add("--rounds", type=int, default=6, help="turns of each contestant")
    add("--warmup", type=int, default=3, help="steps before the clock runs, at least 1")
    add("--dtype", choices=("float32", "bfloat16"), help="compute and wire; default float32 on CPU, bfloat16 on GPU")
    add(
        "--placement",
        choices=("zero3", "zero2", "zero1", "ddp", "hsdp", "hfsdp"),
        default="zero3",
        help="of this project's rows; FSDP2 follows for zero3 and hsdp, keeps weights gathered after forward for zero1 "
        "and zero2, and has no match for ddp (zero3 then) and hfsdp (hsdp then)",
    )
    add(
        "--replicas", type=int, default=2, help="of the rows that shard within replicas, and of --placement hsdp, hfsdp"
    )
    add(
        "--start",
        choices=("float32", "rounded"),
        help="weights before the first step: as the model makes them, or rounded to --dtype; default: rounded where a "
        "Megatron-FSDP row is chosen, whose float32 weights are made of rounded ones",
    )
    add("--only", type=names, help=f"all, or a choice of {','.join(CONTESTANTS)}")
    add("--budget", type=float, metavar="MIB", help='of "budget"; default: half of the gathered weights')
    add("--apart", nargs="?", const="groups", choices=("groups", "rows"), help="in sets of processes of their own")
    add(
        "--yardsticks",
        type=names,
        help="with --apart, rows that each set has beside its own, or none; default FSDP2, and the bound if named",
    )
    add("--kernels", action="store_true", help="name what moved data between GPUs in one step, of each row")
    add("--json", type=Path, help="write everything to this file")
    add("--chart", type=Path, metavar="PNG", help="draw the step times (matplotlib)")
    args = parser.parse_args(given)
    chosen(args, parser)
    return args


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def chosen(args: Namespace, parser: argparse.ArgumentParser) -> None:
    """Settle `args.only`, `args.yardsticks` and `args.notes`, which says what is left out and why."""
    cuda = (args.device or ("cuda" if torch.cuda.device_count() else "cpu")) == "cuda"
    wanted = [*CONTESTANTS] if args.only == ["all"] else args.only or []
    rows = wanted or default(args.model, cuda, bool(args.apart))
    asked = [name for name in args.yardsticks or [] if name != "none"]
    for option, given in (("--only", rows), ("--yardsticks", asked)):
        for name in given:
            if name not in CONTESTANTS:
                parser.error(f"{option}: {name!r} is none of {','.join(CONTESTANTS)}")
    try:
        config = named(args.model, cuda)
    except ValueError as error:
        parser.error(f"--model: {error}")
    ranks = args.ranks or int(os.environ.get("WORLD_SIZE", 0)) or (torch.cuda.device_count() if cuda else 2)
    if args.replicas < 1 or (args.placement in ("hsdp", "hfsdp") and ranks % args.replicas):
        parser.error(f"--replicas {args.replicas}: expected a divisor of the {ranks} ranks")
    about = (args.model, config, cuda, args.placement, ranks, args.replicas)
    why = {name: missing(name, *about) for name in CONTESTANTS}
    bound = [name for name in BOUNDS if name in rows and not why[name]][:1]
    beside = asked if args.yardsticks else [PEER, *bound]
    args.only = [name for name in rows if not why[name]]
    args.yardsticks = [name for name in beside if not why[name]]
    args.notes = [f"{name} is left out: {why[name]}." for name in dict.fromkeys([*wanted, *beside]) if why[name]]
    megatron = any(name.startswith("Megatron") for name in (*args.only, *args.yardsticks))
    args.start = args.start or ("rounded" if megatron else "float32")
    args.failed = False
    args.efficiency = args.efficiency or args.model == "llama3-8b"
    if args.efficiency:
        args.warmup = max(args.warmup, 6)
    if not args.only:
        parser.error("--only: no row is left. " + " ".join(args.notes))
    if args.apart and "RANK" in os.environ:
        parser.error("--apart starts processes itself: run it with python, and --ranks, not with torchrun")


def run_apart(args: Namespace) -> list[Table]:
    """The tables of all sets of processes, one set after another. A set that fails leaves a note, and others go on."""
    sets: dict[str, list[str]] = {}
    for name in args.only:
        if name not in args.yardsticks:
            sets.setdefault(name if args.apart == "rows" else CONTESTANTS[name].group, []).append(name)
    tables = []
    alike = (
        "model",
        "layers",
        "hidden",
        "vocab",
        "ranks",
        "device",
        "batch",
        "seq",
        "steps",
        "rounds",
        "warmup",
        "dtype",
        "placement",
        "replicas",
    )
    given = {name: getattr(args, name) for name in (*alike, "start", "budget")}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags += ["--kernels"] * args.kernels + ["--efficiency"] * args.efficiency
    for number, (group, rows) in enumerate((sets or {"yardsticks": []}).items(), 1):
        together = ",".join([*rows, *args.yardsticks])
        print(f"processes {number} of {max(1, len(sets))} ({group}): {together}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "table.json"
            line = [sys.executable, __file__, *flags, "--only", together, "--json", str(file)]
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if file.exists():
                tables.append(Table.read(file))
            if done.returncode:
                said = (done.stdout.strip().splitlines() or ["nothing"])[-1]
                print(f"{done.stdout}\nprocesses {number} ended with {done.returncode}", flush=True)
                args.notes.append(f"{together} did not run through: {said[:300]}")
                args.failed = True
    return tables


def main() -> None:
    args = arguments()
    if args.apart:
        tables = run_apart(args)
        if not tables:
            sys.exit("no set of processes ran through")
        table = merged(tables, args.only)
    elif "RANK" in os.environ:  # torchrun started the ranks
        table = measure(args)
        speaks = dist.get_rank() == 0
        dist.destroy_process_group()
        if not speaks:
            return
    else:
        table = fsdp.launch(measure, (args,), nprocs=args.ranks)[0]
    table = replace(table, notes=[*args.notes, *table.notes])
    print(table)
    if args.json:
        table.write(args.json)
    if args.chart:
        chart(table, args.chart)
    agree(table.rows)
    sys.exit(args.failed)


if __name__ == "__main__":
    main()
