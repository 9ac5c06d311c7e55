"""What a run says and keeps: the progress bar, the files in its folder, the loss curve. Rank 0 speaks for all."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

import functional_fsdp as fsdp


class Log:
    """The folder of a run, and its voice.

    out/
      run.json        what decides the course of a run, whatever the layout: steps, seed and batch
      checkpoints/    step_N, each complete
      curve.json      losses, norms of gradients, held-out losses by step, up to the newest checkpoint
      loss.png, result.json
    """

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.out, self.rank = args.out, rank
        self.norms: list[Any] = []  # of the gradients, one a step
        self.held_out: dict[int, float] = {}  # the loss on held-out text after so many steps
        self.checkpoints = self.out / "checkpoints"
        self.run = {name: getattr(args, name) for name in ("steps", "seed", "batch")}
        self.bar: Any = None
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # torchrun started these ranks again
        self.resume = args.resume or restarted
        if rank == 0 and not self.resume:  # first of all: who is started again must not find an older run's
            for old in self.checkpoints.glob("step_*/layout.json"):
                shutil.rmtree(old.parent)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def latest(self) -> Path | None:
        """The checkpoint to go on from, after a look whether it belongs to the same run. None: from scratch."""
        newest = fsdp.latest_checkpoint(self.checkpoints) if self.resume else None
        if newest and (there := json.loads((self.out / "run.json").read_text())) != self.run:
            raise ValueError(
                f"--resume: the run in {self.out} has {there}, this one {self.run}. Give it the same, or another --out"
            )
        return newest

    def begin(self, start: int) -> list[Any]:
        """The losses of the steps before `start`."""
        if start:
            self.say(f"resumed    after step {start} from {self.out}")
            curve = json.loads((self.out / "curve.json").read_text())
            self.norms = curve["norms"][:start]
            self.held_out = {int(step): loss for step, loss in curve["held_out"].items() if int(step) <= start}
            return curve["losses"][:start]
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "run.json").write_text(json.dumps(self.run))
        return []

    def progress(self, start: int, steps: int) -> Iterable[int]:
        self.bar = tqdm(
            range(start, steps),
            initial=start,
            total=steps,
            disable=self.rank > 0,
            unit="step",
            ncols=110,
            mininterval=0.5,
        )
        return self.bar

    def show(self, loss: float, speed: float, memory: int) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"loss {loss:.3f}, {speed:,.0f} tokens/s, {memory / 2**20:,.0f} MiB", refresh=False
            )

    def save(self, losses: Sequence[Any]) -> None:
        if self.rank == 0:
            new = self.out / "curve.new"
            curve = {"losses": [*map(float, losses)], "norms": [*map(float, self.norms)], "held_out": self.held_out}
            new.write_text(json.dumps(curve))
            new.replace(self.out / "curve.json")  # in one piece, whenever this process is killed

    def end(self, **result: Any) -> None:
        """Write result.json, show the sample, then the figures."""
        (self.out / "result.json").write_text(json.dumps(result, indent=1))
        r = argparse.Namespace(**result)
        nats, bits = r.held_out, r.held_out / math.log(2)
        beaten = f"{abs(r.bigram - nats):.3f} {'below' if nats < r.bigram else 'ABOVE'}"
        rule = "─" * 110
        self.say(f"\n{rule}\n{r.sample}\n{rule}")
        self.say(
            f"held out   {nats:.3f} nats ({bits:.3f} bits) a byte: {beaten} the bigram entropy {r.bigram:.3f} "
            f"(unigram {r.unigram:.3f})"
        )
        if r.check:
            self.say(
                f"check      largest differences from unsharded training: losses {r.check['losses']:.1e}, "
                f"weights {r.check['weights']:.1e} ({r.check['where']})"
            )
        self.say(
            f"figures    {r.steps} steps, {r.tokens / 1e6:.2f} M tokens in {r.seconds:.0f} s "
            f"({r.tokens / r.seconds:,.0f} a second), {r.memory / 2**20:,.0f} MiB on rank 0, weights {r.weights}, "
            f"{self.out}/loss.png"
        )


class Board:
    """Scalars for TensorBoard. Without a folder, on all ranks but one, nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

            self.writer = SummaryWriter(str(folder))

    def add(self, step: int, **values: float) -> None:
        """These values after so many steps."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated by torch on a GPU, resident in this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def digest(params: Mapping[str, Tensor]) -> str:
    """A hash of every bit of the weights."""
    seen = hashlib.sha256()
    for name in sorted(params):
        seen.update(name.encode())
        seen.update(params[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]


def draw(
    losses: Sequence[float],
    held_out: float,
    unigram: float,
    bigram: float,
    title: str,
    path: Path,
    points: Mapping[int, float] | None = None,
    rates: Sequence[float] = (),
    norms: Sequence[float] = (),
) -> None:
    """The loss curve, and what it has to beat, as PNG.

    Args:
        points: held-out losses by step. rates, norms: learning rate and norm of the gradients, drawn below, by step.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    steps = range(1, len(losses) + 1)
    figure = Figure(figsize=(8, 6.4 if norms else 4.8), dpi=150, layout="constrained")
    heights = (3, 1) if norms else (1,)
    axes, *below = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training, each step")
    axes.plot(steps, running_mean(losses), color="#08519c", linewidth=2, label="training, running mean")
    label = f"held-out files, at the end: {held_out:.2f}"
    found = {**(points or {}), len(losses): held_out}
    look: dict[str, Any] = {"color": "#d94801", "markersize": 7, "zorder": 5, "clip_on": False}
    axes.plot([*found], [*found.values()], "o-" if points else "o", linewidth=1, label=label, **look)
    for name, entropy, color, line in (("unigram", unigram, "#969696", ":"), ("bigram", bigram, "#525252", "--")):
        label = f"{name} entropy of the held-out text: {entropy:.2f}"
        axes.axhline(entropy, color=color, linestyle=line, linewidth=1.5, label=label)
    axes.set(xlim=(0, len(losses)), ylim=(0, max(losses[0], unigram) * 1.04), ylabel="nats a byte")
    (below or [axes])[0].set_xlabel("step")
    bits = axes.twinx()
    bits.set(ylim=[y / math.log(2) for y in axes.get_ylim()], ylabel="bits a byte")
    axes.set_title(f"{title},\nlearns to write Python's standard library", loc="left", fontsize=11)
    axes.grid(axis="y", color="#eeeeee")
    parts = [axes, bits]
    if below:
        (rate,) = below
        rate.plot(steps, rates, color="#238b45", linewidth=1.8)
        rate.set_ylim(bottom=0)
        rate.set_ylabel("learning rate", color="#238b45")
        rate.ticklabel_format(axis="y", scilimits=(0, 0))
        norm = rate.twinx()
        norm.plot(steps, norms, color="#7a0177", linewidth=0.8, alpha=0.7)
        norm.set(yscale="log")
        norm.set_ylabel("gradient norm", color="#7a0177")
        norm.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        norm.yaxis.set_minor_locator(NullLocator())
        norm.yaxis.set_major_formatter("{x:g}")
        parts += [rate, norm]
    for part in parts:
        part.spines["top"].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)


def running_mean(losses: Sequence[float]) -> list[float]:
    """Means of what lies around, as many before as after, so that the curve does not lag."""
    smooth = []
    for i in range(len(losses)):
        reach = min(i, len(losses) - 1 - i, len(losses) // 40)
        smooth.append(fmean(losses[i - reach : i + reach + 1]))
    return smooth


def draw_runs(runs: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Losses by run and optimizer; below, how far they have been from those of the first run, the unsharded one."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(8, 6.4), dpi=150, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    first, *others = runs
    colors = dict(zip(runs[first], ("#08519c", "#d94801", "#238b45", "#7a0177"), strict=False))
    looks: dict[str, dict[str, Any]] = {first: {"linewidth": 7, "alpha": 0.3}}
    looks |= {run: {"linewidth": 1.6, "dashes": (2, 2 * i) if i else (1, 0)} for i, run in enumerate(others)}
    for run, look in looks.items():
        for name, losses in runs[run].items():
            steps = range(1, len(losses) + 1)
            dashed = run in others[1:]
            above.plot(steps, running_mean(losses), color="black" if dashed else colors[name], **look)
            if run != first:
                apart = [abs(a - b) for a, b in zip(losses, runs[first][name], strict=True)]
                below.plot(steps, [*accumulate(apart, max)], color=colors[name], **look)
    keys = [Line2D([], [], color=color, linewidth=3, label=name) for name, color in colors.items()]
    keys += [Line2D([], [], color="black", label=run, **look) for run, look in looks.items()]
    above.legend(handles=keys, ncols=2, frameon=False, fontsize=9)
    above.set(ylabel="nats a byte (running mean)")
    below.set(xlabel="step", ylabel=f"largest difference\nfrom {first} so far")
    below.ticklabel_format(axis="y", scilimits=(0, 0))
    above.set_title("A small GPT on Python's standard library, by three optimizers", loc="left", fontsize=11)
    for axes in (above, below):
        axes.grid(axis="y", color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
