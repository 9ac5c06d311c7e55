"""Checkpoints of any known format, this library's own among them.

Sources: where weights come from, a run of elements at a time.

a mapping      {name: tensor}
a checkpoint   what `open_checkpoint` gives, of any format; a path is opened by it

This library's own checkpoints, as any other: leaves, buffers, and what the optimizer keeps.

open_checkpoint: what lies in a folder or a file of any known format, as tensors by name that are read when asked
for.

checkpoint = open_checkpoint("run/global_step100")     DeepSpeed ZeRO-3, 8 ranks: 291 leaves, 1 tie, moments
init(make, spec, optimizer, weights=checkpoint)        each rank reads its runs of the leaves
load_optimizer_state(state, checkpoint)                and of the moments
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .._axes import Cuts, boxes, part_shape
from .._common.errors import CheckpointError, FsdpError, SpecError, TreeError, as_path, expect
from .._common.tree import bytes_text, table
from .contents import (
    THEIRS,
    Contents,
    Cut,
    Files,
    Filled,
    Format,
    entry_values,
    number_of,
    numel_of,
    run,
    tensors_expected,
)
from .deepspeed import DeepSpeed
from .folder import NOTE, Entry
from .manifest import read_note, sizes, tensors_of, without_places
from .orbax import Orbax
from .pieces import Dim, Piece, blocks, cuts_in, names_by_place, piece_of, strides_of
from .torch_files import Accelerate, Dcp, HuggingFace, Peft, RankFiles, SafetensorsFile, StateDict, onto

Rename = Callable[[str], str] | Mapping[str, str]


class Own:
    """A folder with `layout.json`."""

    def claims(self, path: Path) -> bool:
        return path.is_dir() and (path / NOTE).exists()

    def read(self, path: Path) -> Contents:
        note = read_note(path)
        sizes(path, note)
        there: dict[str, Any] = dict(tensors_of(path, note))
        leaves, without_place = note["leaves"], without_places(note)
        whose = _whose({without_place(name): one.dtype for name, one in there.items()}, leaves)
        cut = {leaf: cuts_in(path, leaf, one) for leaf, one in leaves.items()}
        size = {leaf: numel_of(part_shape(one["shape"], cut[leaf])) for leaf, one in leaves.items()}
        numbers = {what for leaf, what, one in _kept(there, whose, without_place) if numel_of(one.shape) != size[leaf]}
        numbers |= {"missed", "step"}  # a number for each leaf, which may have one element, too
        for base, (tree, leaf) in whose.items():
            if base not in there and cut[leaf]:
                _join(path, there, base, cut[leaf], tuple(leaves[leaf]["shape"]), tree[4:] in numbers)
        apart = next((name for name in there if name != without_place(name)), None)
        if apart is not None:
            raise CheckpointError(
                f"{path} has leaves that each rank has for itself ({apart!r}), which have no one value. Read it by "
                "fsdp.load."
            )
        packed = next((name for name, one in leaves.items() if one.get("codec")), None)
        if packed is not None:
            raise CheckpointError(
                f"{path} has leaves that are packed ({packed!r}, by {leaves[packed]['codec']}), which others cannot "
                "read. Read it by fsdp.load, with the spec that it was saved with."
            )
        found = {path_: _span(path, there[f"main.{path_}"], tuple(one["shape"])) for path_, one in leaves.items()}
        moments: dict[str, dict[str, Any]] = {}
        steps: dict[str, Any] = {}
        missed: dict[str, int] = {}
        for leaf, what, one in _kept(there, whose, without_place):
            held = _span(path, one, () if what in numbers else tuple(leaves[leaf]["shape"]))
            if what == "missed":
                missed[leaf] = number_of(held, f"{path}: {leaf!r}")
            elif what == "step":
                steps[leaf] = held
            else:
                moments.setdefault(leaf, {})[THEIRS.get(what, what)] = held
        for name in moments:
            steps.setdefault(name, note["step"] - missed.get(name, 0))
        steps[""] = note["step"]  # which no leaf need have had
        trees = {n: n.partition(".") for n in there}  # what is called "" has no dot
        buffers = {path_: there[n] for n, (tree, _, path_) in trees.items() if tree == "buffers"}
        if both := buffers.keys() & {*note["paths"]}:
            raise CheckpointError(
                f"{path} has a parameter and a buffer that are both called {min(both)!r}. Read it by fsdp.load."
            )
        found |= {name: _span(path, one, one.shape) for name, one in buffers.items()}
        return Contents(
            "functional_fsdp", found, f"format {note['format']}", None,
            ties={alias: leaf for leaf, one in leaves.items() for alias in one["ties"]},
            buffers=frozenset(buffers), frozen=frozenset(p for p, one in leaves.items() if not one["trainable"]),
            moments=moments, steps=steps, step=note["step"],
            left=tuple(n for n, (tree, _, _) in trees.items() if tree == "extras"),
        )  # fmt: skip


def _whose(bases: Mapping[str, torch.dtype], leaves: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Of each tensor in which tree and of which leaf it is. "opt.mean.w" is of "w" in "opt.mean", or of "mean.w" in
    "opt": of two trees the one that has more leaves, since a tree has all that are trained. But counts of steps that
    were missed, whole numbers in a tree "missed", are of few; of such trees it is the one beside which others have
    more."""
    ways: dict[str, list[tuple[str, str]]] = {}
    for base in bases:
        dots = [at for at, letter in enumerate(base) if letter == "." and base[at + 1 :] in leaves]
        some = [(base[:at], base[at + 1 :]) for at in dots]
        ways[base] = [one for one in some if leaves[one[1]]["trainable"] or not base.startswith("opt.")]
    many = Counter(tree for some in ways.values() for tree, _ in some)
    beside: Counter[str] = Counter()  # of a place of trees, how many leaves the largest has that is none of counts
    for tree, count in many.items():
        place, _, name = tree.rpartition(".")
        if name != "missed":
            beside[place] = max(beside[place], count)
    trained = sum(one["trainable"] for one in leaves.values())

    def likely(one: tuple[str, str], dtype: torch.dtype) -> tuple[bool, int, int]:
        tree, (place, _, name) = one[0], one[0].rpartition(".")
        counts = beside[place] if name == "missed" and not dtype.is_floating_point else 0
        return tree.startswith("opt") and many[tree] == trained, counts, many[tree]

    return {base: max(some, key=lambda one: likely(one, bases[base])) for base, some in ways.items() if some}


def _kept(
    there: Mapping[str, Any], whose: Mapping[str, tuple[str, str]], without_place: Callable[[str], str]
) -> list[tuple[str, str, Any]]:
    """What the optimizer keeps: of which leaf, under which name, and it."""
    owners = ((name, *whose.get(without_place(name), ("", ""))) for name in sorted(there))
    return [(leaf, tree[4:], there[name]) for name, tree, leaf in owners if tree == "opt" or tree.startswith("opt.")]


def _join(path: Path, there: dict[str, Any], base: str, cuts: Cuts, shape: tuple[int, ...], number: bool) -> None:
    """Put the whole tensor in the place of the parts that ranks had of it, cut along axes of the model's own; or the
    number of its leaf, the same on all of them."""
    found = {at: there.pop(name) for at, name in names_by_place(base, cuts, there).items()}
    if number and found:
        there[base] = next(iter(found.values()))
    elif found:
        local, steps, parts = part_shape(shape, cuts), strides_of(shape), []
        for at, one in found.items():
            span = _span(path, one, local)
            coordinate = {cut.axis: i for cut, i in zip(cuts, at, strict=True)}
            for begin, own, size in boxes(shape, cuts, coordinate):
                dims = tuple(Dim(*one) for one in zip(size, steps, own, local, strict=True))
                parts.append((piece_of("", dims, sum(a * step for a, step in zip(begin, steps, strict=True))), span))
        there[base] = Cut(shape, next(iter(found.values())).dtype, tuple(parts))


def _span(path: Path, one: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(one, Cut):
        return one
    parts = []
    for chunk in one.chunks:
        n = chunk.stop - chunk.start
        parts.append(run(chunk.start, n, Entry(path / chunk.file, one.dtype, (n,), chunk.data)))
    return Cut(shape, one.dtype, tuple(parts))


FORMATS: tuple[Format, ...] = (
    Own(), Peft(), Accelerate(), DeepSpeed(), Dcp(), RankFiles(), HuggingFace(), Orbax(), SafetensorsFile(),
    StateDict(),
)  # fmt: skip
ALONE: dict[type, Format] = {Dcp: HuggingFace(), RankFiles: HuggingFace()}  # what does not lie beside another one
DAMAGED = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, AssertionError)
MOST_TIED = 1 << 20  # elements that are compared at once to tell whether two leaves are one


class Source:
    """Tensors by name, in files or in memory: each a tensor, an Entry or a Span (see `contents`)."""

    def __init__(self, what: str, tensors: Mapping[str, Any]) -> None:
        self.what, self.tensors = what, tensors

    def held_as(self, name: str) -> str:
        """The name under which the source holds what this name says."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, some: Iterable[Piece], start: int, into: torch.Tensor) -> None:
        """Elements [start, start + n) of the leaf that has these pieces, into `into` [n], of any dtype and device."""
        with Files() as files:
            for piece in some:
                one = self.tensors[piece.name]
                for block in blocks(piece, start, start + into.numel()):
                    values = entry_values(one, block.file, block.numel, files)
                    block.of(into, start).copy_(values.view(block.sizes))

    def prefix_for(self, paths: Iterable[str]) -> tuple[str, str]:
        """What a name in the source has at its beginning that a path has not, and the other way round: ("model.", "")
        where "model.w" is the leaf "w". Nothing where a path is a name there, or where not all names follow."""
        paths = [*paths]
        if any(path in self.tensors for path in paths) or not paths:
            return "", ""
        tails = {path: [name for name in self.tensors if name.endswith(f".{path}")] for path in paths[:1]}
        for name in tails[paths[0]]:
            prefix = name.removesuffix(paths[0])
            if all(one.startswith(prefix) and one.removeprefix(prefix) in {*paths} for one in self.tensors):
                return prefix, ""
        for name in self.tensors:
            for path in paths:
                if path.endswith(f".{name}"):
                    prefix = path.removesuffix(name)
                    if all(prefix + one in {*paths} for one in self.tensors):
                        return "", prefix
            break
        return "", ""


class Checkpoint(Source, Mapping[str, torch.Tensor]):
    """Tensors by name in files, which are read when they are asked for; made by `open_checkpoint`.

    A mapping: `checkpoint["w"]` reads one leaf, whole, into the host's memory, and `checkpoint.items()` one after
    another. Printing it gives a table.

    Attributes:
        path: what was opened.
        format, version, world: what wrote it, of which version, and how many ranks did; None where the files do not
            say.
        leaves: {name: (shape, dtype)} of weights and buffers, ties once.
        ties: {further name: the name that holds the leaf}.
        buffers, frozen: names, as far as the files say.
        optimizer: {leaf: names of what an optimizer keeps for it}.
        step: how many steps were taken, or None.
        left: what else is there and is not read.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        Source.__init__(self, str(path), contents.tensors)
        self.path, self.contents = path, contents
        self.format, self.version, self.world = contents.format, contents.version, contents.world
        self.left = contents.left

    # ---- a mapping

    def __getitem__(self, name: str) -> torch.Tensor:
        one = self.tensors[self.ties.get(name, name)]
        with Files() as files:
            return entry_values(one, 0, numel_of(one.shape), files).view(tuple(one.shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # ---- what is there

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(one.shape), one.dtype) for name, one in self.tensors.items()}

    @cached_property
    def ties(self) -> dict[str, str]:
        told = self.contents.ties
        return {a: b for a, b in told.items() if b in self.tensors} if told is not None else {}

    @cached_property
    def buffers(self) -> frozenset[str]:
        """As the files say, or else: integers and flags, statistics of norms, and what lacks moments beside them."""
        if self.contents.buffers is not None:
            return self.contents.buffers
        kinds = {name for name, one in self.tensors.items() if not one.dtype.is_floating_point}
        kinds |= {n for n in self.tensors if n.rsplit(".", 1)[-1] in ("running_mean", "running_var")}
        return frozenset(kinds - self.optimizer.keys())

    @cached_property
    def frozen(self) -> frozenset[str]:
        return self.contents.frozen or frozenset()

    @property
    def optimizer(self) -> dict[str, tuple[str, ...]]:
        return {leaf: tuple(kept) for leaf, kept in self.contents.moments.items()}

    @cached_property
    def steps(self) -> dict[str, int]:
        """Steps that the moments of each leaf have seen."""
        return {leaf: number_of(one, f"{self.path}: {leaf!r}") for leaf, one in self.contents.steps.items()}

    @property
    def step(self) -> int | None:
        return max(self.steps.values(), default=self.contents.step)

    def held_as(self, name: str) -> str:
        return self.ties.get(name, name)

    def alike(self) -> dict[str, str]:
        """{further name: first name} of matrices with the same bits: what may be tied, where the files name a tied leaf
        twice. Reads their first 1 Mi elements, and further ones where these are the same."""
        found: dict[str, str] = {}
        first: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        by_shape: dict[Any, list[str]] = {}
        for name, (shape, dtype) in self.leaves.items():
            if len(shape) > 1 and numel_of(shape) > 1 and dtype.is_floating_point:
                by_shape.setdefault((shape, dtype), []).append(name)
        with Files() as files:
            for key, names in by_shape.items():
                for name in names if len(names) > 1 else ():
                    n = min(numel_of(key[0]), MOST_TIED)
                    values = entry_values(self.tensors[name], 0, n, files)
                    same = next(
                        (
                            a
                            for a, held in first.get(key, ())
                            if torch.equal(held, values) and self._same(a, name, files)
                        ),
                        None,
                    )
                    if same is None and not bool((values == values[0]).all()):
                        first.setdefault(key, []).append((name, values.clone()))
                    elif same is not None:
                        found[name] = same
        return found

    def _same(self, a: str, b: str, files: Files) -> bool:
        """Whether two leaves of one shape and dtype have the same values from the first 1 Mi elements on."""
        n = numel_of(self.tensors[a].shape)
        parts = [(start, min(MOST_TIED, n - start)) for start in range(MOST_TIED, n, MOST_TIED)]
        return all(torch.equal(*(entry_values(self.tensors[name], *part, files) for name in (a, b))) for part in parts)

    def moments(
        self, names: Mapping[str, str], paths: Mapping[str, str], trained: Container[str], rename: Rename | None = None
    ) -> dict[str, Any]:
        """What an optimizer keeps, for `load_optimizer_state`: {"NAME.path": tensor} for its own names and leaves.

        Args:
            names: the optimizer's name -> that in the files. paths: all paths of leaves -> the one that holds the leaf.
            trained: paths of leaves that train; of others nothing is wanted.
            rename: from a leaf's path to its name here.
        """
        theirs, ours = ("", "") if rename else self.prefix_for(paths)
        called = {path: renamed(path, rename, theirs, ours) for path in paths}
        found: dict[str, Any] = {}
        for path, home in paths.items():
            if home not in trained:
                continue
            name = called[path]
            kept = self.contents.moments.get(name, {})
            if name in self.contents.steps:
                kept = {**kept, "step": Filled((), torch.float32, self.steps[name])}
                if self.steps[name] != self.step:
                    kept["missed"] = Filled((), torch.int64, (self.step or 0) - self.steps[name])
            for mine, slot in names.items():
                if slot in kept:
                    found.setdefault(f"{mine}.{home}", kept[slot])
        if found:  # and what no leaf, or nothing that the optimizer keeps, is: whoever reads it decides
            leaves = {*called.values()}
            mine_of = {slot: mine for mine, slot in names.items()}
            for leaf, kept in self.contents.moments.items():
                for slot, one in kept.items():
                    if leaf not in leaves or slot not in mine_of:
                        found.setdefault(f"{mine_of.get(slot, slot)}.{leaf}", one)
        return found

    def __repr__(self) -> str:
        told = [self.format, *([self.version] if self.version else [])]
        if self.world:
            told.append(f"{self.world} ranks" if self.world > 1 else "1 rank")
        if self.step is not None:
            told.append(f"step {self.step}")
        if self.contents.prefix:
            told.append(f"names without {self.contents.prefix!r}")
        total = sum(numel_of(shape) * dtype.itemsize for shape, dtype in self.leaves.values())
        rows = []
        ties: dict[str, list[str]] = {}
        for alias, name in self.ties.items():
            ties.setdefault(name, []).append(alias)
        for name, (shape, dtype) in self.leaves.items():
            notes = ["buffer"] if name in self.buffers else ["frozen"] if name in self.frozen else []
            notes += [f"also {alias}" for alias in ties.get(name, ())]
            kept = ", ".join(self.optimizer.get(name, ()))
            rows.append((name, [*shape], str(dtype).removeprefix("torch."), "; ".join(notes) or "-", kept or "-"))
        shown = rows if len(rows) <= 40 else [*rows[:20], ("...", "", "", "", ""), *rows[-20:]]
        text = f"Checkpoint {self.path}\n{', '.join(told)}: {len(rows)} leaves, {bytes_text(total)}\n"
        text += table(("leaf", "shape", "dtype", "kind", "optimizer"), shown)
        return text + (
            f"\nnot read: {', '.join(map(str, self.left[:6]))}{', ...' if len(self.left) > 6 else ''}"
            if self.left
            else ""
        )


def open_checkpoint(
    path: str | os.PathLike[str], *, prefix: str | None = None, base: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """Find out what a folder or a file of weights is, whoever wrote it. Reads no tensor, and runs nothing of it.

    Known are: this library's checkpoints; folders of torch.distributed.checkpoint, as FSDP2, torchtitan, Megatron-FSDP,
    Accelerate and Lightning write them, with optimizer states by name or number; DeepSpeed's ZeRO-1, 2 and 3, and its
    universal format; files of ranks with DTensors (verl); Orbax's of flax, nnx and linen, where tensorstore is
    installed; Hugging Face's folders (safetensors, torch.save, with an index or without), and those that torch's DCP
    wrote by rank; single files of safetensors and of torch.save (Lightning's .ckpt among them).

    Args:
        path: a folder or a file. All ranks must see it.
        prefix: what weights' names begin with there and leaves' paths do not, as "model."; None: found from the names.
        base: of an adapter of PEFT, whose names are those of the model of `get_peft_model`: the folder of the weights
            that it is of. Both are then there, as that model has them.

    Returns:
        a mapping {name: tensor} that reads a leaf when asked for it. `init(weights=)`, `load_weights` and
        `load_optimizer_state` take it, and read each rank's runs only; all of them take paths, too.

    Raises:
        FileNotFoundError: nothing there. CheckpointError: it is of no known format; or a file that is named is missing,
        damaged, of another checkpoint, or wants something to be run.

    Collective: none.

    Example:
        >>> run = fsdp.save(state, "run")  # or a folder of another package
        >>> checkpoint = fsdp.open_checkpoint(run)
        >>> state = fsdp.load_optimizer_state(fsdp.load_weights(state, checkpoint), checkpoint)
    """
    folder = as_path("open_checkpoint(path)", path)
    contents = _contents(folder)
    if base is not None:
        contents = onto(contents, _contents(as_path("open_checkpoint(base)", base)))
    if prefix is not None:
        contents = _prefixed(folder, contents, expect("open_checkpoint(prefix)", prefix, str, "a text"))
    if not contents.tensors:
        raise CheckpointError(f"{folder} is {contents.format}, and has no weights.")
    return Checkpoint(folder, contents)


def opened(source: Any) -> Source:
    """What a source holds, before anything of it is read.

    Raises:
        FileNotFoundError, CheckpointError: there are no weights, or they are damaged. SpecError: no kind of source.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        for name, one in source.items():
            kind = type(one)
            if not isinstance(name, str) or not isinstance(one, torch.Tensor):
                raise TreeError(f"weights: the mapping has a {kind.__name__} at {name!r}; {tensors_expected(name)}")
            if kind not in (torch.Tensor, torch.nn.Parameter) and hasattr(one, "full_tensor"):
                raise TreeError(
                    f"weights: the mapping has a {kind.__name__} at {name!r}; expected plain tensors. Give whole "
                    "ones, .full_tensor() on every rank; or save them, and open the folder by open_checkpoint."
                )
        return Source("the mapping", dict(source))
    said = "a folder, a file, what open_checkpoint gives, or a mapping of names to tensors"
    return open_checkpoint(as_path("weights", source, said))


def renamed(path: str, rename: Rename | None, theirs: str, ours: str) -> str:
    """What a leaf is called in a source: as is said, or else with another beginning."""
    return rename(path) if callable(rename) else (rename or {}).get(path, theirs + path.removeprefix(ours))


def _contents(path: Path) -> Contents:
    """What lies there."""
    if not path.exists():
        raise FileNotFoundError(f"weights: there is no {path}.")
    for one in FORMATS:
        if one.claims(path):
            other = ALONE.get(type(one))
            if other is not None and other.claims(path):
                raise CheckpointError(
                    f"{path} has two checkpoints, one as {type(one).__name__} and one as {type(other).__name__}. Give "
                    "a folder, or a file, that has one of them alone."
                )
            try:
                return one.read(path)
            except FsdpError:  # some are ValueErrors, too
                raise
            except DAMAGED as error:
                raise CheckpointError(
                    f"{path} is damaged, or of a version that is not read: as {type(one).__name__} it has something "
                    f"else than expected ({type(error).__name__}: {str(error)[:200]})."
                ) from error
    there = sorted(child.name for child in path.iterdir())[:5]
    raise FileNotFoundError(
        f"weights: {path} has no *.safetensors and no pytorch_model.bin, and is no checkpoint of a known format; it "
        f"has {', '.join(there) or 'no files'}."
    )


def _prefixed(path: Path, contents: Contents, prefix: str) -> Contents:
    """The same with names as a prefix says."""
    names = {contents.prefix + name: name for name in contents.tensors}
    below = {full.removeprefix(prefix): name for full, name in names.items() if full.startswith(prefix)}
    if not below:
        raise SpecError(f"{path} has no weights below {prefix!r}; there are {', '.join([*names][:5])}, ...")
    new = {name: short for short, name in below.items()}
    contents.left = (*contents.left, *(full for full in names if not full.startswith(prefix)))
    contents.tensors = {short: contents.tensors[name] for short, name in below.items()}
    contents.moments = {new.get(name, name): kept for name, kept in contents.moments.items()}
    contents.steps = {new.get(name, name): one for name, one in contents.steps.items()}
    if contents.ties is not None:
        full = {a: (contents.prefix + a).removeprefix(prefix) for a in contents.ties}
        contents.ties = {full[a]: new.get(b, b) for a, b in contents.ties.items()}
    contents.prefix = prefix
    return contents
