"""What a step moves between host and device, and what may not be captured.

    Recording, Answering     what a step reads and copies, noted in warm-up and answered in the capture
    Guard, Steadiness        steps whose host reads are captured with what they read, and when that pays
    Randoms                  where generators of random numbers are, to go back to

`Recording`, `Answering`: what a step reads from the device on the host, and what it makes on the host and copies to the
device.

    warm-up    Recording: every read and every such constant, by the line that did it
    capture    Answering: a read gives what warm-up read there, and the graph compares; a constant is a copy that lay on
               the device before, compared with warm-up's

Both are dispatch modes: they see operators, eager ones and those that compiled code calls.

`Guard`: steps whose host reads from the device are captured with what they read in warm-up.

Before a step ranks replay if each of them has a graph for what it read last; else all of them step eagerly. Then:

    device   forward ─▶ reads compared ─▶ flag ─▶ all ranks' flags ─▶ the update, where it is 0
    host                                                 └──▶ pinned memory ─▶ commits, or they all step eagerly
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functional_fsdp import ScheduleError, State
from functional_fsdp._seams import Veto, Vetoed, torch_private
from functional_fsdp.extend import Ranks, bytes_of

from .capturing import refusal, running_line, text_of

SMALL = 64 * 1024  # bytes of a copy to the host that is compared in each replay
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
COMPARISONS = (aten.equal.default, aten.allclose.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)

WAITS = (
    "the host reads from the device here (.item(), .tolist(), .cpu(), print, `if tensor:`, torch.equal), which a graph "
    "does not do. Keep it on the device, or return it and look at it outside"
)
GUARD = '. If it reads the same in most steps: T.cuda_graph(step, host_reads="guard")'

Key = tuple[str, str, int]  # what it is, the line, and which time this is in the step
Values = tuple[tuple[Key, bytes], ...]  # what a step read, and where


class Read(NamedTuple):
    """A read of the host's: what it gave, and how the graph asks whether it still would."""

    given: Any  # a number, a bool, or a tensor in the host's memory
    bits: bytes
    source: torch.Tensor | None  # on the host: what the device is compared with; None for a comparison's result


class Sides:
    """Which tensors lie on the device, which on the host, and the way between."""

    def __init__(self, device: torch.device) -> None:
        self.to = device

    def device(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device.type == self.to.type

    def host(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"

    def goes_to_host(self, source: torch.Tensor, options: dict[str, Any]) -> bool:
        """Of `_to_copy`."""
        there = options.get("device")
        return self.device(source) and there is not None and torch.device(there).type == "cpu"

    def goes_to_device(self, source: torch.Tensor, options: dict[str, Any]) -> bool:
        there = options.get("device")
        return self.host(source) and there is not None and torch.device(there).type == self.to.type

    def put(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.to, copy=True)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)


def bits(host: torch.Tensor) -> bytes:
    """A host tensor's shape, dtype and bytes."""
    flat = as_bytes(host)
    return f"{text_of(host)} ".encode() + bytes_of(flat)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes], where the tensor is."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Watching(torch_private.TorchDispatchMode):
    """What both have in common: they know the operators that go from one side to the other."""

    supports_higher_order_operators = True

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self.sides = sides
        self.times: Counter[tuple[str, str]] = Counter()
        self.lifted = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as it does without

    def __enter__(self) -> Any:
        self.lifted = torch_private.lifts_on_host()
        torch_private.lift_on_host(True)
        try:
            return super().__enter__()
        except BaseException:
            torch_private.lift_on_host(self.lifted)
            raise

    def __exit__(self, *error: Any) -> None:
        torch_private.lift_on_host(self.lifted)
        super().__exit__(*error)

    def key(self, what: str) -> tuple[Key, bool]:
        """Of what happens now; and whether this library does it."""
        line, ours = running_line()
        self.times[what, line] += 1
        return (what, line, self.times[what, line]), ours

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch_private.to_scalar:
            if self.sides.device(args[0]):
                return self.read(func, args, kwargs, args[0])
        elif func in COPIES:
            return self._copied(func, args, kwargs)
        elif func in COMPARISONS:
            if self.sides.device(args[0]):
                return self.read(func, args, kwargs, None)
        elif func in INDEXED:
            there = [self.sides.host(one) for one in args[1]]
            if any(there) and self.sides.device(args[0]):
                index = [self.constant(one) if mine else one for one, mine in zip(args[1], there, strict=True)]
                return func(args[0], index, *args[2:], **kwargs)
        self._operands(args, kwargs)
        return self.other(func, args, kwargs)

    def _operands(self, args: Any, kwargs: Any) -> None:
        """A tensor [] of the host's beside tensors on the device goes to the kernel as a number."""
        given = [*args, *kwargs.values()]
        flat = [one for some in given for one in (some if isinstance(some, list | tuple) else (some,))]
        numbers = [one for one in flat if self.sides.host(one) and not one.dim()]
        if numbers and any(map(self.sides.device, flat)):
            for number in numbers:
                self.operand(number)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.copy_.default:
            into, source = args[:2]
            if self.sides.device(source) and self.sides.host(into):
                later = (args[2] if len(args) > 2 else kwargs.get("non_blocking")) and into.is_pinned()
                return func(*args, **kwargs) if later else self.read(func, args, kwargs, source)  # who waits for it?
            if self.sides.host(source) and self.sides.device(into):
                return func(into, self.constant(source), *args[2:], **kwargs)
        elif self.sides.goes_to_host(args[0], kwargs):
            return self.read(func, args, kwargs, args[0])
        elif self.sides.goes_to_device(args[0], kwargs):
            return func(self.constant(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def read(self, func: Any, args: Any, kwargs: Any, source: torch.Tensor | None) -> Any:
        raise NotImplementedError

    def constant(self, host: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def operand(self, number: torch.Tensor) -> None:
        raise NotImplementedError

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Recording(Watching):
    """An eager step, and afterwards what it read and made, in order: `reads`; as the host has them `constants`, which
    are copied, and `operands`, which kernels get as numbers."""

    def __init__(self, sides: Sides) -> None:
        super().__init__(sides)
        self.reads: dict[Key, Read] = {}
        self.constants: dict[Key, torch.Tensor] = {}
        self.operands: dict[str, list[torch.Tensor]] = {}  # by line; this library's are one, which calls in other parts

    def values(self) -> Values:
        """What was read, and where: equal for steps that read the same."""
        return tuple((key, one.bits) for key, one in self.reads.items())

    def read(self, func: Any, args: Any, kwargs: Any, source: torch.Tensor | None) -> Any:
        key, ours = self.key("read")
        if ours:  # as the vote's flag
            return func(*args, **kwargs)
        if source is None or source.nbytes > SMALL:  # which no graph compares
            given = func(*args, **kwargs)
            self.reads[key] = Read(given, str(given).encode() if source is None else b"", None)
            return given
        host = self.sides.get(source)
        given = func(*args, **kwargs)
        self.reads[key] = Read(given.clone() if isinstance(given, torch.Tensor) else given, bits(host), host)
        return given

    def constant(self, host: torch.Tensor) -> torch.Tensor:
        key, _ = self.key("constant")
        self.constants[key] = host.detach().clone()
        return host

    def operand(self, number: torch.Tensor) -> None:
        line, ours = running_line()
        self.operands.setdefault("" if ours else line, []).append(number.detach().clone())


class Answering(Watching):
    """A step that is captured, after one that was recorded.

    Args:
        differs: is given a bool tensor [] on the device: whether a read would give something else now. None: reads are
            an error.
        over: whether the step has been decided, so that no read can be compared any more.
    """

    def __init__(
        self,
        sides: Sides,
        before: Recording,
        differs: Callable[[torch.Tensor], None] | None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(sides)
        self.before, self.differs, self.over = before, differs, over
        self.drawn: list[str] = []  # lines that draw on the host
        self.there = {key: sides.put(one) for key, one in before.constants.items()}
        self.expected = {
            key: sides.put(as_bytes(one.source)) for key, one in before.reads.items() if one.source is not None
        }
        self.seen = 0

    def read(self, func: Any, args: Any, kwargs: Any, source: torch.Tensor | None) -> Any:
        key, ours = self.key("read")
        if ours:
            return func(*args, **kwargs)
        if self.differs is None:
            raise refusal(key[1], WAITS + GUARD)
        if self.over():
            raise refusal(
                key[1],
                "the host reads from the device after step(), when it is too late to take the step back. Read before "
                "step(), or return the tensor and look at it outside",
            )
        if source is not None and source.nbytes > SMALL:
            raise refusal(
                key[1],
                f"the host reads {source.nbytes:,} bytes, more than a replay compares ({SMALL:,}). Keep them on the "
                "device, or return them",
            )
        found = self.before.reads.get(key)
        if found is None:
            raise refusal(key[1], "the host reads from the device where it did not in warm-up, so nobody knows what")
        self.seen += 1
        if source is None:
            self.differs(_compared(func, args, kwargs) != found.given)
            return found.given
        now = as_bytes(source)
        if now.shape != self.expected[key].shape or source.dtype is not found.source.dtype:  # type: ignore[union-attr]
            raise refusal(key[1], f"the host reads {text_of(source)}, and read {text_of(found.source)} in warm-up")
        self.differs((now != self.expected[key]).any())
        if func is aten.copy_.default:
            args[0].copy_(found.given)
            return args[0]
        return found.given.clone() if isinstance(found.given, torch.Tensor) else found.given

    def constant(self, host: torch.Tensor) -> torch.Tensor:
        key, _ = self.key("constant")
        _same(key[1], self.before.constants.get(key), host, "is copied from the host to the device")
        return self.there[key].clone()  # the step may write to it

    def operand(self, number: torch.Tensor) -> None:
        line, ours = running_line()
        before = self.before.operands.get("" if ours else line, [])
        if ours and not before:  # a capture has work of its own
            return
        found = next((one for one in before if bits(one) == bits(number)), before[-1] if before else None)
        _same(line, found, number, "lies on the host and takes part in what the device computes")

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            first = out[0] if isinstance(out, tuple | list) and out else out
            if self.sides.host(first):
                self.drawn.append(running_line()[0])
        return out

    def finished(self) -> None:
        """The step is captured whole.

        Raises:
            ScheduleError: warm-up read something that this step has not.
        """
        if self.differs is not None and self.seen != len(self.before.reads):
            missing = next(key for key in self.before.reads if self.times["read", key[1]] < key[2])
            raise refusal(
                missing[1], "the host read from the device there in warm-up, and not in the step that was captured"
            )
        for line in dict.fromkeys(self.drawn):
            warnings.warn(
                f"cuda_graph: the step draws random numbers on the host at {line}. What was drawn when it was captured "
                "is what every replay has. Draw on the device, or pass what was drawn with the batch, as a tensor.",
                RuntimeWarning,
                stacklevel=6,
            )


def _compared(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """torch.equal or torch.allclose on the device: a bool []."""
    if func is aten.allclose.default:
        return torch.isclose(*args, **kwargs).all()
    one, other = args
    if one.shape != other.shape:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    return (one == other).all()


def _same(line: str, found: torch.Tensor | None, host: torch.Tensor, what: str) -> None:
    """Refuse what warm-up had not, or had with another value."""
    if found is None:
        raise refusal(
            line,
            f"a tensor ({text_of(host)}) {what}, which was not so in warm-up, so it may change from step to step. Make "
            "it on the device, or pass it with the batch",
        )
    if bits(host) != bits(found):
        raise refusal(
            line,
            f"a tensor ({text_of(host)}) that {what} has changed since warm-up: {_few(found)} then, {_few(host)} now. "
            "A graph would keep what it is now. Pass it with the batch, or make it on the device of what changes there",
        )


def _few(host: torch.Tensor) -> str:
    some = host.reshape(-1)[:4].tolist()
    return f"{some[0] if host.numel() == 1 else some}{' ...' if host.numel() > 4 else ''}"


UNKNOWN = -1
POLL = 2e-5  # seconds
MISSES, WINDOW = 4, 100  # a line that misses more often in so many steps is not worth a graph


class Guard:
    """The flag of one graph: whether a read would have given something else, on this rank, and then on any."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device
        self.flag = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        self.host = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=ranks.device.type == "cuda")
        self.seen = bytes_of(self.host).cast("i")

    def differs(self, one: torch.Tensor) -> None:
        """Captured: take the step back where this is true."""
        self.flag.bitwise_or_(one)

    def veto(self, state: State) -> Veto:
        return Veto(state, self.flag, self.host)

    def before(self) -> None:
        """A replay is about to be launched."""
        self.seen[0] = UNKNOWN

    def after(self) -> None:
        """Wait until the replay has said it, long before it is done.

        Raises:
            Vetoed: the step is not taken, on any rank.
        """
        stream = torch.cuda.current_stream(self.device)
        while self.seen[0] == UNKNOWN:
            if stream.query():  # raises what went wrong on the device
                break
            time.sleep(POLL)
        if self.seen[0] == UNKNOWN:
            raise RuntimeError("cuda_graph: a replay has ended without a word on what it compared")
        if self.seen[0]:
            raise Vetoed


class Randoms:
    """Where the host's and the device's default generators are, to go back to."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.generator
        self.drawn = None if self.device is None else self.device.get_state()
        self.host = torch.default_generator.get_state()
        self.python = random.getstate()
        self.numpy: Any = sys.modules.get("numpy.random")
        self.numbers = self._numbers()

    def back(self) -> None:
        if self.device is not None:
            self.device.set_state(self.drawn)
        torch.default_generator.set_state(self.host)
        random.setstate(self.python)
        if self.numpy:
            self.numpy.set_state(self.numbers)

    def _numbers(self) -> Any:
        return self.numpy and self.numpy.get_state()

    def moved(self) -> list[str]:
        """Which of the host's own have drawn since, beside torch's."""
        found = ["random"] if random.getstate() != self.python else []
        if self.numpy and not all(map(_alike, self._numbers(), self.numbers)):
            found.append("numpy.random")
        return found


def _alike(a: Any, b: Any) -> bool:
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())


class Steadiness:
    """What steps of one signature have read on this rank: which graph the next one replays, and whether it pays.

    Attributes:
        latest, earlier: the last two steps that ran eagerly.
        values: what the last one read; () where reads are not compared.
        steady: whether the last two read the same.
        eager: it did not pay.
    """

    def __init__(self, compares: bool = True) -> None:
        self.compares = compares
        self.latest: Recording | None = None
        self.earlier: Recording | None = None
        self.values: Values = ()
        self.steady = True
        self.steps = 0
        self.misses: dict[str, deque[int]] = {}
        self.eager = False

    def ran(self, record: Recording) -> None:
        """A step ran eagerly."""
        self.earlier, self.latest = self.latest, record
        before, self.values = self.values, record.values() if self.compares else ()
        self.steady = not self.values or self.values == before

    def missed(self, before: Values) -> None:
        """A replay of the graph for these values was taken back, and its step ran eagerly. Where peers were the cause,
        nothing has changed here."""
        was = dict(before)
        for key, value in self.values:
            if was.get(key) != value:
                found = self.misses.setdefault(key[1], deque(maxlen=MISSES + 1))
                found.append(self.steps)
                if len(found) > MISSES and self.steps - found[0] < WINDOW:
                    self.eager = True
                    warnings.warn(
                        f"cuda_graph: what the host reads from the device at {key[1]} has changed {len(found)} times "
                        f"in {self.steps - found[0] + 1} steps. Steps of this signature run eagerly from now on. Keep "
                        "it on the device.",
                        RuntimeWarning,
                        stacklevel=7,
                    )
                return

    def unsteady(self) -> ScheduleError:
        """Why no step of this signature can be captured."""
        assert self.latest is not None
        assert self.earlier is not None
        was = self.earlier.reads
        key = next((k for k, one in self.latest.reads.items() if k not in was or was[k].bits != one.bits), None)
        if key is None:
            key = next(k for k in was if k not in self.latest.reads)
        then, now = (str(r.reads[key].given) if key in r.reads else "nothing" for r in (self.earlier, self.latest))
        return refusal(
            key[1],
            f"what the host reads from the device changes from step to step ({then[:80]}, then {now[:80]}). Keep it on "
            "the device, or return it and look at it outside",
        )
