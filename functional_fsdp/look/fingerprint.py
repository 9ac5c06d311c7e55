"""Steps that note digests of what goes through them, and two such runs compared.

fingerprint: a train step that notes digests of all that goes through it.

    batch ── input      unshard ── weight      forward of a unit ── output      reduce ── gradient, of this rank
    finish_reductions ── reduced       step ── given: the gradients that it gets        after it ── update

The runtime of a mesh shows each verb, and each forward of a driven unit, to its `watcher`, if it has one. Here is the
only one there is. Each rank digests what it has; parts of shards add up to the leaf, whatever the placement.

Digests: what a fingerprint keeps of a tensor. Parts of a tensor add up to the digest of the whole.

hash           int64: mixed bits of each element and its place, added up with wrap-around: equal or not
squares        float64: the sum of squares
projections    two float64: sums of the elements, each with a random sign of its own place: of a difference of two
               tensors they say how large it is, and they are linear, so gradients of ranks have the mean of theirs

Prints: the fingerprints of steps, as a value: plain numbers, saved to a file and read again, without ranks.

compare: where two runs part, from their fingerprints. Pure: numbers in, a verdict out, perhaps a picture.

What comes first in time is the cause; its kind, with what was alike before it, says the class.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._common.calls import outside_inference
from .._common.device import default_generator
from .._common.errors import expect
from .._common.torch_names import pytree
from .._extend import by_unit, shards
from .._runtime.runtime import Runtime, runtime_of
from .._shared.torch_names import base_of
from .._state.state import State
from .._storage import FlatBuffer, PackedWeight, leaf_shards
from .._verbs import finish_reductions
from .draw import FAINT, GREY, INK, Page, colours_of
from .observe import state_in

Digest = tuple[torch.Tensor, torch.Tensor]  # int64 [], float64 [3]
CHUNK = 1 << 22  # elements at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
A, B, C = 0x1E3779B97F4A7C15, -0x40A7B892E31B1A47, 0x14CEB9FE1A85EC53


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 30)) * B
    x = (x ^ (x >> 27)) * C
    return x ^ (x >> 31)


def digest(tensor: torch.Tensor, start: int = 0, rows: bool = False) -> Digest:
    """The digest of a tensor, on its device; nothing waits.

    Args:
        start: the place of its first element in the whole, where it is a part of a flat tensor.
        rows: places count within a row (a part along the first dim), so that rows may lie on any rank, in any order.

    >>> t = torch.arange(9.0)
    >>> whole, a, b = digest(t), digest(t[:5]), digest(t[5:], 5)
    >>> bool(whole[0] == a[0] + b[0]), float(whole[1][0])
    (True, 204.0)
    """
    x = base_of(tensor).detach()  # of all samples, within a vmap
    if x.is_nested:
        x, rows = torch.cat([part.reshape(-1) for part in x.unbind()] or [x.new_empty(0)]), False
    if x.is_quantized:
        x = x.dequantize()
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.dtype is torch.float4_e2m1fn_x2:
        x = x.view(torch.uint8)
    width = x.numel() // len(x) if rows and x.dim() and len(x) else 0
    x = x.reshape(-1)
    if x.dtype is torch.bool:
        x = x.to(torch.int8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    numbers = torch.zeros(3, dtype=torch.float64, device=x.device)
    for first in range(0, x.numel(), CHUNK):
        part = x[first : first + CHUNK]
        place = torch.arange(start + first, start + first + part.numel(), dtype=torch.int64, device=x.device)
        if width:
            place %= width
        place = _mixed(place * A + C)
        bits = part.view(BITS[part.element_size()]).to(torch.int64)
        total += _mixed(bits * A ^ place).sum()
        value = part.to(torch.float64)
        signs = [1 - 2 * (place >> shift & 1) for shift in (7, 19)]
        numbers += torch.stack([value.dot(value), *[value.dot(sign.to(torch.float64)) for sign in signs]])
    return total, numbers


FORMAT = 1
#: what is digested, and the lane that it comes from
LANES = {
    "input": "compute",
    "main": "update",
    "moment": "update",
    "weight": "gather",
    "output": "compute",
    "gradient": "compute",
    "reduced": "reduce",
    "given": "update",
    "update": "update",
    "result": "compute",
    "rng": "compute",
}


class Key(NamedTuple):
    """What a row of numbers is of.

    Attributes:
        kind: one of `LANES`.
        unit: by its name; "" for what is the step's.
        leaf: the path of a leaf, or the path of a tensor in a batch or in outputs.
        nth: how often it came in this step before.
    """

    kind: str
    unit: str
    leaf: str
    nth: int


class Row(NamedTuple):
    """The numbers of one rank, or of all together: hash, sum of squares, two projections, see `digest`."""

    hash: int
    squares: float
    first: float
    second: float


@dataclass
class Step:
    """One step: for each key the rows of all ranks, in order; one row where it is the same for all.

    Attributes:
        number: how many steps were taken before it.
        rows: in order of time.
        uses: of weights, which use of the cursor each was.
        dtypes: by kind, unit and leaf.
    """

    number: int
    rows: dict[Key, tuple[Row, ...]] = field(default_factory=dict)
    uses: dict[Key, int] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)


def _step(said: Any, ranks: int) -> Step:
    """A step, of what `Prints.save` wrote of it."""
    step = Step(int(said["number"]))
    for kind, unit, leaf, nth, use, dtype, rows in said["rows"]:
        key = Key(kind, unit, leaf, nth)
        texts = all(isinstance(text, str) for text in (kind, unit, leaf, dtype))
        if not texts or type(nth) is not int or kind not in LANES or not 1 <= len(rows) <= ranks:
            raise ValueError(f"{len(rows)} rows of {key!r}")
        step.rows[key] = tuple(Row(int(h), float(squares), float(p), float(q)) for h, squares, p, q in rows)
        if use is not None:
            step.uses[key] = use
        step.dtypes[key] = dtype
    return step


@dataclass
class Prints:
    """The fingerprints of some steps of a run.

    Attributes:
        ranks: how many there were.
        setting: what decides bits: mesh, placements, precisions, the average of gradients, the device.
        average: "mean" or "sum", as `Spec` has it.
        steps: in order.
    """

    ranks: int = 0
    setting: str = ""
    average: str = "mean"
    steps: list[Step] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write them as JSON. Where several ranks have them, let one of them do it."""
        said: dict[str, Any] = {"format": FORMAT, "ranks": self.ranks, "setting": self.setting, "average": self.average}
        said["steps"] = [
            {
                "number": step.number,
                "rows": [[*key, step.uses.get(key), step.dtypes.get(key, ""), rows] for key, rows in step.rows.items()],
            }
            for step in self.steps
        ]
        path = Path(path)
        path.write_text(json.dumps(said))
        return path

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Prints:
        """Read what `save` wrote.

        Raises:
            ValueError: it is no such file.
        """
        try:
            said = json.loads(Path(path).read_text())
            known = said["format"]
            if known == FORMAT:
                ranks, setting, average = said["ranks"], said["setting"], said["average"]
                if type(ranks) is not int or not isinstance(setting, str) or average not in ("mean", "sum"):
                    raise ValueError(f"{ranks!r} ranks, the setting {setting!r}, the average {average!r}")
                return cls(ranks, setting, average, [_step(one, ranks) for one in said["steps"]])
        except (ValueError, KeyError, TypeError, OverflowError, IsADirectoryError) as error:
            raise ValueError(
                f"{str(path)[:200]} is no file of fingerprints: {error!r}. Give one that Prints.save wrote."
            ) from None
        raise ValueError(f"{path} has fingerprints of format {known}; this version reads format {FORMAT}.")

    def __repr__(self) -> str:
        of = f"{len(self.steps)} steps" if len(self.steps) != 1 else "1 step"
        return f"Prints of {of} on {self.ranks} rank{'s' * (self.ranks != 1)}: {self.setting}"


Axes = tuple[str, ...]
Noted = tuple[Digest, Axes | None, int | None, str]  # digest; along what parts add up; use; dtype


def fingerprint(train_step: Callable[..., Any]) -> Fingerprinted:
    """The same train step, which notes a hash, a norm and two projections of what goes through it. See `compare`.

    | kind       | what it is of                                                                         | by      |
    |------------|---------------------------------------------------------------------------------------|---------|
    | `input`    | each tensor of the arguments but the state                                            | rank    |
    | `main`     | main weights before the step; `moment`: what the optimizer keeps beside them          | leaf    |
    | `weight`   | weights as `unshard` gives them, at each use                                          | leaf    |
    | `output`   | what the forward of a driven unit returns                                             | rank    |
    | `gradient` | what `reduce` is given                                                                | rank    |
    | `reduced`  | gradients after the reduction; `given`: those that `step` gets, after clipping, say   | leaf    |
    | `update`   | main weights after the step, and by how much they moved                               | leaf    |
    | `result`   | what else the train step returns                                                      | rank    |
    | `rng`      | the default generator, where numbers may be drawn                                     | rank    |

    Args:
        train_step: `train_step(state, *args, **kwargs)`, which returns the new state, or a tuple or another tree with
            it. In any of the three ways; of compiled steps and replayed graphs, where no Python runs, there are
            `input`, `main`, `moment`, `update` and `result`.

    Returns:
        a function that is called as `train_step`, and changes no bit of what that does. Its `prints` are a `Prints`,
        the same on every rank.

    Raises (from it):
        TypeError: the first argument is no State. Whatever `train_step` raises: then nothing is noted.

    A step waits for the device at its end, and takes as much memory beside it as 4 million elements of the largest
    tensor take, some times over.

    Collective: those of `train_step`, and one gather on the host of some dozen bytes for each leaf and kind.

    Example: `step = fsdp.fingerprint(train_step)`; `state, loss = step(state, batch)`; `step.prints.save("a.json")`.
    """
    return Fingerprinted(train_step)


class Fingerprinted:
    """What `fingerprint` returns."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        self.train_step = expect("fingerprint(train_step)", train_step, Callable, "a function of (state, ...)")
        self.prints = Prints()
        self._keys: dict[int, list[Any]] = {}
        update_wrapper(self, train_step, updated=())

    @outside_inference
    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise TypeError(f"fingerprint: the first argument is a State, not {type(state).__name__}.")
        run = runtime_of(state.spec.mesh)
        if not self.prints.ranks:
            self.prints = Prints(run.size, _setting(state, run), state.spec.average)
        watch = Watch(run)
        number = state.steps
        watch.tree("input", (args, kwargs))
        watch.rng("")
        watch.buffers(state, "main", state.main)
        watch.moments(state)
        before = {key: noted[0][1] for key, noted in watch.noted.items() if key.kind == "main"}
        with run.watched(watch):
            out = self.train_step(state, *args, **kwargs)
        new = state_in(out)
        if new is not None:
            watch.updates(new, before)
            state = new
        watch.tree("result", out)
        self.prints.steps.append(self._together(run, number, watch.noted))
        return out

    def _together(self, run: Runtime, number: int, noted: dict[Key, Noted]) -> Step:
        """What all ranks noted in a step."""
        hashes = [h.cpu() for (h, _), *_ in noted.values()]
        numbers = [n.cpu() for (_, n), *_ in noted.values()]
        about = [(*key, along, use, dtype) for key, (_, along, use, dtype) in noted.items()]
        known = self._keys.get(-1) == about  # the receivers have them
        self._keys[-1] = about
        values = torch.stack(hashes).tolist(), torch.stack(numbers).tolist()
        found = run.everyone((None if known else about, *values), "fingerprints")
        for rank, (keys, *_) in enumerate(found):
            if keys is not None:
                self._keys[rank] = keys
        return combined(number, [(self._keys[rank], h, n) for rank, (_, h, n) in enumerate(found)], places(run))


def places(run: Runtime) -> list[dict[str, int]]:
    """Where each rank stands on each axis, in order of ranks."""
    indices = torch.nonzero(torch.ones_like(run.grid)).tolist()
    where = [dict(zip(run.sizes, at, strict=True)) for at in indices]
    return [where[i] for i in torch.argsort(run.grid.flatten()).tolist()]


def combined(
    number: int, found: list[tuple[list[Any], list[int], list[list[float]]]], at: list[dict[str, int]]
) -> Step:
    """One step of all ranks: parts of shards are added up, and rows that are alike are one."""
    step = Step(number)
    rows: dict[Key, dict[int, Row]] = {}
    alongs: dict[Key, Axes | None] = {}
    for rank, (keys, hashes, numbers) in enumerate(found):
        for (*name, along, use, dtype), h, n in zip(keys, hashes, numbers, strict=True):
            key = Key(*name)
            rows.setdefault(key, {})[rank] = Row(h, *n)
            alongs.setdefault(key, along)
            step.dtypes.setdefault(key, dtype)
            if use is not None:
                step.uses.setdefault(key, use)
    for key, by_rank in rows.items():
        along = alongs[key]
        if along is None:
            every = tuple(by_rank.get(rank, Row(0, 0.0, 0.0, 0.0)) for rank in range(len(found)))
        else:
            groups: dict[tuple[Any, ...], list[Row]] = {}
            for rank, row in by_rank.items():
                groups.setdefault(tuple(n for axis, n in at[rank].items() if axis not in along), []).append(row)
            every = tuple(_sum(group) for group in groups.values())
        step.rows[key] = every[:1] if all(repr(row) == repr(every[0]) for row in every) else every
    return step


def _sum(rows: list[Row]) -> Row:
    total = sum(row.hash for row in rows) & 2**64 - 1
    rest = (sum(column) for column in zip(*(row[1:] for row in rows), strict=True))
    return Row(total - (total >> 63 << 64), *rest)


def _setting(state: State, run: Runtime) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in run.sizes.items())
    buckets = {
        f"{b.placement} {b.main} {b.compute} {b.gather_codec or b.gather} {b.wire} {b.grads}"
        for b in state.layout.buckets.values()
    }
    return f"mesh {mesh or 'of 1'}; {state.spec.transport}; {run.device.type}; {'; '.join(sorted(buckets))}"


class Watch:
    """What one rank notes of one step; the `watcher` of its runtime meanwhile."""

    def __init__(self, run: Runtime) -> None:
        self.run = run
        self.noted: dict[Key, Noted] = {}
        self.seen: Counter[tuple[str, str, str]] = Counter()
        self.reduced = True  # whether nothing was given to `reduce` since gradients were noted after it

    def note(
        self, kind: str, unit: str, leaf: str, found: Digest, along: Axes | None = None, use: int | None = None,
        dtype: torch.dtype | str = "",
    ) -> None:  # fmt: skip
        nth = self.seen[kind, unit, leaf]
        self.seen[kind, unit, leaf] += 1
        self.noted[Key(kind, unit, leaf, nth)] = found, along, use, str(dtype).removeprefix("torch.")

    def __call__(self, name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A verb, or the forward of a unit, is called through it."""
        if self.run.capturing:
            return fn(*args, **kwargs)
        if not args and "state" in kwargs:
            kwargs = {**kwargs}
            args = (kwargs.pop("state"),)
        verb, _, unit = name.partition(" ")
        with torch.no_grad():
            given = getattr(self, f"before_{verb}", None)
            args = args if given is None else given(unit, args, kwargs)
        out = fn(*args, **kwargs)
        with torch.no_grad():
            look = getattr(self, f"after_{verb}", None)
            if look is not None:
                look(unit, out, args, kwargs)
        return out

    # ---------------------------------------------------------------- verbs

    def after_unshard(self, _: str, out: Any, args: Any, kwargs: Any) -> None:
        state, weights = out
        name = args[1] if len(args) > 1 else kwargs.get("unit")
        cursor = state.version.cursor
        use = cursor.at - 1 if cursor is not None else None
        if name is None:
            at = dict(zip(state.layout.paths, pytree.tree_leaves(weights, is_leaf=_tensor), strict=True))
            for unit in state.layout.units:
                for path in unit.paths:
                    self.weight(unit.name, path, at[path], None)
        for unit in () if name is None else (name,) if isinstance(name, str) else name:
            lent = weights if isinstance(name, str) else weights[unit]
            one = state.layout.by_name[unit]
            for key, path in zip(one.keys, one.paths, strict=True):
                self.weight(unit, path, lent[key], use)

    def weight(self, unit: str, path: str, tensor: torch.Tensor, use: int | None) -> None:
        plain = tensor.dequantized() if isinstance(tensor, PackedWeight) else tensor
        self.note("weight", unit, path, digest(plain), None, use, tensor.dtype)

    def before_reduce(self, _: str, args: Any, kwargs: Any) -> Any:
        state, grads = args[0], args[1] if len(args) > 1 else kwargs["grads"]
        unit = args[2] if len(args) > 2 else kwargs.get("unit")
        self.reduced = False
        for name, values in by_unit(state, "reduce", grads, unit).items():
            self.rng(name)
            for path, grad in zip(state.layout.by_name[name].paths, values, strict=True):
                if grad is not None:
                    self.note("gradient", name, path, digest(grad), None, None, grad.dtype)
        return args

    def after_finish_reductions(self, _: str, out: State, args: Any, kwargs: Any) -> None:
        if not self.reduced:
            self.buffers(out, "reduced", out.grads)
        self.reduced = True

    def before_step(self, _: str, args: Any, kwargs: Any) -> Any:
        if args[0].optimizer is None:
            return args  # it raises
        state = finish_reductions(args[0])
        self.buffers(state, "given", state.grads)
        return state, *args[1:]

    # ---------------------------------------------------------------- units of a driven step

    def before_forward(self, unit: str, args: Any, kwargs: Any) -> Any:
        self.rng(unit)
        return args

    def after_forward(self, unit: str, out: Any, args: Any, kwargs: Any) -> None:
        self.rng(unit)
        self.tree("output", out, unit)

    # ---------------------------------------------------------------- trees

    def tree(self, kind: str, tree: Any, unit: str = "") -> None:
        """Tensors of a tree, this rank's own."""
        flat, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, State))
        for path, leaf in flat:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                name = pytree.keystr(path) or "[0]"
                self.note(kind, unit, name, digest(leaf, rows=True), None, None, leaf.dtype)

    def buffers(self, state: State, kind: str, tree: dict[str, FlatBuffer], suffix: str = "") -> None:
        """Leaves of buffers, of which this rank has a part."""
        for name, buffer in tree.items():
            (along,) = shards(state, {name: buffer})
            for leaf, start, local in leaf_shards(buffer):
                found = digest(local, start)
                unit = state.layout.unit_of[leaf.path]  # also where the bucket is an optimizer's own
                self.note(kind, unit, leaf.path + suffix, found, along, None, local.dtype)

    def moments(self, state: State) -> None:
        """What the optimizer keeps of leaves."""
        flat, _ = pytree.tree_flatten_with_path(state.opt, is_leaf=lambda x: isinstance(x, FlatBuffer))
        for path, leaf in flat:
            if not isinstance(leaf, FlatBuffer):
                continue
            known = state.layout.buckets.get(leaf.bucket.name)  # None: a bucket of the optimizer's own
            if leaf.local.is_floating_point() if known is None else leaf.bucket.numel == known.numel:
                home = leaf.bucket.name
                name = "".join(pytree.keystr((key,)) for key in path if str(getattr(key, "key", "")) != home)
                self.buffers(state, "moment", {home: leaf}, f" {name}")

    def updates(self, state: State, before: dict[Key, torch.Tensor]) -> None:
        """Main weights after the step; projections are of how they moved."""
        inner = Watch(self.run)
        inner.buffers(state, "update", state.main)
        for key, ((found, numbers), along, use, dtype) in inner.noted.items():
            old = before.get(key._replace(kind="main"))
            if old is not None:
                numbers = torch.cat([numbers[:1], numbers[1:] - old[1:]])
            self.noted[key] = (found, numbers), along, use, dtype

    def rng(self, unit: str) -> None:
        """The generators that numbers are drawn from by default."""
        if self.run.capturing:
            return
        device = default_generator(self.run.device)
        states = [torch.default_generator.get_state()] + ([] if device is None else [device.get_state()])
        self.note("rng", unit, "", digest(torch.cat(states)))


def _tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


Source = Prints | Fingerprinted | str | PathLike[str]
#: relative differences that another order of sums may make, by dtype of what is compared
ROUNDING = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4, "float64": 1e-10}
JUMP = 30.0  # times the largest difference so far: what rounding does not grow to from one use to the next
STAYS = ("input", "output", "result")  # by rank, of a part of the batch: over ranks they add up
CLASSES = {"input": "inputs", "main": "weights", "weight": "weights", "moment": "optimizer", "given": "optimizer",
           "reduced": "order of a sum", "update": "optimizer"}  # fmt: skip
NORMS = ("main", "weight", "output", "reduced", "update")  # whose growth is drawn
DRIFT = 1e-3  # of the largest leaf's norm: below it, a leaf's own norm is no measure


@dataclass(frozen=True)
class Difference:
    """The first thing that differs between two runs.

    Attributes:
        cls: "inputs", "weights", "compute", "order of a sum", "dropout" or "optimizer".
        kind, lane, unit, leaf: what it is, see `fingerprint`; leaf: a path, of inputs and outputs that in the tree.
        step: how many steps were taken before; use: of the cursor, or None; nth: how often it came before in the step.
        ranks: where it differs; () if it is of all ranks together.
        size: relative: the norm of the difference, as projections tell it, over that of what differs.
        note: what else is known.
    """

    cls: str
    kind: str
    lane: str
    unit: str
    leaf: str
    step: int
    use: int | None
    nth: int
    ranks: tuple[int, ...]
    size: float
    note: str = ""

    def __repr__(self) -> str:
        parts = [repr(self.leaf) if self.leaf else "", f"unit {self.unit!r}" if self.unit else ""]
        what = " of ".join(part for part in parts if part)
        which = f", time {self.nth + 1}" if self.nth else ""
        if self.use is not None:
            which = f", use {self.use} of the cursor"
        some = ", ".join(map(str, self.ranks[:8])) + ("..." if len(self.ranks) > 8 else "")
        where = f", on rank{'s' * (len(self.ranks) > 1)} {some}" if self.ranks else ""
        said = f"{self.cls}: the {self.kind} ({self.lane} lane) {what} in step {self.step + 1}{which}{where}"
        return f"{said}; relative difference {self.size:.1e}{f'. {self.note}.' if self.note else ''}"


@dataclass
class Comparison:
    """What `compare` returns. Printing it says where the runs part. True if they do not.

    Attributes:
        first: the first difference that counts, or None.
        rounding: the first one that another order of sums explains, or None.
        exact: whether every bit counts: the runs have the same ranks and settings.
        steps: the numbers of the steps that were compared.
        growth: {kind: the largest relative difference in each of these}.
        missing: kinds and units that only one of them has, in words.
    """

    first: Difference | None
    rounding: Difference | None
    exact: bool
    steps: list[int]
    growth: dict[str, list[float]] = field(default_factory=dict)
    missing: str = ""

    def __bool__(self) -> bool:
        return self.first is None

    def __repr__(self) -> str:
        of = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}"
        how = "every bit" if self.exact else "up to the rounding of sums"
        lines = [f"no difference in {of}, {how}" if self.first is None else f"{self.first!r}"]
        if self.rounding is not None and self.first is None:
            lines.append(f"bits differ first, as in another order of sums: {self.rounding!r}")
        if self.missing:
            lines.append(f"only in one of them: {self.missing}")
        if self.first is not None and len(self.steps) > 1:
            for kind, sizes in self.growth.items():
                lines.append(f"  {kind:8} " + "  ".join(f"{size:.0e}" for size in sizes[:12]))
        return "\n".join(lines)

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw how the difference grows over steps: a line for each kind, relative, on a logarithmic scale.

        Args:
            path: a PNG, or what its ending says: .svg, .pdf.

        Raises:
            ImportError: matplotlib is missing.
        """
        page = Page()
        found = [size for sizes in self.growth.values() for size in sizes if 0 < size < math.inf]
        low = math.floor(math.log10(min(found, default=1e-9)))
        high = max(math.ceil(math.log10(max(found, default=1.0))), low + 1)
        title = (
            "No difference" if self.first is None else f"The runs part in step {self.first.step + 1}: {self.first.cls}"
        )
        page.text(title, 15, INK, 0.36, weight="bold")
        page.text(repr(self.first or self.rounding or self).splitlines()[0])
        last = max(len(self.steps) - 1, 1)
        panel = page.panel(3.0, (last * 1.02, float(high - low)), below=0.6)
        colours = colours_of([*self.growth])
        for kind, sizes in self.growth.items():
            dots = [(i, math.log10(min(s, 10.0**high)) - low) for i, s in enumerate(sizes) if s > 0]
            if dots:
                panel.axes.plot(*map(list, zip(*dots, strict=True)), color=colours[kind], marker="o", markersize=4)
        panel.rows({f"1e{n:+d}": float(n - low) for n in range(low, high + 1, max(1, (high - low) // 8))})
        panel.axes.grid(color=FAINT, linewidth=0.7)
        panel.axes.set_ylabel("relative difference", fontsize=10, color=GREY)
        panel.axes.set_xlabel("steps", fontsize=10, color=GREY)
        panel.ticked = "xy"
        page.key(colours)
        page.save(path)


def compare(a: Source, b: Source, *, exact: bool | None = None) -> Comparison:
    """Where two runs part: the first use that differs, and what that says. Needs no ranks.

    | class            | what differs first, while all before it is alike                                        |
    |------------------|------------------------------------------------------------------------------------------|
    | "inputs"         | an argument of the train step                                                           |
    | "weights"        | main weights before a step, or what a gather brings                                     |
    | "dropout"        | an output or a gradient, where random numbers were drawn, and others                    |
    | "compute"        | another output or gradient                                                              |
    | "order of a sum" | gradients after the reduction: another order, or another precision on the way           |
    | "optimizer"      | an update, what the optimizer keeps, or gradients between their reduction and the step  |

    Args:
        a, b: what `fingerprint` returned, its `prints`, or a file that `Prints.save` wrote.
        exact: whether every bit counts. None: if both have the same ranks and settings. Else a difference counts if it
            is larger than rounding is, in its dtype, or than thirty times the largest before it; ranks are compared
            together: of inputs and outputs all rows in any order, of gradients the mean, or what `Spec` says.

    Steps are matched by their number. What only one of the runs has is left out, and gradients and outputs where the
    numbers of microbatches differ.

    Raises:
        ValueError: a file of another kind; no step in common; `exact=True` for other numbers of ranks.

    Collective: none.

    Example: `print(fsdp.compare("yesterday.json", "today.json"))`.
    """
    one, two = _read(a), _read(b)
    if exact is None:
        exact = (one.ranks, one.setting) == (two.ranks, two.setting)
    if exact and one.ranks != two.ranks:
        raise ValueError(
            f"compare(exact=True): the first ran on {one.ranks} ranks, the second on {two.ranks}, whose sums have "
            "another order. Leave exact out."
        )
    others = _by_number(two)
    pairs = [(step, others[key]) for key, step in _by_number(one).items() if key in others]
    if not pairs:
        raise ValueError(
            f"compare: no step in common: the first has steps {_span(one)}, the second {_span(two)}. Take the "
            "fingerprints of the same steps, as from the same checkpoint."
        )
    run = _Comparing(one, two, exact, pairs)
    for pair in pairs:
        run.step(*pair)
    return Comparison(run.first, run.rounding, exact, [step.number for step, _ in pairs], run.growth, run.missing())


def _read(source: Source) -> Prints:
    if isinstance(source, Fingerprinted):
        return source.prints
    return source if isinstance(source, Prints) else Prints.load(source)


def _by_number(prints: Prints) -> dict[tuple[int, int], Step]:
    """Steps by their number, and which of those that have it: one that is not taken has the next one's."""
    seen: Counter[int] = Counter()
    found = {}
    for step in prints.steps:
        found[step.number, seen[step.number]] = step
        seen[step.number] += 1
    return found


def _span(prints: Prints) -> str:
    return f"{prints.steps[0].number} to {prints.steps[-1].number}" if prints.steps else "of no number"


class _Comparing:
    def __init__(self, a: Prints, b: Prints, by_rank: bool, pairs: list[tuple[Step, Step]]) -> None:
        self.a, self.b, self.by_rank = a, b, by_rank  # and then every bit counts
        self.pairs = pairs
        self.first: Difference | None = None
        self.rounding: Difference | None = None
        self.noise = 0.0
        self.parted: dict[str, float] = {}  # leaves whose gradients differ by rounding, and by how much
        self.growth: dict[str, list[float]] = {}
        self.lacking: dict[str, set[str]] = {}

    def missing(self) -> str:
        return ", ".join(
            f"{kind} of {', '.join(map(repr, sorted(units)[:3]))}{'...' if len(units) > 3 else ''}"
            if all(units)
            else kind
            for kind, units in self.lacking.items()
            if kind != "rng"
        )

    def step(self, a: Step, b: Step) -> None:
        scales = _scales(a, b)
        most: dict[str, float] = {}
        for key in _shared(a, b, self.lacking):
            if key.kind == "rng":
                continue
            mine, theirs = a.rows[key], b.rows[key]
            size, ranks = self._differs(key, mine, theirs, scales.get(key.kind, 0.0))
            if key.kind in NORMS:
                most[key.kind] = max(most.get(key.kind, 0.0), size or 0.0)
            if size is None or self.first is not None:
                continue
            found = self._difference(key, a, b, size, ranks)
            if self.by_rank or self._counts(key, a, size):
                self.first = found
            else:
                self.rounding = self.rounding or found
                if key.kind not in ("update", "moment"):
                    self.noise = max(self.noise, size)
                if key.kind in ("reduced", "given"):
                    self.parted[key.leaf] = max(self.parted.get(key.leaf, 0.0), size)
        for kind in NORMS:
            if kind in most:
                self.growth.setdefault(kind, []).append(most[kind])

    def _counts(self, key: Key, step: Step, size: float) -> bool:
        """Whether a difference is more than rounding makes."""
        if key.kind == "input":
            return True
        limit = ROUNDING.get(step.dtypes.get(key, ""), 1e-4)
        if key.kind in ("main", "weight"):  # updates have added up
            limit *= 10
        elif key.kind in ("update", "moment"):  # an optimizer may divide by a gradient that is all rounding
            limit = max(30 * limit, 100 * self.parted.get(key.leaf.partition(" ")[0], 0.0))
        return size > max(limit, JUMP * self.noise)

    def _differs(
        self, key: Key, a: tuple[Row, ...], b: tuple[Row, ...], scale: float
    ) -> tuple[float | None, tuple[int, ...]]:
        """How large the difference is, None if there is none, and on which ranks."""
        if self.by_rank:
            n = max(len(a), len(b))
            every = [(i, one, two) for i, (one, two) in enumerate(zip(_spread(a, n), _spread(b, n), strict=True))]
            apart = [(i, one, two) for i, one, two in every if one.hash != two.hash]
            if not apart:
                return None, ()
            size = max(_size(one, two, scale, key.kind) for _, one, two in apart)
            return size, tuple(i for i, *_ in apart) if 1 < n == self.a.ranks else ()
        one, two = self._whole(key, a, self.a), self._whole(key, b, self.b)
        return (None if one.hash == two.hash else _size(one, two, scale, key.kind)), ()

    def _whole(self, key: Key, rows: tuple[Row, ...], of: Prints) -> Row:
        """What ranks have, together."""
        if key.kind not in (*STAYS, "gradient", "weight"):
            return rows[0]
        rows = _spread(rows, of.ranks) if key.kind in STAYS or key.kind == "gradient" else rows
        total = Row(*(_total(column) if i else sum(column) for i, column in enumerate(zip(*rows, strict=True))))  # type: ignore[arg-type]
        mean = key.kind == "weight" or (key.kind == "gradient" and of.average == "mean") or key.kind == "result"
        if key.kind == "weight" and len({*rows}) == 1:
            return rows[0]
        if mean:
            return Row(total.hash if key.kind != "result" else 0, *(x / len(rows) for x in total[1:]))
        return total._replace(hash=(total.hash + 2**63) % 2**64 - 2**63)

    def _difference(self, key: Key, a: Step, b: Step, size: float, ranks: tuple[int, ...]) -> Difference:
        cls = CLASSES.get(key.kind, "compute")
        note = ""
        if cls == "compute" and self._drawn(key, a, b, ranks):
            cls = "dropout"
        if key.kind == "input":
            note = self._batch(key, a, b, ranks)
        if key.kind == "reduced" and 2.0**-12 < size < 2.0**-6:
            note = "As large as rounding to bfloat16 on the way"
        elif key.kind == "reduced" and size < 1e-6:
            note = "As large as another order of a sum in float32"
        elif key.kind == "weight":
            note = "Main weights are alike: the gather, or a compute copy"
        return Difference(
            cls, key.kind, LANES[key.kind], key.unit, key.leaf, a.number, a.uses.get(key), key.nth, ranks, size, note
        )

    def _drawn(self, key: Key, a: Step, b: Step, ranks: tuple[int, ...]) -> bool:
        """Whether random numbers were drawn up to there, and not the same ones."""

        def at(step: Step, which: Key, rank: int) -> Row | None:
            rows = step.rows.get(which)
            return None if rows is None else rows[min(rank, len(rows) - 1)]

        pairs = (
            key._replace(kind="rng", leaf="", nth=2 * key.nth),
            key._replace(kind="rng", leaf="", nth=2 * key.nth + 1),
        )
        if key.kind != "output":  # from the step's begin to the first reduction, as far as is known
            marks = [one for one in a.rows if one.kind == "rng" and one in b.rows]
            pairs = (marks[0], next((one for one in marks if one.unit == key.unit), marks[-1]))
            if any(one.kind == "output" for one in a.rows):
                return False  # outputs would have shown it
        for rank in ranks or range(max(self.a.ranks, self.b.ranks)):
            before, after = [[at(step, one, rank) for step in (a, b)] for one in pairs]
            drew = before[0] != after[0] or before[1] != after[1]
            if drew and (before[0] != before[1] or after[0] != after[1]):
                return True
        return False

    def _batch(self, key: Key, a: Step, b: Step, ranks: tuple[int, ...]) -> str:
        """Whether an input is there elsewhere: on another rank, or in another step."""
        if not self.by_rank:
            return ""
        rank = ranks[0] if ranks else 0
        wanted = _spread(b.rows[key], self.b.ranks)[rank].hash
        for other, row in enumerate(_spread(a.rows[key], self.a.ranks)):
            if row.hash == wanted and other != rank:
                return f"The second has on rank {rank} what the first has on rank {other}"
        for step, _ in self.pairs:
            if step is not a and key in step.rows and any(row.hash == wanted for row in step.rows[key]):
                return f"The second has there what the first has in step {step.number + 1}"
        return ""


def _shared(a: Step, b: Step, lacking: dict[str, set[str]]) -> Iterator[Key]:
    """The keys that can be compared, in order of time."""
    counts: list[dict[tuple[str, ...], int]] = [{}, {}]
    for count, step in zip(counts, (a, b), strict=True):
        for key in step.rows:
            if key.kind in ("gradient", "output", "reduced"):
                count[key[:3]] = count.get(key[:3], 0) + 1
    for key in a.rows:
        if key not in b.rows:
            lacking.setdefault(key.kind, set()).add(key.unit)
        elif counts[0].get(key[:3]) == counts[1].get(key[:3]):
            yield key
    for key in b.rows:
        if key not in a.rows:
            lacking.setdefault(key.kind, set()).add(key.unit)


def _scales(a: Step, b: Step) -> dict[str, float]:
    """By kind, the largest norm of a leaf; of updates, of a move."""
    found: dict[str, float] = {}
    for step in (a, b):
        for key, rows in step.rows.items():
            found[key.kind] = max(found.get(key.kind, 0.0), *(_norm(row, key.kind == "update") for row in rows))
    return {kind: DRIFT * size for kind, size in found.items()}


def _total(column: Sequence[float]) -> float:
    """Their sum; of numbers that are not finite what that leads to."""
    return math.fsum(column) if math.isfinite(sum(map(abs, column))) else sum(column)


def _norm(row: Row, moved: bool = False) -> float:
    size = math.sqrt((row.first**2 + row.second**2) / 2) if moved else math.sqrt(row.squares)
    return size if math.isfinite(size) else 0.0


def _size(a: Row, b: Row, scale: float, kind: str) -> float:
    moved = kind == "update"
    if (repr(a.first), repr(a.second)) == (repr(b.first), repr(b.second)):  # NaN in both says no more than that
        return 0.0
    apart = math.sqrt(((a.first - b.first) ** 2 + (a.second - b.second) ** 2) / 2)
    if not math.isfinite(apart):
        return math.inf
    return apart / max(_norm(a, moved), _norm(b, moved), scale) if apart else 0.0


def _spread(rows: tuple[Row, ...], n: int) -> tuple[Row, ...]:
    return rows * n if len(rows) == 1 else rows + rows[-1:] * (n - len(rows))
