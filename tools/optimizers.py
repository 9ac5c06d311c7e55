"""Published optimizers beside themselves: each class by `fsdp.from_torch` and on whole parameters. Outside CI.

    pip install --target /tmp/optimizers --no-deps \\
        pytorch_optimizer==4.1.0 torch_optimizer==0.3.0 timm==1.0.31 schedulefree==1.4.1 prodigyopt==1.1.2 \\
        dadaptation==3.2 lion-pytorch==0.2.5 heavyball==3.2.1 torch-optimi==0.3.3 pytorch-ranger==0.1.1 \\
        torchao==0.18.0 bitsandbytes==0.50.2
    PYTHONPATH=/tmp/optimizers python tools/optimizers.py --ranks 1,2,4 --options --schedules --world --out sweep.json
    python tools/optimizers.py --table sweep.json         # the table of docs/guide/optimizer-classes.md

A class is *equal* if in every case its weights are those of the class to 1e-9 of the distance moved, or the dtype's
rounding of it where it computes in a smaller one; *in part*, if some cases are equal and others refused; *refused*,
with the reason; *different*, which no class may be;
*fails by itself*, where the class cannot be made or run on whole parameters; or *too slow*. A case is a number of
simulated ranks, a placement, options, and a schedule. Gradients have very different scales; one leaf gets none in the
first steps; one step is skipped; the state goes through a checkpoint in the middle, into another placement and,
with --world, on another number of ranks. A class that is refused because it couples leaves is tried with by="all".
Each class has a process and a time limit of its own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import functional_fsdp as fsdp

PACKAGES = {
    "torch.optim": "torch", "timm.optim": "timm", "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch_optimizer", "schedulefree": "schedulefree", "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation", "lion_pytorch": "lion-pytorch", "heavyball": "heavyball", "optimi": "torch-optimi",
    "pytorch_ranger": "pytorch-ranger", "torchao.optim": "torchao", "bitsandbytes.optim": "bitsandbytes",
}  # fmt: skip
SHAPES = {"m": (16, 24), "odd": (5, 7), "conv": (8, 4, 3, 3), "v": (7,), "late": (9, 3), "big": (64, 72),
          "long": (5000,)}  # fmt: skip
PLACEMENTS: dict[int, tuple[Callable[..., Any], ...]] = {
    1: (fsdp.ddp, fsdp.zero1), 2: (fsdp.zero3, fsdp.zero1), 4: (fsdp.ddp, fsdp.zero3)
}  # fmt: skip
VERDICTS = ("equal", "in part", "refused", "different", "fails by itself", "too slow")
CLASS_LIMIT = 200  # seconds for one class: Shampoo's kind takes roots of large matrices


class Case(NamedTuple):
    """What a class is tried with. scheduled: the rate falls by a half in steps 10, 20 and so on."""

    ranks: int
    options: dict[str, Any]
    scheduled: bool

    def __str__(self) -> str:
        given = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.ranks} ranks, ({given}){', a schedule' if self.scheduled else ''}"


def tree(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scales = (1.0, 1e-3, 30.0)
    return {
        name: (torch.randn(shape, generator=g, dtype=torch.float64) * (scales[(seed + i) % 3] if seed else 0.1)).to(
            dtype
        )
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: g for name, g in tree(1 + step, dtype).items() if name != "late" or step >= 5}


def rate(first: float) -> Callable[[Any], Any]:
    def lr(count: Any) -> Any:
        return first * 0.5 ** int(count // 10)  # a Python number: float64

    return lr


def plain(cls: Any, options: dict[str, Any], scheduled: bool, steps: int, dtype: torch.dtype) -> Any:
    """The weights by the class itself."""
    params = {name: torch.nn.Parameter(p) for name, p in tree(0, dtype).items()}
    optimizer = cls([*params.values()], **options)
    if callable(train := getattr(optimizer, "train", None)):
        train()  # of schedulefree
    first = optimizer.param_groups[0].get("lr")
    for step in range(steps):
        for name, p in params.items():
            p.grad = gradients(step, dtype).get(name)
        if scheduled:
            for group in optimizer.param_groups:
                group["lr"] = rate(first)(step)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def first_half(optimizer: Any, steps: int, dtype: torch.dtype, folder: str, which: int) -> dict[str, torch.Tensor]:
    mesh = fsdp.local_mesh()
    placement = PLACEMENTS[mesh.size()][which]("data")
    state = fsdp.shard(tree(0, dtype), fsdp.Spec(mesh, placement), optimizer)
    for step in range(steps // 2):
        state = fsdp.step(fsdp.reduce(state, {name: gradients(step, dtype).get(name) for name in SHAPES}))
    fsdp.save(state, folder)
    return fsdp.full_params(state)


def second_half(optimizer: Any, steps: int, dtype: torch.dtype, folder: str, which: int) -> dict[str, torch.Tensor]:
    mesh = fsdp.local_mesh()
    placement = PLACEMENTS[mesh.size()][which]("data")
    state = fsdp.load(folder, fsdp.Spec(mesh, placement), optimizer)
    bad = {name: torch.full_like(p, torch.nan) for name, p in tree(0, dtype).items()}
    state = fsdp.step(fsdp.reduce(state, bad), skip=torch.tensor(True))
    for step in range(steps // 2, steps):
        state = fsdp.step(fsdp.reduce(state, {name: gradients(step, dtype).get(name) for name in SHAPES}))
    return fsdp.full_params(state)


def by_any(cls: Any, options: dict[str, Any]) -> Any:
    try:
        return fsdp.from_torch(cls, **options)
    except (fsdp.SpecError, fsdp.TreeError) as refusal:
        if "by='all'" not in str(refusal):
            raise
        return fsdp.from_torch(cls, by="all", **options)


def sharded(cls: Any, case: Case, others: int, options: dict[str, Any], steps: int, dtype: torch.dtype) -> Any:
    """(weights of rank 0, the optimizer); the second half on so many other ranks."""
    with tempfile.TemporaryDirectory() as folder:

        def halves(optimizer: Any, path: str) -> Any:
            run(first_half, (optimizer, steps, dtype, path, 0), case.ranks)
            return run(second_half, (optimizer, steps, dtype, path, 1), others)

        optimizer = by_any(cls, options)
        try:
            return halves(optimizer, folder + "/a"), optimizer
        except (fsdp.SpecError, fsdp.TreeError) as refusal:
            if "by='all'" not in str(refusal):
                raise
            optimizer = fsdp.from_torch(cls, by="all", **options)
            return halves(optimizer, folder + "/b"), optimizer


def run(fn: Callable[..., Any], args: tuple[Any, ...], ranks: int) -> Any:
    try:
        return fsdp.launch(fn, args, nprocs=ranks, simulate=True)[0]
    except fsdp.LaunchError as error:
        raise error.__cause__ or error from None


def one(cls: Any, case: Case, others: int, steps: int) -> tuple[str, str, str]:
    """(verdict, way or reason, dtype)."""
    wanted, dtype, error = None, torch.float64, None
    for dtype in (torch.float64, torch.float32):
        try:
            torch.manual_seed(0)
            wanted = plain(cls, case.options, case.scheduled, steps, dtype)
            break
        except Exception as e:
            error = e
    if wanted is None:
        return "fails by itself", f"{type(error).__name__}: {error}", ""
    options = dict(case.options)
    if case.scheduled:
        options["lr"] = rate(first_rate(cls, case.options))
    try:
        found, optimizer = sharded(cls, case, others, options, steps, dtype)
    except (fsdp.SpecError, fsdp.TreeError) as refusal:
        return "refused", str(refusal), ""
    except Exception as e:
        return "different", f"it raised {type(e).__name__}: {e}", ""
    start = tree(0, dtype)
    far = max(float((wanted[k] - start[k]).abs().max()) for k in start)
    off = max(float((wanted[k] - found[k]).abs().max()) for k in start)
    low = any(word in cls.__name__.lower() for word in ("8bit", "4bit", "fp8"))
    most = 1e-9 if dtype is torch.float64 and not low else 1e-5
    kind = str(dtype).removeprefix("torch.")
    if off <= most * far or all(torch.equal(wanted[k].nan_to_num(), found[k].nan_to_num()) for k in start):
        return "equal", str(optimizer), kind
    return "different", f"{off:.3g} of {far:.3g} moved; {optimizer}", kind


def first_rate(cls: Any, options: dict[str, Any]) -> float:
    made = cls([torch.nn.Parameter(torch.zeros(4, 4))], **options)
    return float(made.param_groups[0]["lr"])


class Anything(types.ModuleType):
    """In the place of a module of which nothing is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load(module: str) -> Any:
    """A module; of timm without its models, which need torchvision."""
    if module == "timm.optim" and module not in sys.modules:
        spec = importlib.util.find_spec("timm")
        timm = types.ModuleType("timm")
        timm.__spec__ = spec  # which others ask for
        timm.__path__ = [*(spec.submodule_search_locations or ())] if spec else []
        sys.modules["timm"], sys.modules["timm.models"] = timm, Anything("timm.models")
    if module == "heavyball":
        importlib.import_module("heavyball.utils").compile_mode = None  # type: ignore[attr-defined]
    return importlib.import_module(module)


def classes() -> list[tuple[str, str]]:
    found = []
    for module in PACKAGES:
        try:
            loaded = load(module)
        except Exception as error:
            print(f"{module} is left out: {type(error).__name__}: {error}", flush=True)
            continue
        seen = set()
        for name, cls in sorted(vars(loaded).items()):
            if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or cls in seen:
                continue
            if cls is not torch.optim.Optimizer and cls.__module__.split(".")[0] == module.split(".")[0]:
                seen.add(cls)
                found.append((module, name))
    return found


def cases(cls: Any, args: Any) -> Iterator[Case]:
    """The default options on each number of ranks; then others and a schedule, on the second number."""
    known = inspect.signature(cls).parameters
    needs = {"lr": 0.01} if "lr" in known and known["lr"].default is inspect.Parameter.empty else {}
    ranks = [int(n) for n in args.ranks.split(",")]
    for n in ranks:
        yield Case(n, needs, False)
    middle = ranks[len(ranks) // 2]
    if args.options and "weight_decay" in known:
        yield Case(middle, needs | {"weight_decay": 0.1}, False)
    if args.schedules and "lr" in known:
        yield Case(middle, needs, True)


def tried(module: str, name: str, args: Any) -> Iterator[dict[str, Any]]:
    """What was found, after each case."""
    SHAPES["long"] = (args.long,)
    warnings.simplefilter("ignore")
    cls = getattr(load(module), name)
    row: dict[str, Any] = {"module": module, "name": name, "version": version(PACKAGES[module]), "cases": []}
    for case in cases(cls, args):
        others = {1: 2, 2: 4, 4: 1}.get(case.ranks, 1) if args.world else case.ranks
        begun = time.monotonic()
        verdict, why, dtype = one(cls, case, others, args.steps)
        row["cases"].append(
            {"case": str(case), "verdict": verdict, "why": " ".join(why.split()), "dtype": dtype,
             "seconds": round(time.monotonic() - begun, 2)}
        )  # fmt: skip
        found = [one["verdict"] for one in row["cases"]]
        first = next((v for v in ("different", "equal", "refused") if v in found), found[0])
        row["verdict"] = "in part" if first == "equal" and "refused" in found else first
        row["why"] = next(one["why"] for one in row["cases"] if one["verdict"] == first)
        yield row
        if len(found) == 1 and verdict in ("refused", "fails by itself"):
            return  # with the default options


def in_process(module: str, name: str, argv: list[str], limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "row.json"), Path(folder, "log")
        command = [sys.executable, __file__, *argv, "--one", f"{module}:{name}", "--out", str(out)]
        row: dict[str, Any] = {"module": module, "name": name, "version": version(PACKAGES[module]), "cases": []}
        why = ""
        with log.open("w") as file:
            try:
                code = subprocess.run(command, stdout=file, stderr=file, timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                why = f"not ended in {limit:.0f} seconds"
            else:
                why = "" if code == 0 else f"its process ended with {code}: {log.read_text()[-300:]}"
        if out.exists():
            row = json.loads(out.read_text())
        if why:
            row["ended"] = why
            if not row["cases"]:
                row |= {"verdict": "too slow" if why.startswith("not ended") else "different", "why": why}
        return row


def table(rows: list[dict[str, Any]]) -> str:
    """One row a class: how it couples, and its way."""
    lines = ["| class | couples | way |", "|---|---|---|"]
    for row in rows:
        if row["verdict"] not in ("equal", "in part", "refused"):
            continue
        way, couples, why = "refused", row["why"].replace("|", "/"), row["why"]
        if row["verdict"] != "refused":
            way = "elementwise" if "elementwise, on" in why else "all" if "all leaves together" in why else "leaf"
            couples = "nothing" if way == "elementwise" else couples.partition("since ")[2].partition(" (")[0]
        else:
            couples = couples.partition(": ")[2]
        lines.append(f"| {row['module']}.{row['name']} {row['version']} | {couples[:90]} | {way} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="classes at a time")
    parser.add_argument("--ranks", default="2", help="numbers of simulated ranks: 1,2,4")
    parser.add_argument("--options", action="store_true", help="weight_decay=0.1 as well, where there is one")
    parser.add_argument("--schedules", action="store_true", help="a rate that falls as well")
    parser.add_argument("--world", action="store_true", help="another number of ranks from the middle on")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="classes whose module.name matches this regular expression")
    parser.add_argument("--long", type=int, default=5000, help="elements of the longest vector")
    parser.add_argument("--limit", type=float, default=CLASS_LIMIT, help="seconds for a class")
    parser.add_argument("--out", default="/tmp/sweep.json")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--table", default="", help="print the table of this file, and stop")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        print(table(json.loads(Path(args.table).read_text())["rows"]))
        return
    if args.one:
        module, _, name = args.one.partition(":")
        for row in tried(module, name, args):
            part = Path(args.out + ".part")
            part.write_text(json.dumps(row))
            part.replace(args.out)
        return
    chosen = [one for one in classes() if re.search(args.only, ".".join(one))]
    argv = ["--ranks", args.ranks, "--steps", str(args.steps), "--long", str(args.long)]
    argv += [f"--{name}" for name in ("options", "schedules", "world") if getattr(args, name)]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(in_process, module, name, argv, args.limit) for module, name in chosen]
        for job in as_completed(jobs):
            rows.append(job.result())
            row = rows[-1]
            print(f"{len(rows)}/{len(jobs)} {row['module']}.{row['name']}: {row['verdict']}: {row['why'][:160]}",
                  flush=True)  # fmt: skip
            rows.sort(key=lambda one: chosen.index((one["module"], one["name"])))
            counts = Counter(one["verdict"] for one in rows)
            summary = {"classes": len(chosen), **{verdict: counts[verdict] for verdict in VERDICTS},
                       "torch": torch.__version__, "steps": args.steps}  # fmt: skip
            Path(args.out).write_text(json.dumps({"summary": summary, "rows": rows}, indent=1))
    print(json.dumps(summary))
    if counts["different"]:
        raise SystemExit("some classes are silently different")


if __name__ == "__main__":
    main()
