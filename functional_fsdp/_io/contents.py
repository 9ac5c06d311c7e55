"""What lies in files of any format: tensors that are read a run at a time, by name.

Spans: tensors that lie in files, or in parts of several, read a run of elements at a time.

    Entry    one run of bytes of a file (see `safetensors_file`)
    Blob     the same, where only a look into the file says at which byte it begins
    Cut      parts of any of these kinds, each a box of the tensor, or a run of its elements
    Filled   one value everywhere, in no file

All have a `shape`, a `dtype` and `values(first, n, files)`: elements [first, first + n) in C order, on the host.

Contents: what a reader of a format finds in a checkpoint, the same for all formats, and how names are sorted out.

model.embed.weight                     a weight, called embed.weight
optim.state.embed.weight.exp_avg       "exp_avg" that an optimizer keeps for it
train_state.step, lr_scheduler....     neither
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from .._common.errors import CheckpointError
from .folder import Entry, read_into
from .pieces import Dim, Line, Piece, blocks, piece_of, strides_of


class Files:
    """Files that are open while something is read from them."""

    def __init__(self) -> None:
        self.opened: dict[Path, int] = {}

    def of(self, path: Path) -> int:
        if path not in self.opened:
            self.opened[path] = os.open(path, os.O_RDONLY)
        return self.opened[path]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: Any) -> None:
        while self.opened:
            os.close(self.opened.popitem()[1])


class Span(Protocol):
    """A tensor that can be read in runs."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def values(self, first: int, n: int, files: Files) -> torch.Tensor: ...


Part = tuple[Piece, "Span | Entry | torch.Tensor"]


def entry_values(one: Any, first: int, n: int, files: Files) -> torch.Tensor:
    """Elements [first, first + n) [n] of a tensor, an Entry or a Span, on the device where they lie."""
    if isinstance(one, torch.Tensor):
        return one.detach().reshape(-1)[first : first + n]
    if isinstance(one, Entry):
        values = torch.empty(n, dtype=one.dtype, device="cpu")
        read_into(files.of(one.path), one, first, values)
        return values
    found: torch.Tensor = one.values(first, n, files)
    return found


@dataclass(frozen=True)
class Cut:
    """A tensor in parts: which of its elements (`Piece`: "memory" is this tensor, "file" the part) lie in which."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        found = torch.empty(n, dtype=self.dtype, device="cpu")
        for piece, one in self.parts:
            for block in blocks(piece, first, first + n):
                values = entry_values(one, block.file, block.numel, files)
                block.of(found, first).copy_(values.view(block.sizes))
        return found

    @property
    def covered(self) -> int:
        """How many elements the parts have."""
        return sum(piece.numel for piece, _ in self.parts)


@dataclass(frozen=True)
class Blob:
    """A tensor whose place is looked up when it is first read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    find: Callable[[], Any]

    @cached_property
    def found(self) -> Any:
        return self.find()

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        return entry_values(self.found, first, n, files)


@dataclass(frozen=True)
class Filled:
    """A tensor of one value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float

    def values(self, first: int, n: int, files: Files) -> torch.Tensor:
        return torch.full((n,), self.value, dtype=self.dtype, device="cpu")


def numel_of(shape: Iterable[int]) -> int:
    return torch.Size(shape).numel()


def box(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], part: Any) -> Part:
    """A part that is a box of a tensor of this shape, and lies in C order."""
    steps = strides_of(tuple(shape))
    dims = tuple(Dim(n, step, 0, n) for n, step in zip(sizes, steps, strict=True))
    return piece_of("", dims, sum(a * step for a, step in zip(offsets, steps, strict=True))), part


def run(first: int, n: int, part: Any, at: int = 0) -> Part:
    """A part that is elements [first, first + n) of a tensor; they are those from `at` on of what it lies in."""
    piece = piece_of("", (Dim(n, 1, 0, n),), first)
    return piece._replace(file=at), part


def strided(shape: Sequence[int], strides: Sequence[int], at: int, dtype: torch.dtype, memory: Any) -> Cut:
    """A tensor of any strides, whose first element is that at `at` of what it lies in."""
    own = strides_of(tuple(shape))
    lines = [Line(n, step, jump) for n, step, jump in zip(shape, own, strides, strict=True) if n != 1]
    piece = Piece("", tuple(shape), (), tuple(lines), 0, at, numel_of(shape))
    return Cut(tuple(shape), dtype, ((piece, memory),))


Spans = dict[str, Any]  # Entry, Cut, Blob, Filled or tensor, by name
Moments = dict[str, dict[str, Any]]  # what an optimizer keeps for a leaf, by the leaf's name and its own


@dataclass
class Contents:
    """What a checkpoint has.

    Attributes:
        format: what wrote it, in words. version: of that, or None. world: how many ranks wrote it, or None.
        tensors: weights and persistent buffers by name, ties once.
        ties: {further name: the name that holds the leaf}; None: the format does not say.
        buffers, frozen: names; None: the format does not say.
        moments: {leaf: {"exp_avg": ...}}, with the names that the optimizer has for them.
        steps: {leaf: steps that its moments have seen}, a number or where it lies; step: of all, or None.
        left: what else is there and is not read.
    """

    format: str
    tensors: Spans
    version: str | None = None
    world: int | None = None
    ties: dict[str, str] | None = None
    buffers: frozenset[str] | None = None
    frozen: frozenset[str] | None = None
    moments: Moments = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    prefix: str = ""
    left: tuple[str, ...] = ()


class Format(Protocol):
    """A format of checkpoints."""

    def claims(self, path: Path) -> bool:
        """Whether what lies there is of this format, by the names of its files."""

    def read(self, path: Path) -> Contents:
        """What lies there. No tensor is read.

        Raises:
            CheckpointError: naming the file that is damaged, missing or of another checkpoint.
        """


# ---------------------------------------------------------------- names

WRAPPERS = re.compile(r"(^|(?<=\.))(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module|_forward_module)\.")
OPTIMIZERS = re.compile(r"^(?P<root>(?:[\w-]*\.)*?[\w-]*optim[\w-]*\.|)state\.(?P<leaf>.+)\.(?P<slot>[A-Za-z_]\w*)$")
OTHERS = re.compile(
    r"^(?:[\w-]*\.)?(?:[\w-]*optim[\w-]*|train_state|dataloader|data_loader|lr_schedulers?|schedulers?|rng\w*|extra_state"
    r"|callbacks|loops|hyper_parameters|param_groups)(?:\.|$)"
)
LEAVES = ("weight", "bias")  # what neither optimizers nor schedulers keep anything under
MODELS = ("model.", "module.")
PREFIXES = ("model.", "module.", "state_dict.", "app.", "module.model.", "app.model.", "model.module.")


def plain_name(name: str) -> str:
    """A leaf's name without what wrappers of modules add to it."""
    return WRAPPERS.sub("", name)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """{name: its plain name}; of names that would be the same all but the first stay as they are."""
    names = [*names]
    taken = {*names}
    found = {}
    for name in names:
        short = plain_name(name)
        found[name] = name if short != name and short in taken else short
        taken.add(found[name])
    return found


def without_prefix(names: Sequence[str], leaves: Iterable[str] = ()) -> str:
    """What weights' names begin with beside the leaf's path: as an optimizer's names for them say, or else where all
    have the same of those that packages use."""
    known = {plain_name(leaf) for leaf in leaves}
    held = {*names}
    if known:
        if known <= held:
            return ""
        for prefix in PREFIXES:
            if {prefix + leaf for leaf in known} <= held:
                return prefix
        return ""
    return next(
        (p for p in sorted(PREFIXES, key=len, reverse=True) if names and all(n.startswith(p) for n in names)), ""
    )


def sorted_out(named: Mapping[str, Any]) -> tuple[Spans, Moments, list[str], str]:
    """Weights, moments, what is neither, and the prefix that the weights' names had."""
    weights: Spans = {}
    moments: Moments = {}
    others: list[str] = []
    names = plain_names(named)
    for name, one in named.items():
        last = name.rpartition(".")[2]
        match = None if last in LEAVES else OPTIMIZERS.match(name)
        if match is not None and not match["leaf"].split(".")[0].isdigit():
            moments.setdefault(plain_name(match["leaf"]), {})[match["slot"]] = one
        elif match is not None or (last not in LEAVES and not name.startswith(MODELS) and OTHERS.match(name)):
            others.append(name)
        else:
            weights[names[name]] = one
    prefix = without_prefix([*weights], moments)
    if prefix:
        others += [name for name in weights if not name.startswith(prefix)]
        weights = {name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
    return weights, moments, others, prefix


def tensors_expected(name: Any) -> str:
    """How an error ends that found something else under this name."""
    if name != "state":
        return "expected tensors by name."
    return (
        "expected tensors by name. In the state_dict() of a torch.optim optimizer leaves are numbers: give "
        "load_optimizer_state the file of torch.save({'model': module.state_dict(), 'optimizer': optimizer.state_dict()"
        "}, file), or {path: {'mean': exp_avg, 'square': exp_avg_sq}} and steps=."
    )


def by_number(
    where: Path,
    state: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, Any],
) -> tuple[Moments, str]:
    """Moments that torch.optim has by number, by the names of weights: in their order, by shape.

    Args:
        groups: the optimizer's param_groups, whose "params" are the numbers.

    Returns:
        the moments, and why there are none.
    """
    order = [number for group in groups for number in group["params"]]
    numbers = [number for number in order if number in state]
    if any(isinstance(number, str) for number in order):
        return {plain_name(name): dict(state[name]) for name in numbers}, ""
    said = [name for group in groups for name in group.get("param_names") or ()]
    if len(said) == len(order) and {*map(plain_name, said)} <= weights.keys():
        return {plain_name(name): dict(state[k]) for name, k in zip(said, order, strict=True) if k in state}, ""
    shape_of = {
        k: next((tuple(t.shape) for t in state[k].values() if len(getattr(t, "shape", ()))), None) for k in numbers
    }
    if len(groups) > 1:  # groups are in an order of their own: each by itself, where no shape is in two of them
        kinds = [{shape_of[k] for k in group["params"] if k in state} for group in groups]
        twice = next((s for i, some in enumerate(kinds) for s in some if any(s in other for other in kinds[:i])), ())
        if twice != () or (None in {*shape_of.values()}):
            return {}, (
                f"{where.name}: moments by number in {len(groups)} groups, of which two have leaves of one shape, and "
                "nothing says which is which"
            )
        joined: Moments = {}
        for group in groups:
            some, why = by_number(where, state, [group], weights)
            if why:
                return {}, why
            joined |= some
        return joined, ""
    shapes = [shape_of[k] for k in numbers]
    names = [name for name in weights if _may_train(name, weights)]
    ways = [[1] + [0] * len(numbers)]  # [i][k]: in how many ways the first k moments are some of the first i weights
    for name in names:
        last = ways[-1]
        fits = [shape in (None, tuple(weights[name].shape)) for shape in shapes]
        ways.append([1, *(last[k + 1] + (last[k] if fits[k] else 0) for k in range(len(numbers)))])
    if ways[-1][-1] != 1:
        how = "no leaves" if ways[-1][-1] == 0 else "several sets of leaves"
        return {}, f"{where.name}: moments by number, {len(numbers)} of them, which fit {how} by their order and shapes"
    found: Moments = {}
    k = len(numbers)
    for i in range(len(names), 0, -1):
        if k and not ways[i - 1][k]:
            k -= 1
            found[names[i - 1]] = dict(state[numbers[k]])
    return dict(reversed(found.items())), ""


def steps_from(moments: Moments) -> dict[str, Any]:
    """The counts of steps, taken out of what is kept for each leaf."""
    return {leaf: kept.pop("step") for leaf, kept in moments.items() if "step" in kept}


def _may_train(name: str, weights: Mapping[str, Any]) -> bool:
    """Not whole numbers, nor statistics of torch's batch norms, which count batches beside them."""
    dtype, begin = weights[name].dtype, name.removesuffix("running_mean").removesuffix("running_var")
    counts = name != begin and f"{begin}num_batches_tracked" in weights
    return (dtype.is_floating_point or dtype.is_complex) and not counts


def buffers_by_shards(weights: Mapping[str, Any], moments: Mapping[str, Any]) -> frozenset[str] | None:
    """Which weights are buffers, where FSDP has cut its parameters along their rows, each into as many chunks, and
    saved buffers whole: those of several rows in one part. None where leaves are not cut, or otherwise."""
    weights = {name: one for name, one in weights.items() if numel_of(one.shape)}  # of others all parts are alike
    cut = {name: one for name, one in weights.items() if isinstance(one, Cut) and len(one.parts) > 1}
    ranks = max((len(one.parts) for one in cut.values()), default=0)
    for one in cut.values():
        rows, n = one.shape[0], numel_of(one.shape)
        begins = sorted(piece.memory for piece, _ in one.parts if piece.numel)
        if begins != [*range(0, n, -(-rows // ranks) * (n // rows))]:
            return None
    if not cut:
        return None
    numbers = {name for name, one in weights.items() if not one.dtype.is_floating_point}
    whole = {name for name, one in weights.items() if name not in cut and (not one.shape or one.shape[0] > 1)}
    return frozenset((numbers | whole) - moments.keys())


def number_of(one: Any, what: str) -> int:
    """A count of steps: a number, or a tensor of one, wherever it lies. `what`: whose it is, for errors."""
    found = one
    if not isinstance(one, int | float) and numel_of(getattr(one, "shape", (0,))) == 1:
        with Files() as files:
            found = entry_values(one, 0, 1, files).to(torch.float64).item()
    if not isinstance(found, int | float) or not 0 <= found < 2**63 or found != int(found):
        raise CheckpointError(f"{what}: a count of steps is {found!r}; expected one whole number, 0 or more.")
    return int(found)
