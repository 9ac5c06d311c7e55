"""Pickles: what torch.save has written, looked at without running anything of it.

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
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from .._common.errors import CheckpointError
from .contents import numel_of, strided
from .folder import Entry

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


class _Distributed:
    """A DTensor before its state is known."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


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
        for axis in layout.axes if _has(layout, "axes") else (layout,):
            shape = axis.shape
            sizes += [int(torch.Size(shape).numel()) if isinstance(shape, tuple) else shape]
        return tuple(sizes)
    ranks = mesh.__dict__["state"].get("mesh")
    if isinstance(ranks, Held):
        return ranks.shape
    raise pickle.UnpicklingError("a DTensor on a mesh of unknown shape")


def _has(inert: Inert, name: str) -> bool:
    return hasattr(inert, name)


def _placements(placements: Any) -> tuple[tuple[str, int], ...]:
    found = []
    for one in placements:
        kind = one.name.rsplit(".", 1)[-1]
        if kind not in ("Shard", "Replicate"):
            raise pickle.UnpicklingError(f"a DTensor that is placed by {kind}; expected Shard and Replicate")
        dim = one.dim if kind == "Shard" and _has(one, "dim") else one.args[0] if kind == "Shard" else 0
        found.append((kind.lower(), int(dim)))
    return tuple(found)


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


TABLE: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _Call(lambda *args: {}),
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "_codecs.encode": _Call(_encoded),
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
