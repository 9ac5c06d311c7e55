"""What classes of torch.optim do, found by trying and by observing.

Which torch.optim classes work on parts of flat buffers, and what they keep of a parameter: found by trying.

A rank has pieces of leaves, flat, wherever its slices of buckets are cut. So an optimizer has to be elementwise: what
it makes of an element follows from that element, its gradients, what is kept for it, and numbers that all elements
share.

    plain     the class as a user has it, on a vector and on a matrix
    driven    as `FromTorch` has it: pieces, a new instance in each step, state handed in and taken out

Both take fourteen steps on twelve numbers. If they differ, the class is not run this way. This finds out how the state
of a class is held; that the class is elementwise is proved, see `prove`.

How a torch.optim class couples elements, by what it does: each operation of some steps is observed.

    elementwise   each tensor operation is pointwise, a copy, a fill, a cast, or a view that keeps elements in order
    leaf          some is not, as a norm of a gradient; or Python looks at a shape or a value: leaves stay whole
    all           an operation has tensors of two leaves, or a leaf goes another way beside others than alone

A tensor is *touched* by a leaf if it is that leaf's weight or gradient, or if it was computed from such a tensor.
Python that reads no touched value, and no shape, takes the same branches for every leaf and for every piece of it.
"""

from __future__ import annotations

import inspect
import linecache
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from .._common.device import lies_on_host
from .._common.errors import SpecError
from .._shared.torch_names import TorchDispatchMode

KNOWN = {
    "LBFGS": ("it keeps a history over all parameters at once, and evaluates the loss anew", "Use fsdp.adamw"),
    "SparseAdam": ("it takes sparse gradients only, and reduced ones are dense", "Use fsdp.from_torch(Adam)"),
}
WEIGHTS = None  # of a moment that begins as a copy of the weights
SIZE, CUTS, STEPS = 12, (5, 4, 0, 3), 14
State = dict[str, Any]  # what a class keeps for one parameter, by name


class Kept(NamedTuple):
    """What a class keeps of each parameter under one name.

    Attributes:
        number: whether it is one number, and not one for each element.
        value: what it begins with, of all elements; WEIGHTS for a copy of them.
        dtype: None for that of the parameter.
        shape: of a number that is a tensor: () or (1,).
        python: the type of a number that is none.
        host: whether it is a number in the host's memory, and the parameter is not.
    """

    number: bool
    value: float | None
    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    python: type | None = None
    host: bool = False


class Known(NamedTuple):
    """What is known of a class with some options, on one kind of device.

    Attributes:
        kept: by name.
        options: those given, and `capturable`.
        rates: whether the learning rate may be a tensor that is not on the host.
        rated: names of what begins as the rate of a leaf's first step, where that changes.
    """

    kept: dict[str, Kept]
    options: dict[str, Any]
    rates: bool
    rated: tuple[str, ...] = ()

    @property
    def staged(self) -> bool:
        """Whether numbers cross to the host in each step, which then waits for the device."""
        return any(one.host for one in self.kept.values())


def name_of(cls: type) -> str:
    return f"from_torch({cls.__name__})"


def refuse_known(cls: Any) -> None:
    """Refuse classes of torch.optim that no way can run."""
    for one in cls.__mro__:
        if one.__name__ in KNOWN and one.__module__.startswith("torch.optim"):
            refuse(cls, *KNOWN[one.__name__])


def learned(cls: Any, options: Mapping[str, Any], device: torch.device, rate: float | None) -> Known:
    """Try a class on a device.

    Args:
        options: of its constructor, without a rate that changes.
        rate: the first one that changes; None where it does not.

    Raises:
        SpecError: it is not elementwise, or refuses the options.
    """
    own = dict(options)
    if "capturable" in inspect.signature(cls).parameters:  # then counts stay on the device
        own["capturable"] = own.get("capturable", True) and not lies_on_host(torch.empty(0, device=device))
    if rate is not None:
        own["lr"] = rate
    with torch.device("cpu"), torch.no_grad():  # whatever the caller's default is
        try:
            kept = _begin(cls, own, device)
            trial = own if rate is None else own | {"lr": 0.01}
            begins = kept if rate is None else _begin(cls, trial, device)
            same = _compare(cls, trial, begins, device)
            if not same and any(_first(one) for one in kept.values()):  # counts that the first step set to 1
                kept, begins = _from_zero(kept), _from_zero(begins)
                same = _compare(cls, trial, begins, device)
            rates = rate is None or _takes_tensors(cls, trial, begins, device)
            rated = () if rate is None else _rated(begins, 0.01, _begin(cls, own | {"lr": 0.02}, device), 0.02)
        except SpecError:
            raise
        except Exception as error:
            refuse(cls, f"it raised {type(error).__name__}: {error}", "Give options that it takes, for all labels")
    if not same:
        why = "some steps on pieces of a vector, one instance each, gave other numbers than on the whole"
        with torch.device("cpu"), torch.no_grad():
            if _compare(cls, trial, {}, device):  # from nothing, as it begins by itself
                why = "what it keeps begins neither as one number nor as the weights, as that of SGD(dampening=)"
        refuse(cls, why, "Use an elementwise one, as torch.optim.Adam, or write an (init, update) pair")
    return Known(kept, own, rates, rated)


def refuse(cls: Any, why: str, remedy: str, how: str = ", flat pieces of parameters") -> None:
    raise SpecError(f"{name_of(cls)}: {cls.__module__}.{cls.__qualname__} cannot work on shards{how}: {why}. {remedy}.")


def made(cls: Any, params: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Any:
    """An instance of a class; of one with two modes, as those of schedulefree, in the mode for steps."""
    optimizer = cls([*params], **options)
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def driven(
    cls: Any, options: Mapping[str, Any], params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor],
    states: Sequence[State], lr: Any = None, within: AbstractContextManager[Any] | None = None,
) -> list[State]:  # fmt: skip
    """One step of a new instance on these parameters, in place. Returns what it keeps of them now.

    Args:
        states: what it kept before, by parameter. Tensors are changed in place, or others returned for them.
        within: what the class's own `step()` is called in.
    """
    optimizer = made(cls, [torch.empty_like(params[0][:0])], options)  # its own sums, if it makes some here, are empty
    if lr is not None:  # what the constructor took from the first rate stays
        optimizer.param_groups[0]["lr"] = lr
    own = [param.detach() for param in params]
    optimizer.param_groups[0]["params"] = own
    optimizer.state = defaultdict(dict, {param: dict(state) for param, state in zip(own, states, strict=True)})
    for param, grad in zip(own, grads, strict=True):
        hand_over(param, grad)
    with within or nullcontext():
        optimizer.step()
    for param, mine in zip(own, params, strict=True):
        if param.data_ptr() != mine.data_ptr():  # it was given other data
            mine.copy_(param)
    return [optimizer.state[param] for param in own]


def hand_over(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a torch optimizer a gradient, in the only way that it takes one. The parameter is a tensor of this call's
    own, which nobody else sees and no autograd fills: `.grad` of a user's tensor is never touched."""
    setattr(param, "grad", grad)  # noqa: B010


# ---------------------------------------------------------------- what it keeps


class _Begun(dict[str, Any]):
    """A parameter's state that notes what each name was first set to."""

    def __init__(self, first: State, items: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__()
        self.first = first
        self.update(items)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.first.get(name) is None:  # None: there will be something
            self.first[name] = value.clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


class _States(dict[torch.Tensor, _Begun]):
    def __init__(self, first: State) -> None:
        super().__init__()
        self.first = first

    def __missing__(self, param: torch.Tensor) -> _Begun:
        self[param] = {}
        return self[param]

    def __setitem__(self, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        super().__setitem__(param, _Begun(self.first, state.items()))


def _begin(cls: Any, options: Mapping[str, Any], device: torch.device) -> dict[str, Kept]:
    """What a class begins with: what it first sets, where all gradients are zero."""
    param = _values(0, device)
    first: State = {}
    optimizer = made(cls, [param], options)
    states = _States(first)
    for one, state in optimizer.state.items():
        states[one] = state
    optimizer.state = states
    hand_over(param, torch.zeros_like(param))
    weights = param.clone()
    optimizer.step()
    kept = {}
    for name, value in first.items():
        if value is None:
            continue
        if isinstance(value, bool | int | float):
            wide = torch.float64 if isinstance(value, float) else torch.int64
            kept[name] = Kept(True, float(value), wide, (), type(value), not lies_on_host(param))
        elif not isinstance(value, torch.Tensor):
            refuse(
                cls, f"it keeps a {type(value).__name__} as {name!r}, which is neither a tensor nor a number",
                "Write an (init, update) pair, as examples/lion.py",
            )  # fmt: skip
        elif value.numel() == 1:
            host = value.device != param.device
            kept[name] = Kept(True, float(value), value.dtype, tuple(value.shape), None, host)
        elif value.shape != param.shape:
            refuse(
                cls, f"it keeps {list(value.shape)} elements as {name!r} of a parameter of {list(param.shape)}",
                "Use one that keeps a tensor like the parameter, or a number",
            )  # fmt: skip
        else:
            dtype = None if value.dtype is param.dtype else value.dtype
            start: float | None = float(value[0])
            if torch.equal(value, weights):
                start = WEIGHTS
            elif bool((value != value[0]).any()):
                start = 0.0  # a first gradient with its decay, say: what zeros give, too, or it is refused
            kept[name] = Kept(False, start, dtype)
    return kept


def _rated(some: Mapping[str, Kept], rate: float, others: Mapping[str, Kept], other: float) -> tuple[str, ...]:
    """Names of what begins as the rate, on a device that has a count of steps beside it."""
    alike = partial(math.isclose, rel_tol=1e-6)
    found = [
        name
        for name, one in some.items()
        if not one.python and not one.host and name in others
        if alike(one.value or 0.0, rate) and alike(others[name].value or 0.0, other)
    ]
    count = some.get("step")
    return tuple(found) if count and count.number and not count.python and not count.host else ()


def _first(one: Kept) -> bool:
    return one.number and one.value == 1


def _from_zero(kept: Mapping[str, Kept]) -> dict[str, Kept]:
    return {name: one._replace(value=0.0) if _first(one) else one for name, one in kept.items()}


def states_of(kept: Mapping[str, Kept], param: torch.Tensor) -> State:
    """What a class is given for a parameter before its first step."""
    found: State = {}
    for name, one in kept.items():
        if not one.number:
            like = param.clone() if one.value is None else torch.full_like(param, one.value)
            found[name] = like.to(one.dtype or param.dtype)
        elif one.python:
            found[name] = one.python(one.value or 0)
        else:
            device = "cpu" if one.host else param.device
            found[name] = torch.full(one.shape, one.value or 0.0, dtype=one.dtype, device=device)
    return found


# ---------------------------------------------------------------- whether it is elementwise


def _values(seed: int, device: torch.device) -> torch.Tensor:
    """Twelve numbers, no two of them alike, [SIZE] float64."""
    i = torch.arange(1, SIZE + 1, dtype=torch.float64, device="cpu")
    return torch.sin(7.0 * i + 1.7 * seed * i + seed).to(device)


def _compare(cls: Any, options: Mapping[str, Any], kept: Mapping[str, Kept], device: torch.device) -> bool:
    wanted, keeps = _plain(cls, options, device, (SIZE,))
    matrix, _ = _plain(cls, options, device, (3, SIZE // 3))
    grouped, alone = (_pieces(cls, options, kept, device, apart) for apart in (False, True))
    fits = all(torch.allclose(wanted, other, rtol=1e-9, atol=1e-12) for other in (matrix, *grouped[:1], *alone[:1]))
    return fits and all(_alike(keeps, names) for _, names in (grouped, alone))


def _alike(wanted: Mapping[str, float | None], found: Mapping[str, float | None]) -> bool:
    """Whether the same is kept, by name, and numbers are the same ones: a count that is not shows in a late step."""
    pairs = [(value, found.get(name)) for name, value in wanted.items()]
    return wanted.keys() == found.keys() and all(
        a is None or b is None or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs
    )


def _numbers_in(state: State) -> dict[str, float | None]:
    """What is kept by name: of numbers their values."""
    return {
        name: float(value) if isinstance(value, int | float) or value.numel() == 1 else None
        for name, value in state.items()
        if value is not None
    }


def _plain(
    cls: Any, options: Mapping[str, Any], device: torch.device, shape: tuple[int, ...]
) -> tuple[torch.Tensor, dict[str, float | None]]:
    """As its author meant it: the weights after some steps, flat, and what it keeps by name."""
    param = _values(0, device).view(shape)
    optimizer = made(cls, [param], options)
    for step in range(1, STEPS + 1):
        hand_over(param, _values(step, device).view(shape))
        optimizer.step()
    return param.flatten(), _numbers_in(optimizer.state[param])


def _pieces(
    cls: Any, options: Mapping[str, Any], kept: Mapping[str, Kept], device: torch.device, apart: bool
) -> tuple[torch.Tensor, dict[str, float | None]]:
    """The same by `driven`, all pieces at once or one at a time."""
    whole = _values(0, device)
    params = whole.split(CUTS)
    states = [states_of(kept, param) for param in params]
    for step in range(1, STEPS + 1):
        grads = _values(step, device).split(CUTS)
        if apart:
            states = [
                driven(cls, options, [p], [g.clone()], [s])[0] for p, g, s in zip(params, grads, states, strict=True)
            ]
        else:
            states = driven(cls, options, params, [g.clone() for g in grads], states)
    return whole, _numbers_in(states[0])


def _takes_tensors(cls: Any, options: Mapping[str, Any], kept: Mapping[str, Kept], device: torch.device) -> bool:
    """Whether a learning rate may be a tensor on the device."""
    found = []
    for lr in (0.25, torch.full((), 0.25, dtype=torch.float32, device=device)):
        param = _values(0, device)
        try:
            driven(cls, options, [param], [_values(1, device)], [states_of(kept, param)], lr)
        except Exception:
            return False
        found.append(param)
    return torch.allclose(found[0], found[1], rtol=1e-9, atol=1e-12)


ORDER = ("elementwise", "leaf", "all", "random")
SHAPES = ((6, 8), (4, 3, 2, 2), (7,), (64, 72), (16, 24), (1, 5))
KEPT_IN_ORDER = {
    "copy_", "fill_", "zero_", "clone", "_to_copy", "detach", "alias", "lift_fresh", "zeros_like", "ones_like",
    "empty_like", "full_like", "view", "_unsafe_view", "unsqueeze", "squeeze", "resolve_conj", "view_as",
    "_reshape_alias", "contiguous",
}  # fmt: skip
FILLED = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided",
          "new_empty_strided"}  # fmt: skip
FUSED = {"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"}
ACROSS = {"norm", "max", "powsum"}  # `_foreach_` operations of these names reduce each tensor
HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}  # by these Python sees values
READS = {
    "shape": "the shape", "ndim": "the number of dims", "size": "the size", "dim": "the number of dims",
    "numel": "the number of elements", "nelement": "the number of elements", "__len__": "the length",
    "requires_grad": "requires_grad", "numpy": "values", "tolist": "values", "__array__": "values", "stride": "strides",
}  # fmt: skip
ARGUMENTS = (torch.Tensor, list, tuple)
LATE = (99, 999, 9_999, 99_999)  # counts at which branches are looked for
LACKS = {1: range(3), 3: range(2, 5), 4: range(7, 9)}  # steps in which a leaf gets no gradient, by leaf
Shapes = Sequence[tuple[int, ...]]
FACTOR = 10  # operations of a factorization, in products of its dims: of QR 2 to 4, of eigenvalues 9, of an SVD 20
MAKES = ("zeros(", "ones(", "full(", "empty(", "_like(")


class Finding(NamedTuple):
    """Why a class is not elementwise. way: "leaf", "all" or "random". where: file and line of the class's own code."""

    way: str
    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} ({self.where})" if self.where else self.why


class Observed(NamedTuple):
    """What was found of a class with some options: the way that it can go, and what decided.

    late: why it may go that way only in steps in which every leaf has a gradient; None: in all.
    """

    way: str
    finding: Finding | None
    late: Finding | None = None


def _frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of an optimizer's own code: of torch only torch.optim is that, and of this package none."""
    while frame is not None:
        file, ours = frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")).startswith("functional_fsdp.")
        if not ours and ("/torch/" not in file or "/torch/optim/" in file) and "<" not in file:
            return frame
        frame = frame.f_back
    return None


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    file = "/".join(frame.f_code.co_filename.split("/")[-3:])
    return f"{file}:{frame.f_lineno}: {text}"


class Watch(TorchDispatchMode):
    """Tensor operations: which of them are not elementwise, and which have several leaves."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.numels = numels
        self.touched: dict[int, frozenset[int]] = {}  # by storage
        self.uniform: set[int] = set()  # storages that are the same everywhere, by storage
        self.alive: list[Any] = []  # so that no storage comes again
        self.findings: dict[str, Finding] = {}
        self.reads = False  # whether Python saw a touched value
        self.names: list[str] = []

    def touch(self, tensor: torch.Tensor, leaf: int) -> None:
        self.alive.append(tensor)
        self.touched[tensor.untyped_storage()._cdata] = frozenset((leaf,))

    @contextmanager
    def and_reads(self) -> Iterator[None]:
        """Observe operations and what Python reads."""
        with self, Reads(self):
            yield

    def leaves_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        return frozenset().union(*(self.touched.get(t.untyped_storage()._cdata, ()) for t in tensors))

    def note(self, way: str, why: str) -> None:
        if way not in self.findings:
            self.findings[way] = Finding(way, why, _place(_frame(sys._getframe(1))))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        self.names.append(name)
        out = func(*args, **kwargs)
        rows: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a]
        lists = [a for a in lists if isinstance(a[0], torch.Tensor)]
        if lists and name.startswith(("_foreach_", "_fused_")):
            shared = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            outs = list(out) if isinstance(out, list | tuple) and out and isinstance(out[0], torch.Tensor) else []
            rows = [([one[i] for one in lists if i < len(one)] + shared, outs[i : i + 1]) for i in range(len(lists[0]))]
        else:
            rows = [(_tensors((*args, *kwargs.values())), _tensors((out,)))]
        for ins, outs in rows:
            self.alive += [*ins, *outs]
            self._look(func, name, ins, outs, args)
        return out

    def _look(
        self, func: Any, name: str, ins: list[torch.Tensor], outs: list[torch.Tensor], args: Sequence[Any]
    ) -> None:
        leaves = self.leaves_of(ins)
        writes = func._schema.is_mutable
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.note("random", f"{name} draws random numbers")
        if not leaves:
            if name in FILLED or name in KEPT_IN_ORDER:
                self.uniform |= {t.untyped_storage()._cdata for t in outs if all(self._is_uniform(one) for one in ins)}
            return
        if name in HOST_READS:
            self.reads = True
            self.note("leaf", f"Python reads a value computed from a {self._kind(leaves)}")
            return
        if len(leaves) > 1:
            self.note("all", f"{name} takes tensors of several leaves together")
        if name == "index_put_" and self._masks(args):
            pass
        elif not self._pointwise(func, name):
            if name in FILLED:  # of the shape that it was given
                self.uniform |= {t.untyped_storage()._cdata for t in outs}
                return
            self.note("leaf", f"{name} is not elementwise")
        else:
            numel, made = self.numels[min(leaves)], {*map(id, outs)}
            for one in (*ins, *outs):
                mine = self.touched.get(one.untyped_storage()._cdata)
                whole = one.numel() == numel
                if mine and not whole:
                    self.note("leaf", f"{name} takes a part or a summary of a leaf")
                elif not mine and one.numel() > 1 and not (whole and self._is_uniform(one)) and id(one) not in made:
                    self.note("leaf", f"{name} takes a tensor whose elements go by their place")
                elif whole and one.numel() > 1 and not one.is_contiguous():
                    self.note("leaf", f"{name} takes the elements of a leaf in another order")
        for one in (*outs, *(ins[:1] if writes and not outs else ())):
            self.touched[one.untyped_storage()._cdata] = leaves | self.leaves_of([one])
        if name.startswith(("_foreach_", "_fused_")) and writes:
            for one in ins:
                if one.numel() > 1 or self.leaves_of([one]):
                    self.touched[one.untyped_storage()._cdata] = leaves

    def _masks(self, args: Sequence[Any]) -> bool:
        """Whether an `index_put_` sets one number where a mask of the same shape is true."""
        target, (mask, *rest), value = args[:3]
        return (
            not rest
            and mask is not None
            and mask.dtype is torch.bool
            and mask.shape == target.shape
            and (value.numel() == 1)
        )

    def _is_uniform(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() <= 1 or tensor.untyped_storage()._cdata in self.uniform

    def _kind(self, leaves: frozenset[int]) -> str:
        return "leaf" if len(leaves) == 1 else "tensor of several leaves"

    def _pointwise(self, func: Any, name: str) -> bool:
        if name in FUSED or name in KEPT_IN_ORDER or torch.Tag.pointwise in func.tags:
            return True
        if name.startswith("_foreach_"):
            one = name.removeprefix("_foreach_").rstrip("_")
            if one in ACROSS:
                return False
            packet = getattr(torch.ops.aten, one, None)
            return one in ("copy", "zero") or (
                packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
            )
        return False


def _tensors(args: Iterable[Any]) -> list[torch.Tensor]:
    """Of an operation's arguments, and of lists among them."""
    each = ([one] if isinstance(one, torch.Tensor) else _tensors(one) for one in args if isinstance(one, ARGUMENTS))
    return [tensor for some in each for tensor in some]


class Reads(TorchFunctionMode):
    """Shapes, sizes and values that an optimizer's Python asks a touched tensor for."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in READS and args and isinstance(args[0], torch.Tensor):
            self._read(name, args[0], sys._getframe(1))
        return func(*args, **(kwargs or {}))

    def _read(self, name: str, tensor: torch.Tensor, frame: FrameType) -> None:
        file = frame.f_code.co_filename
        if "/torch/" in file and "/torch/optim/" not in file:
            return
        if not self.watch.leaves_of([tensor]) and tensor.numel() <= 1:
            return
        line = linecache.getline(file, frame.f_lineno)
        if name in ("shape", "size") and any(word in line for word in MAKES):
            return
        self.watch.reads |= READS[name] == "values"
        if "leaf" not in self.watch.findings:
            self.watch.findings["leaf"] = Finding("leaf", f"Python reads {READS[name]} of a leaf", _place(frame))


class Named(list[str]):
    """Names of leaves, which say that they are read."""

    def __init__(self, names: Iterable[str], read: Callable[[], Any]) -> None:
        super().__init__(names)
        self.read = read


def _noted(name: str) -> Any:
    def method(self: Named, *args: Any) -> Any:
        self.read()
        return getattr(list, name)(self, *args)

    return method


for _name in (
    "__add__", "__contains__", "__eq__", "__getitem__", "__iter__", "__ne__", "__reversed__", "copy", "count", "index",
    "pop",
):  # fmt: skip
    setattr(Named, _name, _noted(_name))


def give_names(optimizer: Any, names: Iterable[str], read: Callable[[], Any]) -> None:
    """Name an instance's leaves, where those have them that torch's own got as `model.named_parameters()`.

    read: called where the class reads them.
    """
    if len(optimizer.param_groups) == 1:
        optimizer.param_groups[0]["param_names"] = Named(names, read)


class Work(TorchDispatchMode):
    """Floating-point operations of products, as torch counts them, and of factorizations, by their largest term."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=out))
        elif "linalg_" in func._schema.name and isinstance(args[0], torch.Tensor) and args[0].ndim > 1:
            self.flops += FACTOR * args[0].numel() * min(args[0].shape[-2:])
        return out


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, what a class compiles runs as Python: who observes operations sees none of what is compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


@uncompiled()
def observed(
    make: Callable[[list[torch.Tensor]], Any], hand_over: Callable[[torch.Tensor, torch.Tensor | None], None],
    steps: int = 24, rates: Mapping[int, float] | None = None,
) -> Observed:  # fmt: skip
    """Observe a class for some steps, on leaves of several shapes; gradients have scales from 1e-4 to 1e4.

    Args:
        make: the instance of the class for some parameters.
        hand_over: gives a parameter its gradient.
        rates: learning rates by step, where they change.
    """
    matrices = tuple(shape for shape in SHAPES if len(shape) == 2)
    first: Exception | None = None
    tries = [(SHAPES, torch.float64), (SHAPES, torch.float32), (matrices, torch.float64)]
    for lacks, (shapes, dtype) in [(lacks, one) for lacks in (LACKS, {}) for one in tries]:
        try:
            found = _observed(make, hand_over, steps, rates, shapes, dtype, lacks)
        except Exception as error:  # a class may take some shapes or some dtypes only
            first = first or error
            continue
        if lacks and found.way == "all":
            always = _observed(make, hand_over, steps, rates, shapes, dtype, {})
            found = always if always.way == "all" else always._replace(late=found.finding)
        some = Finding("leaf", f"it takes no leaf of some shapes: {first}", "")
        return found._replace(way="leaf", finding=some) if shapes is matrices and found.finding is None else found
    assert first is not None
    raise first


def _observed(
    make: Any, hand_over: Any, steps: int, rates: Mapping[int, float] | None, shapes: Shapes,
    dtype: torch.dtype, lacks: Mapping[int, range],
) -> Observed:  # fmt: skip
    params = [_weight(i, shape, dtype) for i, shape in enumerate(shapes)]
    watch = Watch([p.numel() for p in params])
    optimizer = make(params)
    give_names(optimizer, map(str, range(len(params))), lambda: watch.note("leaf", "Python reads the name of a leaf"))
    before = beside(optimizer)
    for i, param in enumerate(params):  # what the constructor made
        for one in [v for v in optimizer.state.get(param, {}).values() if isinstance(v, torch.Tensor)]:
            even = one.shape == param.shape and (bool((one == one.flatten()[0]).all()) or torch.equal(one, param))
            if even:
                watch.touch(one, i)

    def step_of(step: int) -> None:
        for i, param in enumerate(params):
            grad = _gradient(step, i, shapes[i], dtype, lacks)
            hand_over(param, grad)
            watch.touch(param, i)
            if grad is not None:
                watch.touch(grad, i)
        _rate(optimizer, rates, step)
        with watch.and_reads():
            optimizer.step()

    for step in range(steps):
        step_of(step)
    together = [param.detach().clone() for param in params]
    if not watch.findings:
        for late in LATE:
            _count(optimizer, params, late)
            for step in range(2):  # one of an even count, one of an odd one
                step_of(steps + step)
    found = watch.findings
    changed = [k for k, v in beside(optimizer).items() if k not in before or not same(before[k], v)]
    if changed and "leaf" not in found:
        found["leaf"] = Finding("leaf", f"it keeps {changed[0]!r} beside the state of parameters", "")
    nested = [k for p in params for k, v in optimizer.state.get(p, {}).items() if v is None or _nested(v)]
    if nested and "leaf" not in found:
        found["leaf"] = Finding("leaf", f"its state has {nested[0]!r}, which is neither a tensor nor a number", "")
    if "all" not in found:
        wrong = _apart(make, hand_over, steps, rates, together, shapes, dtype, lacks)
        if wrong is not None:
            some = ", some of which have no gradient in some steps," if lacks else ""
            why = f"a leaf of shape {list(shapes[wrong])} goes another way beside other leaves{some} than alone"
            found["all"] = Finding("all", why, found["leaf"].where if "leaf" in found and not lacks else "")
    way = max(found, key=ORDER.index, default="elementwise")
    return Observed(way, found.get(way))


def _count(optimizer: Any, params: Sequence[torch.Tensor], count: int) -> None:
    """Set the counts of steps in the state of parameters, where there are some."""
    for state in [optimizer.state.get(param, {}) for param in params]:
        for name in [name for name in state if "step" in str(name) or "count" in str(name)]:
            value = state[name]
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value.detach().fill_(count)
            elif isinstance(value, int | float):
                state[name] = type(value)(count)


def _apart(
    make: Any, hand_over: Any, steps: int, rates: Any, together: list[torch.Tensor], shapes: Shapes,
    dtype: torch.dtype, lacks: Mapping[int, range],
) -> int | None:  # fmt: skip
    """The first leaf that comes out otherwise if it is alone; but for one beside it where it has no gradient, so that
    what the class counts by itself goes on."""
    for i, wanted in enumerate(together):
        param, other = (_weight(i, shapes[i], dtype) for _ in range(2))
        optimizer = make([param, other] if i in lacks else [param])
        give_names(optimizer, [str(i), "another"][: 1 + (i in lacks)], lambda: None)
        for step in range(steps):
            grad = _gradient(step, i, shapes[i], dtype, lacks)
            hand_over(param, grad)
            hand_over(other, torch.zeros_like(other) if grad is None else None)
            _rate(optimizer, rates, step)
            optimizer.step()
        if not torch.equal(param.detach(), wanted.detach()):
            return i
    return None


def _rate(optimizer: Any, rates: Mapping[int, float] | None, step: int) -> None:
    if rates:
        for group in optimizer.param_groups:
            group["lr"] = rates[step % len(rates)]


def numbers_like(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Numbers in [-1, 1], no two of them alike, float64."""
    i = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device="cpu")
    return torch.sin(12.9898 * i + 78.233 * torch.sin(4.1414 * i + seed)).view(tuple(shape))


def _weight(i: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.Parameter(numbers_like(shape, 100 + i).to(dtype))


def _gradient(
    step: int, i: int, shape: Sequence[int], dtype: torch.dtype, lacks: Mapping[int, range]
) -> torch.Tensor | None:
    if step in lacks.get(i, ()):
        return None
    scales = (1.0, 1e-4, 30.0, 1e4, 1e-2)
    return numbers_like(shape, 1000 * step + i).to(dtype) * scales[(step // 3 + i) % len(scales)]


def beside(optimizer: Any) -> dict[str, Any]:
    """What an instance keeps beside the state of its parameters, by name."""
    found = {f"group.{k}": v for k, v in optimizer.param_groups[0].items() if k not in ("params", "lr", "param_names")}
    own = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
    known = ("_optimizer_", "_zero_grad", "_patch", "_warned", "_opt_called", "_need_device_dtype_check_for_fused")
    found |= {f"self.{k}": v for k, v in own.items() if not k.startswith(known) and _simple(v)}
    found |= {f"state.{k}": v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}
    return {k: _copied(v) for k, v in found.items()}


def _simple(value: Any) -> bool:
    if type(value) is dict:
        return all(isinstance(key, str) and _simple(one) for key, one in value.items())
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _copied(value: Any) -> Any:
    if type(value) is dict and _simple(value):
        return {key: _copied(one) for key, one in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(a: Any, b: Any) -> bool:
    """Whether what an instance kept beside is the same."""
    if type(a) is dict and type(b) is dict:
        return a.keys() == b.keys() and all(same(one, b[key]) for key, one in a.items())
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return type(a) is type(b) and a.shape == b.shape and bool((a == b).all())
    return a is b or bool(a == b)


def _nested(value: Any) -> bool:
    return not isinstance(value, bool | int | float | torch.Tensor)
