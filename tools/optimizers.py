"""Published optimizers beside themselves: each class by `fsdp.from_torch` and on whole parameters. Outside CI.

    pip install --target /tmp/optimizers --no-deps \\
        pytorch_optimizer==4.1.0 torch_optimizer==0.3.0 timm==1.0.31 schedulefree==1.4.1 prodigyopt==1.1.2 \\
        dadaptation==3.2 lion-pytorch==0.2.5 heavyball==3.2.1 torch-optimi==0.3.3 pytorch-ranger==0.1.1 \\
        torchao==0.18.0 bitsandbytes==0.50.2
    PYTHONPATH=/tmp/optimizers python tools/optimizers.py --ranks 2 --out /tmp/sweep.tsv
    python tools/optimizers.py --table /tmp/sweep.tsv     # the table of docs/guide/optimizers.md

A class is *equal* if its weights are those of the class to 1e-9 of the distance moved, or the dtype's rounding of it
where it computes in a smaller one; *refused*, with the reason; or *different*, which no class may be. Gradients have
very different scales; one leaf gets none in the first steps; one step is skipped; the state goes through a checkpoint
and another placement in the middle. A class that is refused because it couples leaves is tried with by="all".
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import signal
import sys
import tempfile
import types
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import functional_fsdp as fsdp

PACKAGES = {
    "torch.optim": "torch", "timm.optim": "timm", "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch_optimizer", "schedulefree": "schedulefree", "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation", "lion_pytorch": "lion-pytorch", "heavyball": "heavyball", "optimi": "torch-optimi",
    "pytorch_ranger": "pytorch-ranger", "torchao.optim": "torchao", "bitsandbytes.optim": "bitsandbytes",
}  # fmt: skip
SHAPES = {
    "m": (16, 24),
    "odd": (5, 7),
    "conv": (8, 4, 3, 3),
    "v": (7,),
    "late": (9, 3),
    "big": (64, 72),
    "long": (5000,),
}
LIMIT = 120  # seconds for one class: Shampoo's kind takes roots of large matrices
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"weight_decay": 0.1})


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


def plain(cls: Any, options: dict[str, Any], steps: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    params = {name: torch.nn.Parameter(p) for name, p in tree(0, dtype).items()}
    optimizer = cls([*params.values()], **options)
    for step in range(steps):
        for name, p in params.items():
            p.grad = gradients(step, dtype).get(name)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def matched(cls: Any, options: dict[str, Any], steps: int, dtype: torch.dtype, folder: str) -> tuple[Any, Any]:
    try:
        optimizer = fsdp.from_torch(cls, **options)
        return optimizer, sharded(optimizer, steps, dtype, folder)
    except (fsdp.SpecError, fsdp.TreeError) as refusal:
        if "by='all'" not in str(refusal):
            raise
        optimizer = fsdp.from_torch(cls, by="all", **options)
        return optimizer, sharded(optimizer, steps, dtype, folder + ".all")


def sharded(optimizer: Any, steps: int, dtype: torch.dtype, folder: str) -> dict[str, torch.Tensor]:
    mesh = fsdp.local_mesh()
    (axis,) = mesh.mesh_dim_names or ()
    state = fsdp.shard(tree(0, dtype), fsdp.Spec(mesh), optimizer)
    for step in range(steps):
        grads = {name: gradients(step, dtype).get(name) for name in SHAPES}
        if step == steps // 2:
            path = fsdp.save(state, folder)
            state = fsdp.load(path, fsdp.Spec(mesh, fsdp.zero1(axis)), optimizer)
            bad = {name: torch.full_like(p, torch.nan) for name, p in tree(0, dtype).items()}
            state = fsdp.step(fsdp.reduce(state, bad), skip=torch.tensor(True))
        state = fsdp.step(fsdp.reduce(state, grads))
    return fsdp.full_params(state)


def one(cls: Any, options: dict[str, Any], steps: int, folder: str) -> tuple[str, str]:
    """(verdict, way or reason)."""
    wanted, dtype, error = None, torch.float64, None
    for dtype in (torch.float64, torch.float32):
        try:
            torch.manual_seed(0)
            wanted = plain(cls, options, steps, dtype)
            break
        except Exception as e:
            error = e
    if wanted is None:
        return "itself fails", f"{type(error).__name__}: {error}"
    try:
        optimizer, found = matched(cls, options, steps, dtype, folder)
    except (fsdp.SpecError, fsdp.TreeError) as refusal:
        return "refused", str(refusal)
    except Exception as e:
        return "fails", f"{type(e).__name__}: {e}"
    start = tree(0, dtype)
    far = max(float((wanted[k] - start[k]).abs().max()) for k in start)
    off = max(float((wanted[k] - found[k]).abs().max()) for k in start)
    low = any(word in cls.__name__.lower() for word in ("8bit", "4bit", "fp8"))
    most = 1e-9 if dtype is torch.float64 and not low else 1e-5
    if off <= most * far or all(torch.equal(wanted[k].nan_to_num(), found[k].nan_to_num()) for k in start):
        return "equal", str(optimizer)
    return "different", f"{off:.3g} of {far:.3g} moved; {optimizer}"


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
        except Exception:
            continue
        seen = set()
        for name, cls in sorted(vars(loaded).items()):
            if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)) or cls in seen:
                continue
            if cls is not torch.optim.Optimizer and cls.__module__.split(".")[0] == module.split(".")[0]:
                seen.add(cls)
                found.append((module, name))
    return found


def work(some: list[tuple[str, str]], steps: int, folder: str, out: str, long: int, options_of: int) -> None:
    SHAPES["long"] = (long,)
    warnings.simplefilter("ignore")
    for module, name in some:
        cls = getattr(load(module), name)
        signal.alarm(LIMIT)
        for i, options in enumerate(OPTIONS[:options_of]):
            if not {*options} <= {*inspect.signature(cls).parameters}:
                continue
            needs = (
                {"lr": 0.01}
                if "lr" in inspect.signature(cls).parameters
                and (inspect.signature(cls).parameters["lr"].default is inspect.Parameter.empty)
                else {}
            )
            verdict, why = one(cls, needs | options, steps, f"{folder}/{module}.{name}.{i}")
            if fsdp.local_mesh().get_local_rank() == 0:
                with Path(out).open("a") as file:
                    file.write("\t".join((module, name, str(needs | options), verdict, " ".join(why.split()))) + "\n")


def table(file: str) -> str:
    """One row a class: how it couples, and its way."""
    rows = ["| class | couples | way |", "|---|---|---|"]
    seen = set()
    for line in Path(file).read_text().splitlines():
        module, name, _, verdict, why = line.split("\t")
        if (module, name) in seen or verdict not in ("equal", "refused"):
            continue
        seen.add((module, name))
        way, couples = "refused", "leaves" if "couples leaves" in why else "cannot be held or run"
        if verdict == "equal":
            way = "elementwise" if "elementwise, on" in why else "all" if "all leaves together" in why else "leaf"
            couples = "nothing" if way == "elementwise" else why.partition("since ")[2].partition(" (")[0]
        rows.append(f"| {module}.{name} {version(PACKAGES[module])} | {couples.replace('|', '/')[:90]} | {way} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="classes whose module.name matches this regular expression")
    parser.add_argument(
        "--long", type=int, default=5000, help="elements of the longest vector: fewer for Shampoo's kind"
    )
    parser.add_argument("--options", type=int, default=len(OPTIONS), help="how many sets of options")
    parser.add_argument("--out", default="/tmp/sweep.tsv")
    parser.add_argument("--table", default="", help="print the table of this file, and stop")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    Path(args.out).touch()  # a sweep may go on in a file
    had = {tuple(line.split("\t")[:2]) for line in Path(args.out).read_text().splitlines()}
    chosen = [one for one in classes() if re.search(args.only, ".".join(one)) and one not in had]
    while chosen:
        some = chosen[:8]
        with tempfile.TemporaryDirectory() as folder:
            try:
                fsdp.launch(work, (some, args.steps, folder, args.out, args.long, args.options), nprocs=args.ranks)
            except Exception as error:
                print(f"{some}: {type(error).__name__}: {error}"[:400], flush=True)
        done = {tuple(line.split("\t")[:2]) for line in Path(args.out).read_text().splitlines()}
        if lost := [one for one in some if one not in done][:1]:  # the ranks died with it
            with Path(args.out).open("a") as file:
                file.write("\t".join((*lost[0], "{}", "fails", f"in {LIMIT} seconds, or killed its process")) + "\n")
        chosen = [one for one in chosen if one not in done and one not in lost]
    counts: dict[str, int] = {}
    for line in Path(args.out).read_text().splitlines():
        counts[line.split("\t")[3]] = counts.get(line.split("\t")[3], 0) + 1
    print(counts)
    if counts.get("different"):
        raise SystemExit("some classes are silently different")


if __name__ == "__main__":
    main()
