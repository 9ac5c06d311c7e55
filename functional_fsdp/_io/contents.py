"""What lies in files of any format: tensors that are read a run at a time, by name.

    Entry, Blob, Cut, Filled     tensors that lie in files
    Contents, Format             what a reader finds in a checkpoint, and how names are sorted out
    read_pickle, read_saved      what torch.save has written

Spans: tensors that lie in files, or in parts of several, read a run of elements at a time.

    Entry    one run of bytes of a file (see `folder`)
    Blob     the same, where only a look into the file says at which byte it begins
    Cut      parts of any of these kinds, each a box of the tensor, or a run of its elements
    Filled   one value everywhere, in no file

All have a `shape`, a `dtype` and `values(first, n, files)`: elements [first, first + n) in C order, on the host.

`Contents`: what a reader of a format finds in a checkpoint, the same for all formats, and how names are sorted out.

model.embed.weight                     a weight, called embed.weight
optim.state.embed.weight.exp_avg       "exp_avg" that an optimizer keeps for it
train_state.step, lr_scheduler....     neither

Pickles: what torch.save has written, looked at without running anything of it.

    file.pt  ── zip ── data.pkl      dicts, lists, numbers, texts, and names of classes and functions
                    └─ data/0, 1, …  bytes of tensors, which stay where they are

Every name in a pickle is looked up in a table here: a few are containers, those of torch that make tensors become
`Held` (where a tensor's bytes lie), and those of known packages become `Inert`, objects that keep what they were given
and do nothing. Any other name is refused, by that name. Python's own classes and functions are never looked up, so
nothing in a file can be called: it is what torch.load(weights_only=True) does, which would read all tensors, and
refuses what DeepSpeed and Lightning keep beside them.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

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


Part = tuple[Piece, Any]


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


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, stop) of a tensor in C order as boxes, one after another: where each begins, and its sizes.

    [3, 4], 2 to 11:  [0, 2] 1 × 2,  [1, 0] 1 × 4,  [2, 0] 1 × 3
    """
    if not shape or start >= stop:
        if start < stop or not numel_of(shape):
            yield (0,) * len(shape), tuple(shape)
        return
    inner = numel_of(shape[1:])
    low, high = -(-start // inner), stop // inner  # whole rows
    if low > high:  # within one row
        for offsets, sizes in boxes(shape[1:], start - high * inner, stop - high * inner):
            yield (high, *offsets), (1, *sizes)
        return
    if start < low * inner:
        for offsets, sizes in boxes(shape[1:], start - (low - 1) * inner, inner):
            yield (low - 1, *offsets), (1, *sizes)
    if low < high:
        yield (low, *(0 for _ in shape[1:])), (high - low, *shape[1:])
    if high * inner < stop:
        for offsets, sizes in boxes(shape[1:], 0, stop - high * inner):
            yield (high, *offsets), (1, *sizes)


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
THEIRS = {"mean": "exp_avg", "square": "exp_avg_sq"}  # what adamw keeps, as torch.optim.AdamW calls it
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


# Packages whose objects lie beside weights: kept as `Inert`.
KNOWN = (
    "accelerate.", "argparse.Namespace", "deepspeed.", "lightning.", "lightning_fabric.", "megatron.", "megatron_fsdp.",
    "numpy.", "omegaconf.", "pathlib.", "pytorch_lightning.", "torch.distributed.", "torch.optim.", "torchtitan.",
    "transformers.", "trl.", "datetime.",
)  # fmt: skip
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64, "UntypedStorage": torch.uint8,
}  # fmt: skip


class Storage(NamedTuple):
    """A storage of a file: `name` among its records; `dtype` as the pickle has it, uint8 of an untyped one."""

    name: str
    dtype: torch.dtype
    numel: int
    untyped: bool


class Held(NamedTuple):
    """A tensor whose bytes are in a file of torch.save."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int  # element of the storage


class Distributed(NamedTuple):
    """A rank's part of a DTensor: of a tensor of this shape, cut over the mesh as placements say, in its order."""

    local: Held
    shape: tuple[int, ...]
    mesh: tuple[int, ...]  # its shape
    placements: tuple[tuple[str, int], ...]  # ("shard", dim) or ("replicate", 0)


class Inert:
    """An object of another package: `name` of its class, and what it was given. It does nothing."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = object.__new__(cls)
        made.__dict__.update(args=args, state=None, items=[])
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state

    def append(self, item: Any) -> None:
        self.__dict__["items"].append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["items"].append((key, value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        state = self.__dict__["state"]
        state = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state
        if isinstance(state, Mapping) and name in state:
            return state[name]
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class _Call:
    """A function that a pickle may call, and cannot change."""

    __slots__ = ("run",)
    run: Callable[..., Any]

    def __init__(self, run: Callable[..., Any]) -> None:
        object.__setattr__(self, "run", run)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it would change {self!r}")

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class _Distributed(NamedTuple):
    """A DTensor before its state is known."""

    shape: tuple[int, ...]


def _tensor(storage: Storage, first: int, shape: Any, strides: Any, *more: Any) -> Held:
    dtype = next((one for one in more if isinstance(one, torch.dtype)), storage.dtype)  # of `_rebuild_tensor_v3`
    if not isinstance(storage, Storage) or type(first) is not int:
        raise pickle.UnpicklingError("a tensor that is not in a storage of the file")
    if any(isinstance(one, Mapping) and (one.get("conj") or one.get("neg")) for one in more):
        raise pickle.UnpicklingError(
            "a tensor is saved as the conjugate or the negative of its bytes; save it by .resolve_conj().resolve_neg()"
        )
    shape, strides = tuple(shape), tuple(strides)
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in (*shape, *strides, first)):
        raise pickle.UnpicklingError(f"a tensor of shape {shape} and strides {strides}")
    return Held(storage, dtype, shape, strides, first)


def _first(held: Any, *rest: Any) -> Any:
    return held


def _typed(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor of a class of its own, or with attributes."""
    made = make(*args) if isinstance(make, _Call) else None
    if isinstance(made, _Distributed):
        found = state[1] if isinstance(state, tuple) else state
        spec = found["_spec"]
        return Distributed(found["_local_tensor"], made.shape, _mesh_shape(spec.mesh), _placements(spec.placements))
    if not isinstance(made, Held):
        raise pickle.UnpicklingError(f"a tensor of the class {getattr(kind, 'name', kind)}")
    return made


def _mesh_shape(mesh: Any) -> tuple[int, ...]:
    """Of the DeviceMesh of torch 2.13 (a layout), or of those before (a tensor of ranks)."""
    layout = mesh.__dict__["state"].get("_layout")
    if layout is not None:
        sizes: list[int] = []
        for axis in layout.axes if hasattr(layout, "axes") else (layout,):
            shape = axis.shape
            sizes += [int(torch.Size(shape).numel()) if isinstance(shape, tuple) else shape]
        return tuple(sizes)
    ranks = mesh.__dict__["state"].get("mesh")
    if isinstance(ranks, Held):
        return ranks.shape
    raise pickle.UnpicklingError("a DTensor on a mesh of unknown shape")


def _placements(placements: Any) -> tuple[tuple[str, int], ...]:
    found = []
    for one in placements:
        kind = one.name.rsplit(".", 1)[-1]
        if kind not in ("Shard", "Replicate"):
            raise pickle.UnpicklingError(f"a DTensor that is placed by {kind}; expected Shard and Replicate")
        dim = one.dim if kind == "Shard" and hasattr(one, "dim") else one.args[0] if kind == "Shard" else 0
        found.append((kind.lower(), int(dim)))
    return tuple(found)


TABLE: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _Call(lambda *args: {}),
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "_codecs.encode": _Call(lambda text, *encoding: text.encode("latin1")),
    "torch.Size": tuple,
    "torch.device": _Call(lambda *args: ":".join(map(str, args))),
    "torch.serialization._get_layout": _Call(_first),
    "torch._utils._rebuild_tensor_v2": _Call(_tensor),
    "torch._utils._rebuild_tensor_v3": _Call(_tensor),
    "torch._utils._rebuild_parameter": _Call(_first),
    "torch._utils._rebuild_parameter_with_state": _Call(_first),
    "torch._utils._rebuild_wrapper_subclass": _Call(lambda kind, dtype, shape, *rest: _Distributed(tuple(shape))),
    "torch._tensor._rebuild_from_type_v2": _Call(_typed),
}
CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")  # names that are given on, and never called


class _Reader(pickle.Unpickler):
    """Python's own reader, which finds nothing but what the table has."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in TABLE:
            return TABLE[full]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return (STORAGES[name], name == "UntypedStorage")
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full in CLASSES or full.startswith(KNOWN):
            return type(name, (Inert,), {"name": full})
        raise _Refused(full)

    def persistent_load(self, pid: Any) -> Storage:
        kind, (dtype, untyped), name, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(numel) is not int:
            raise pickle.UnpicklingError(f"a reference {str(pid)[:80]}")
        return Storage(str(name), dtype, numel, untyped)


class _Refused(Exception):
    """A name in a pickle that is in no table."""


def read_pickle(where: Path, file: IO[bytes]) -> Any:
    """What a pickle says, with objects as `Inert`.

    Args:
        where: the file, for errors.

    Raises:
        CheckpointError: it names a class or a function that no checkpoint needs (nothing was run), or it is damaged.
    """
    try:
        return _Reader(file).load()
    except _Refused as refused:
        raise CheckpointError(
            f"{where} wants {refused} to be called or made, which is none of the names that checkpoints of weights are "
            "made of. Nothing was run. If you trust the file, load it by the package that wrote it, and give the "
            "tensors: weights={name: tensor}."
        ) from None
    except OSError:
        raise
    except Exception as error:  # whatever damaged bytes lead to, MemoryError among it
        raise CheckpointError(f"{where} is damaged: its pickle cannot be read ({_said(error)}).") from None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class Window:
    """Bytes [start, start + length) of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + (0, self.at, self.length)[whence])
        return self.at

    def read(self, n: int = -1) -> bytes:
        n = min(self.length - self.at if n < 0 else n, max(self.length - self.at, 0))
        self.file.seek(self.start + self.at)
        found = self.file.read(n)
        self.at += len(found)
        return found


class Saved:
    """A file of torch.save, or the part of a file that is one: `tree` is what it holds."""

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.path, self.start = path, start
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if length is not None and start + length > size:
                raise CheckpointError(f"{path} ends after {size} bytes; {start + length} were written.")
            try:
                archive = zipfile.ZipFile(Window(file, start, size - start if length is None else length))
                self.records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                order = self.read(file, "byteorder") if "byteorder" in self.records else b"little"
                data = self.read(file, "data.pkl")
            except CheckpointError:  # a ValueError, too
                raise
            except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
                raise CheckpointError(f"{path} is no file of torch.save, or it is damaged: {_said(error)}.") from None
        if order.strip() != b"little":
            raise CheckpointError(f"{path} was written on a machine with another order of bytes ({order!r}).")
        self.tree = read_pickle(path, BytesIO(data))

    def begin(self, file: IO[bytes], name: str) -> tuple[int, int]:
        """The byte of the file at which a record begins, and how many bytes it has. Sums are not looked at: torch can
        be told to write none."""
        info = self.records.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.header_offset < 0:
            raise CheckpointError(f"{self.path} is no file of torch.save, or it is damaged: it has no {name!r}.")
        file.seek(self.start + info.header_offset)
        head = file.read(30)
        if len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.path} is damaged where its {name!r} begins.")
        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        return self.start + info.header_offset + 30 + lengths, info.file_size

    def read(self, file: IO[bytes], name: str) -> bytes:
        """A record, whole."""
        begin, n = self.begin(file, name)
        file.seek(begin)
        found = file.read(n)
        if len(found) < n:
            raise CheckpointError(f"{self.path} is damaged: it ends within {name!r}.")
        return found

    def span(self, held: Held) -> Any:
        """Where a tensor lies, for `spans`."""
        with open(self.path, "rb") as file:
            begin, nbytes = self.begin(file, f"data/{held.storage.name}")
        n, size = numel_of(held.shape), held.dtype.itemsize
        last = held.first + sum((k - 1) * step for k, step in zip(held.shape, held.strides, strict=True))
        if n and (last + 1) * size > nbytes:
            raise CheckpointError(f"{self.path} is damaged: a tensor of {n} elements is beyond its {nbytes} bytes.")
        if n == 0 or held.strides == _contiguous(held.shape, held.strides):
            return Entry(self.path, held.dtype, held.shape, begin + held.first * size)
        memory = Entry(self.path, held.dtype, (nbytes // size,), begin)
        return strided(held.shape, held.strides, held.first, held.dtype, memory)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides in C order; of dims of one element any will do."""
    found, step = [], 1
    for n, given in zip(reversed(shape), reversed(strides), strict=True):
        found.append(given if n == 1 else step)
        step *= n
    return tuple(reversed(found))


def read_saved(path: Path, start: int = 0, length: int | None = None) -> tuple[Any, Callable[[Held], Any]]:
    """What a file of torch.save holds, and a function that says where a tensor of it lies.

    Returns:
        the tree, in which tensors are `Held` or `Distributed`; and Held -> Entry or Cut. What was saved without a zip
        (before torch 1.6) is read by torch, with weights_only, and has tensors.

    Raises:
        CheckpointError: naming the file: it is damaged, or it wants something to be run.
    """
    with suppress(zipfile.BadZipFile):
        if length is None and not zipfile.is_zipfile(path):
            return _legacy(path), _first
    saved = Saved(path, start, length)
    return saved.tree, saved.span


def _legacy(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever an unpickler meets
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place that a file has not gives EINVAL
            raise
        raise CheckpointError(
            f"{path} is no file of torch.save, or it is damaged, or wants something to be run: {_said(error)}."
        ) from None


def saved_tensor(path: Path, start: int, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Where the one tensor lies that is saved in a part of a file."""
    tree, span = read_saved(path, start, length)
    if not isinstance(tree, Held) or tree.shape != shape or tree.dtype is not dtype:
        met = f"{tree.dtype} {list(tree.shape)}" if isinstance(tree, Held) else f"a {type(tree).__name__}"
        raise CheckpointError(f"{path} has {met} at byte {start}; expected {dtype} {list(shape)}.")
    return span(tree)


def span_of(one: Any, span: Callable[[Held], Any]) -> Any:
    """Where a tensor of a tree lies; a tensor stays what it is."""
    return span(one) if isinstance(one, Held) else one
