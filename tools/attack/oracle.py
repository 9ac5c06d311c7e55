"""Oracle: plain arithmetic on whole tensors, in float64, for all ranks. It shares no code with the package.

Gradients are given, not computed: small whole numbers that depend on seed, rank, step, microbatch and leaf, so that
sums and means over ranks are exact in every dtype and in every order, and what is expected is exact too. A leaf whose
placement leaves out an axis of the mesh exists once for each place on that axis (`group`).

Rules are those of the documentation: what a pattern matches, which dtype a stage has, what a mean divides by.
"""

from __future__ import annotations

import itertools
import math
import zlib
from fnmatch import fnmatchcase
from typing import Any

import torch

from . import settings
from .trees import paths_of, values
from .verdict import Wrong

EPS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def matches(pattern: str, path: str) -> bool:
    """A pattern matches a path or a leading part of it."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def first(rules: list[list[Any]], paths: list[str]) -> Any:
    """What the first rule says that matches any of the paths."""
    return next((value for pattern, value in rules if any(matches(pattern, path) for path in paths)), None)


class OneLeaf:
    """A leaf, tied places together: what the settings say of it, and its values by group."""

    def __init__(self, leaf: dict[str, Any], paths: list[str], said: dict[str, Any], mesh: list[list[Any]]) -> None:
        self.paths, self.shape = paths, tuple(leaf["shape"])
        self.numel = math.prod(self.shape)
        dtype = getattr(torch, leaf["dtype"])
        self.dtype = dtype
        precision = first(said["precision"], paths) or {}
        given = {kind: getattr(torch, precision[kind]) for kind in ("main", "compute", "grads") if kind in precision}
        self.main, self.compute, self.grads = dtype, dtype, dtype
        if dtype.is_floating_point:
            self.main = given.get("main", torch.promote_types(dtype, torch.float32))
            self.compute = given.get("compute", given.get("main", dtype))
            self.grads = given.get("grads", self.main)
        trains = first(said["trainable"], paths)
        self.trains = dtype.is_floating_point and not leaf["frozen"] if trains is None else bool(trains)
        self.label = first(said["labels"], paths) or "default"
        data = first(said["placement"], paths)["data"]
        self.own = [axis for axis, size in mesh if axis not in data and size > 1]
        self.value: dict[Any, torch.Tensor] = {}
        self.mean: dict[Any, torch.Tensor] = {}
        self.square: dict[Any, torch.Tensor] = {}
        self.grad: dict[Any, torch.Tensor] = {}
        self.taken = 0  # steps in which it had a gradient

    def rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype).double()


class Oracle:
    """What the weights, gradients and norms of a state have to be, on every rank."""

    def __init__(self, model: dict[str, Any], mesh: list[list[Any]], seed: int) -> None:
        self.said, self.mesh, self.seed = model["settings"], mesh, seed
        leaves, places = model["leaves"], paths_of(model["leaves"])
        self.ranks = list(itertools.product(*(range(size) for _, size in mesh)))  # coordinates by rank
        self.axes = [axis for axis, _ in mesh]
        self.leaves: dict[str, OneLeaf] = {}
        self.owner: dict[str, OneLeaf] = {}
        for i, leaf in enumerate(leaves):
            if leaf["same"] is not None:
                continue
            paths = [places[j] for j, other in enumerate(leaves) if j == i or other["same"] == i]
            one = OneLeaf(leaf, paths, self.said, mesh)
            self.leaves[places[i]] = one
            self.owner |= dict.fromkeys(paths, one)
            for group in {self.group(one, rank) for rank in range(len(self.ranks))}:
                whole = values(leaf, i, zlib.crc32(repr(group).encode()) if group and model.get("own") else 0)
                one.value[group] = whole.to(one.main).double() if whole.dtype.is_floating_point else whole
        used = {axis for path in self.leaves for axis in first(self.said["placement"], self.leaves[path].paths)["data"]}
        rules = {axis for _, rule in self.said["placement"] for axis in rule["data"]}
        self.data = [axis for axis in self.axes if axis in rules or axis in used]
        self.ranks_of_mean = math.prod(size for axis, size in mesh if axis in self.data)
        self.factor = 3 if self.ranks_of_mean % 3 == 0 else 1
        self.steps = 0
        self.exact = True  # gradients are whole numbers still

    def group(self, leaf: OneLeaf, rank: int) -> Any:
        """Which copy of a leaf a rank has: its place on the axes that the leaf's placement leaves out."""
        return tuple(self.ranks[rank][self.axes.index(axis)] for axis in leaf.own)

    # ---- gradients

    def gradient(self, path: str, rank: int, when: tuple[int, ...]) -> torch.Tensor:
        """The gradient of the leaf at this place, on this rank, in this microbatch: whole numbers."""
        shape = self.owner[path].shape
        seed = zlib.crc32(f"{self.seed} {path} {rank} {when}".encode())
        return self.factor * torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()

    def reduced(self, path: str, rank: int, when: tuple[int, ...]) -> None:
        """A rank gave the gradient of this place."""
        leaf = self.owner[path]
        if leaf.trains:
            group = self.group(leaf, rank)
            share = self.gradient(path, rank, when)
            share = share / self.ranks_of_mean if self.said["average"] == "mean" else share
            leaf.grad[group] = leaf.grad.get(group, torch.zeros(leaf.shape, dtype=torch.float64)) + share

    def forget(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = {}

    def norm(self, rank: int) -> float:
        """Of all gradients, each element once, of the ranks that train with this one."""
        parts = (
            float(grad.square().sum())
            for leaf in self.leaves.values()
            for group, grad in leaf.grad.items()
            if self._together(leaf, group, self.group(leaf, rank))
        )
        return math.sqrt(sum(parts))

    def _together(self, leaf: OneLeaf, one: Any, other: Any) -> bool:
        """Whether ranks with these copies of a leaf are at one place along the axes that no placement names."""
        return all(a == b for axis, a, b in zip(leaf.own, one, other, strict=True) if axis not in self.data)

    def clip(self, limit: float) -> None:
        scales: dict[tuple[OneLeaf, Any], float] = {}
        for leaf in self.leaves.values():
            for rank in range(len(self.ranks)):
                if (leaf, self.group(leaf, rank)) not in scales:
                    scales[leaf, self.group(leaf, rank)] = min(1.0, limit / (self.norm(rank) + 1e-6))
        self.exact = self.exact and min(scales.values(), default=1.0) == 1.0
        for leaf in self.leaves.values():
            leaf.grad = {group: scales[leaf, group] * g for group, g in leaf.grad.items()}

    # ---- steps

    def step(self, skip: bool = False) -> None:
        for leaf in self.leaves.values():
            if leaf.grad and not skip:
                leaf.taken += 1
                for group, grad in leaf.grad.items():
                    self._update(leaf, group, leaf.rounded(grad, leaf.main))
        self.forget()
        self.steps += not skip

    def _update(self, leaf: OneLeaf, group: Any, g: torch.Tensor) -> None:
        said, w = self.said["optimizer"], leaf.value[group]
        lr, decay = settings.rate(said, leaf.label, self.steps), settings.decay(said, leaf.label)
        if said["kind"] == "adamw":
            m = 0.9 * leaf.mean.get(group, torch.zeros_like(w)) + 0.1 * g
            v = 0.999 * leaf.square.get(group, torch.zeros_like(w)) + 0.001 * g * g
            leaf.mean[group], leaf.square[group] = leaf.rounded(m, leaf.main), leaf.rounded(v, leaf.main)
            t = leaf.taken
            w = w * (1 - lr * decay) - lr / (1 - 0.9**t) * m / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        else:
            d = g + decay * w
            if said["kind"] in ("momentum", "nesterov"):
                m = 0.5 * leaf.mean.get(group, torch.zeros_like(w)) + d
                leaf.mean[group] = leaf.rounded(m, leaf.main)
                d = d + 0.5 * m if said["kind"] == "nesterov" else m
            w = w - lr * d
        leaf.value[group] = leaf.rounded(w, leaf.main)

    # ---- checks

    def expect(self, path: str, rank: int, got: torch.Tensor, kind: str, where: str, part: slice | None = None) -> None:
        """Raise Wrong unless `got` is the leaf at this place, as `kind`: "main", "compute" or "grads"."""
        leaf = self.owner[path]
        group = self.group(leaf, rank)
        if kind == "grads":
            want = leaf.grad.get(group, torch.zeros(leaf.shape, dtype=torch.float64))
        else:
            want = leaf.value[group]
        dtype, shape = getattr(leaf, kind), leaf.shape
        if part is not None:
            want, shape = want.reshape(-1)[part], tuple(want.reshape(-1)[part].shape)
        if tuple(got.shape) != shape or got.dtype is not dtype:
            raise Wrong(f"{where}: {path!r} is {tuple(got.shape)} {got.dtype}, expected {shape} {dtype}")
        if not dtype.is_floating_point:
            same = torch.equal(got, want.to(dtype))
        else:
            want = want.to(dtype).double()
            off = (got.double() - want).abs()
            same = bool((off <= self._slack(leaf, kind) + self._relative(leaf, kind) * want.abs()).all())
        if not same:
            bad = (got.double() - want.double()).abs().reshape(-1)
            i = int(bad.nan_to_num(nan=math.inf).argmax())
            raise Wrong(
                f"{where}: {kind} of {path!r} {shape} {dtype}: {int((bad != 0).sum())} of {bad.numel()} elements "
                f"differ, element {i} is {float(got.reshape(-1)[i])}, expected {float(want.reshape(-1)[i])}"
            )

    def _relative(self, leaf: OneLeaf, kind: str) -> float:
        if kind == "grads":
            return 0.0 if self.exact else 4 * EPS[leaf.grads]
        if not leaf.taken:
            return 0.0
        return 4 * EPS[leaf.main] + (2 * EPS[leaf.compute] if kind == "compute" else 0.0)

    def _slack(self, leaf: OneLeaf, kind: str) -> float:
        """Where terms cancel; adamw divides moments that are rounded each."""
        if kind == "grads":
            return 0.0 if self.exact else 64 * EPS[leaf.grads]
        if not leaf.taken:
            return 0.0
        adam = self.said["optimizer"]["kind"] == "adamw"
        exact = 0.0 if self.exact else 32 * EPS[leaf.grads]
        return (8 * EPS[leaf.main] + exact) * leaf.taken * (self.said["optimizer"]["lr"] * 4 if adam else 4)
