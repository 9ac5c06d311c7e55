"""files: checkpoints that were cut, changed, mixed, crafted or written by two at once. `load` gives the saved bits or a
documented error on every rank, runs no code, and leaves its template as it was.

Two checkpoints of one state, after one step and after two, lie side by side; each case damages a copy of the first.
A byte changed inside raw tensor data, or a data file of the other checkpoint, can only be found by checksums: that is
counted as "unseen".
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import functional_fsdp as fsdp

from . import trained
from .verdict import PATIENCE, Verdict, documented, judged

Case = dict[str, Any]
DAMAGES = (
    *("flip",) * 6,
    *("truncate",) * 4,
    *("remove",) * 2,
    *("layout",) * 5,
    *("pickle",) * 3,
    *("inside",) * 5,
    *("empty", "swap checkpoints", "swap ranks", "longer", "directory", "writers", "writers", "nothing"),
)
LAYOUTS: tuple[Any, ...] = (
    *('{"step": 1', "null", "[]", "", "\x00\x01", '"x"', "{}", "1e999", '{"step": NaN}'),
    *({"step": -1}, {"step": "one"}, {"step": None}, {"step": 10**400}, {"step": 1.5}, {"layout": "other"}),
    *({"mesh": ["data", 2]}, {"leaves": "7"}, {"placement": None}, {"tree": {}}, {"step": [1]}, {"step": True}),
)
INSIDE = (
    *("bytes entry", "path above", "absolute path", "missing key", "huge size", "negative offset", "other dtype"),
    *("long length", "missing storage", "other shape", "strange object"),
)


def draw(seed: int, index: int) -> Case:
    """The case of this seed and index."""
    rng = Random(f"files:{seed}:{index}")
    damage = rng.choice(DAMAGES)
    return {
        "kind": "files", "world": 1 if damage == "writers" else rng.choice((1, 2, 2, 3, 4)),
        "preset": rng.choice(trained.PRESETS), "way": "tree", "transport": "collective", "prefetch": 1, "micros": 1,
        "sgd": rng.random() < 0.3, "damage": damage, "file": round(rng.random(), 4), "at": round(rng.random(), 5),
        "count": rng.choice((1, 1, 2, 3)), "byte": rng.randint(1, 255), "layout": rng.choice(LAYOUTS),
        "inside": rng.choice(INSIDE), "gadget": rng.randrange(4), "patience": 15,
    }  # fmt: skip


def smaller(case: Case) -> list[Case]:
    """Simpler cases."""
    return [{**case, "world": w} for w in (1, 2) if w < case["world"]] + (
        [{**case, "preset": "zero3"}] if case["preset"] != "zero3" else []
    )


class Kept:
    """A template, and what its two checkpoints hold on this rank."""

    def __init__(self, case: Case, rank: int) -> None:
        state, model = trained.make(case)
        step = trained.steps_of(case, model, rank)
        self.states = []
        for number in range(3):
            state = step(state, number)
            self.states.append(_clone(state))
        self.template, self.step = state, step
        self.bits = [_bits(one) for one in self.states]


_kept: dict[tuple[Any, str], Kept] = {}  # by the ranks' process group, too: simulated ranks share this module


def _clone(state: fsdp.State) -> fsdp.State:
    return copy.deepcopy(state)


def _bits(state: fsdp.State) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((state.main, state.opt, state.count))
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def play(case: Case, rank: int, folder: str) -> Verdict:
    """On one rank."""
    key = repr([case[name] for name in ("world", "preset", "sgd")])
    fsdp.local_mesh()
    mine = dist.group.WORLD, key
    if mine not in _kept:
        _kept[mine] = Kept(case, rank)
    kept, world = _kept[mine], case["world"]
    pristine = os.path.join(os.path.dirname(folder), f"pristine {key}")
    if not os.path.exists(os.path.join(pristine, "done")):
        for i in (0, 1):
            if not os.path.exists(os.path.join(pristine, f"{i}")):
                fsdp.save(kept.states[i], os.path.join(pristine, f"{i}"))
        _meet(world)
        if rank == 0:
            open(os.path.join(pristine, "done"), "w").close()
    _meet(world)
    sentinel = os.path.join(folder, "ran")
    damaged = os.path.join(folder, "damaged")
    if rank == 0:
        os.makedirs(folder)
        Damage(case, pristine, damaged, sentinel, kept).do()
    _meet(world)
    verdict = _load(case, kept, damaged)
    if os.path.exists(sentinel):
        return Verdict("wrong", f"load ran code from the checkpoint ({case['damage']}); {verdict.text}", clean=False)
    if not verdict.fine or not verdict.clean:
        return verdict
    return _usable(kept, pristine) or verdict


def _meet(world: int) -> None:
    if world > 1:
        dist.barrier()


def _load(case: Case, kept: Kept, damaged: str) -> Verdict:
    begun = time.monotonic()
    try:
        state = fsdp.load(damaged, like=kept.template)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if documented(error, OSError) and time.monotonic() - begun < 0.7 * PATIENCE:
            return Verdict("refused", f"{type(error).__name__}: {str(error)[:200]}", {"end": "refused"})
        if documented(error, OSError):
            return judged(error, time.monotonic() - begun, 0.7 * PATIENCE)
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames))
        last = str(error).strip().split("\n")[-1]
        return Verdict("raw", f"{type(error).__name__}: {last[:200]} | {where}", clean=False)
    got, (want, other) = _bits(state), kept.bits[:2]
    if case["damage"] == "writers":
        want = want if all(map(torch.equal, got, want)) else other
    if _same(got, want):
        return Verdict("right", "", {"end": "the saved bits"})
    if any(a.shape != b.shape or a.dtype is not b.dtype for a, b in zip(got, want, strict=True)):
        return Verdict("wrong", "load gave other shapes or dtypes", clean=False)
    differ = sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in zip(got, want, strict=True))
    said = f"{differ} bytes differ from what was saved"
    if case["damage"] == "flip" and differ <= case["count"]:
        return Verdict("unseen", said, {"end": "the saved bits"})
    mixed = all(bool(((a == b) | (a == c)).all()) for a, b, c in zip(got, want, other, strict=True))
    if case["damage"] == "swap checkpoints" and mixed:
        return Verdict("unseen", f"a data file of another checkpoint: {said}", {"end": "the saved bits"})
    return Verdict("wrong", f"{said}, without an error", clean=False)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a.shape == b.shape and a.dtype is b.dtype and torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _usable(kept: Kept, pristine: str) -> Verdict | None:
    """Whether the template is what it was and the next load works."""
    if not _same(_bits(kept.template), kept.bits[2]):
        return Verdict("wrong", "load changed its template", clean=False)
    if not _same(_bits(fsdp.load(os.path.join(pristine, "0"), like=kept.template)), kept.bits[0]):
        return Verdict("wrong", "the next load, of a good checkpoint, gave other bits", clean=False)
    return None


# ---------------------------------------------------------------- damage


class Runs:
    """Runs code when it is unpickled."""

    def __init__(self, how: int, path: str) -> None:
        self.how, self.path = how, path

    def __reduce__(self) -> Any:
        import builtins
        import posix

        code = f"open({self.path!r}, 'w').close()"
        return (
            (posix.system, (f"touch {self.path!r}",)),
            (builtins.exec, (code,)),
            (builtins.eval, (f"open({self.path!r}, 'w')",)),
            (open, (self.path, "w")),
        )[self.how]


class Damage:
    """A damaged copy of the first checkpoint."""

    def __init__(self, case: Case, pristine: str, folder: str, sentinel: str, kept: Kept) -> None:
        self.case, self.folder, self.sentinel, self.kept = case, folder, sentinel, kept
        self.sources = [os.path.join(pristine, str(i)) for i in (0, 1)]
        self.rng = Random(repr(sorted(case.items(), key=str)))

    def do(self) -> None:
        if self.case["damage"] == "writers":
            self.writers()
            return
        shutil.copytree(self.sources[0], self.folder)
        getattr(self, self.case["damage"].replace(" ", "_"))()

    def files(self) -> list[str]:
        found = [os.path.join(root, name) for root, _, names in os.walk(self.folder) for name in names]
        return sorted(found)

    def one(self) -> str:
        files = self.files()
        return files[int(self.case["file"] * len(files))]

    def data(self) -> list[str]:
        return [path for path in self.files() if path.endswith((".distcp", ".bin", ".data"))] or self.files()

    def _rewrite(self, path: str, change: Callable[[bytearray], Any]) -> None:
        with open(path, "rb") as file:
            content = bytearray(file.read())
        changed = change(content)
        with open(path, "wb") as file:
            file.write(content if changed is None else changed)

    def nothing(self) -> None:
        """A good one: it has to load."""

    def flip(self) -> None:
        def change(content: bytearray) -> None:
            for k in range(self.case["count"] if content else 0):
                content[int((self.case["at"] + 0.37 * k) % 1 * len(content))] ^= self.case["byte"]

        self._rewrite(self.one(), change)

    def truncate(self) -> None:
        self._rewrite(self.one(), lambda content: content[: int(self.case["at"] * len(content))])

    def empty(self) -> None:
        self._rewrite(self.one(), lambda content: b"")

    def longer(self) -> None:
        self._rewrite(self.one(), lambda content: bytes(content) + self.rng.randbytes(100))

    def remove(self) -> None:
        os.remove(self.one())

    def directory(self) -> None:
        path = self.one()
        os.remove(path)
        os.mkdir(path)

    def swap_checkpoints(self) -> None:
        path = self.data()[int(self.case["file"] * len(self.data()))]
        shutil.copy(os.path.join(self.sources[1], os.path.relpath(path, self.folder)), path)

    def swap_ranks(self) -> None:
        data = self.data()
        if len(data) > 1:
            a, b = self.rng.sample(data, 2)
            os.rename(a, a + ".x")
            os.rename(b, a)
            os.rename(a + ".x", b)

    def layout(self) -> None:
        path = next(p for p in self.files() if p.endswith(".json"))
        said = self.case["layout"]
        if isinstance(said, dict):
            said = json.dumps({**json.loads(Path(path).read_text()), **said})
        with open(path, "w") as file:
            file.write(said)

    def pickle(self) -> None:
        """The pickled description, or all of a data file, is something else."""
        metadata = [p for p in self.files() if p.endswith(".metadata")] or self.files()
        path = metadata[0] if self.case["file"] < 0.7 else self.data()[0]
        with open(path, "wb") as file:
            file.write(pickle.dumps(Runs(self.case["gadget"], self.sentinel), 2))

    def inside(self) -> None:
        """The description of the tensors has a good digest, and says something strange."""
        path = Path(self.folder, "layout.json")
        if not path.exists():
            return
        said = json.loads(path.read_text())
        getattr(self, f"_{self.case['inside'].replace(' ', '_')}")(said["tensors"])
        said.pop("digest")
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({**said, "digest": digest}))

    def _pick(self, table: Any) -> Any:
        return sorted(table, key=str)[int(self.case["at"] * len(table))]

    def _chunk(self, tensors: Any) -> Any:
        """Of some tensor: start, stop, file, offset, length, data, sums."""
        return self._pick(tensors[self._pick([name for name, one in tensors.items() if one[2]])][2])

    def _bytes_entry(self, tensors: Any) -> None:
        """What lies there is a pickle that runs something."""
        chunk = self._chunk(tensors)
        evil = pickle.dumps(Runs(self.case["gadget"], self.sentinel), 2)
        with open(os.path.join(self.folder, chunk[2]), "r+b") as file:
            file.seek(chunk[3])
            file.write(evil.ljust(chunk[4], b"\0")[: max(chunk[4], len(evil))])

    def _path_above(self, tensors: Any) -> None:
        chunk = self._chunk(tensors)
        chunk[2] = f"../../{os.path.basename(os.path.dirname(self.sources[1]))}/1/{chunk[2]}"

    def _absolute_path(self, tensors: Any) -> None:
        chunk = self._chunk(tensors)
        chunk[2] = os.path.join(self.sources[1], chunk[2])

    def _missing_key(self, tensors: Any) -> None:
        del tensors[self._pick(tensors)]

    def _missing_storage(self, tensors: Any) -> None:
        tensors[self._pick([name for name, one in tensors.items() if one[0] and one[1] != [0]])][2].clear()

    def _huge_size(self, tensors: Any) -> None:
        self._shape(tensors, 2**50)

    def _other_shape(self, tensors: Any) -> None:
        self._shape(tensors, 3)

    def _shape(self, tensors: Any, n: int) -> None:
        one = tensors[self._pick([name for name, one in tensors.items() if one[1] and one[1] != [n]])]
        one[1], one[2] = [n], [[0, n, *one[2][0][2:]]]

    def _other_dtype(self, tensors: Any) -> None:
        one = tensors[self._pick([name for name, one in tensors.items() if one[0] != "float64" and one[1] != [0]])]
        one[0] = "float64"

    def _negative_offset(self, tensors: Any) -> None:
        self._chunk(tensors)[3] = -5

    def _long_length(self, tensors: Any) -> None:
        self._chunk(tensors)[4] = 2**40

    def _strange_object(self, tensors: Any) -> None:
        tensors[self._pick(tensors)] = {"what": "Random"}

    def writers(self) -> None:
        """Two processes write one name at the same time, again and again."""
        children = []
        for i in (0, 1):
            pid = os.fork()
            if not pid:
                try:
                    for _ in range(2):
                        with suppress(fsdp.FsdpError, OSError):
                            fsdp.save(self.kept.states[i], self.folder)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
