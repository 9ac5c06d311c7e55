"""Which torch.optim classes work on parts of flat buffers, and what they keep of a parameter: found by trying.

A rank has pieces of leaves, flat, wherever its slices of buckets are cut. So an optimizer has to be elementwise: what
it makes of an element follows from that element, its gradients, what is kept for it, and numbers that all elements
share.

    plain     the class as a user has it, on a vector and on a matrix
    driven    as `FromTorch` has it: pieces, a new instance in each step, state handed in and taken out

Both take fourteen steps on twelve numbers. If they differ, the class is not run this way. This finds out how the state
of a class is held; that the class is elementwise is proved, see `prove`.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from .._common.device import lies_on_host
from .._common.errors import SpecError

__all__ = [
    "WEIGHTS",
    "Kept",
    "Known",
    "driven",
    "hand_over",
    "learned",
    "made",
    "name_of",
    "refuse",
    "refuse_known",
    "states_of",
]

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
    """

    kept: dict[str, Kept]
    options: dict[str, Any]
    rates: bool

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
    return Known(kept, own, rates)


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
