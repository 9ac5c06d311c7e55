"""A random program of calls that lie in each other, pack tensors, are differentiated, or dropped."""

from __future__ import annotations

import random
from typing import Any

import torch

from functional_fsdp import extend
from functional_fsdp.transforms._drive.unit_uses import USES
from functional_fsdp.transforms._remat.moves import MovedTensor, MoveGroup


class Pass:
    """Who drives a pass: what is known of one is wrong of the next."""


DRIVER = Pass()
Kept = list[tuple[Any, torch.Tensor]]  # what a tensor was packed to, and a copy of it


class MoveProgram:
    """One program.

    Args:
        rows: of the smaller tensors.
    """

    def __init__(self, seed: int, device: torch.device, rows: int = 10, width: int = 32) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.rows, self.width = device, rows, width
        self.buffers = extend.HostBuffers()
        self.over: list[Kept] = []  # of calls that are over
        self.right: list[torch.Tensor] = []  # whether what came back is what was packed

    def run(self) -> bool:
        """Whether all that came back was what had been packed."""
        uses = self.random.randint(2, 5)
        driven = self.random.random() < 0.7  # by a driver, whose passes before had other numbers of uses and calls
        for i in range(uses):
            self.used(driven, i + 1, 0)
            if self.random.random() < 0.8:
                self.call(0)
        order = [*reversed(self.over)]
        self.over = []
        if self.random.random() < 0.3:
            self.random.shuffle(order)
        for i, kept in enumerate(order):
            self.used(driven, uses, i + 1)
            if self.random.random() < 0.2:
                kept.clear()  # nobody asks for it
            for _ in range(self.random.choice([1, 1, 2])):
                self.check(kept)
            kept.clear()
            self.use_what_is_free()
        assert len(self.buffers.free) == self.buffers.made
        return all(map(bool, self.right))

    def used(self, driven: bool, forward: int, backward: int) -> None:
        if driven and self.device in USES:
            USES[self.device].used(DRIVER, forward, backward, self.random.choice([0, 500, 5000]))

    def call(self, depth: int) -> None:
        group, kept = MoveGroup(self.buffers, self.device, set()), []
        for _ in range(self.random.randint(1, 4)):
            what = self.random.random()
            if what < 0.5:
                kept += self.part(group)
            elif what < 0.7 and depth < 2:
                self.call(depth + 1)
            elif what < 0.8:
                self.check(kept)  # a gradient inside the call
            elif kept:
                kept.pop(self.random.randrange(len(kept)))  # dropped, on its way maybe
            self.use_what_is_free()
        group.end()
        self.over.append(kept)
        self.use_what_is_free()

    def part(self, group: MoveGroup) -> Kept:
        kept: Kept = []
        for _ in range(self.random.randint(1, 3)):
            shape = self.random.choice([1, 4]) * self.rows, self.width
            t = torch.randn(shape, generator=self.generator, device=self.device)
            for view in self.random.sample([t, t.t(), t[2:, ::3], t[5]], 2):
                kept.append((group.pack(view), view.clone()))
            if self.random.random() < 0.3:
                t += 1  # what comes is another version
                kept = [(packed, value) for packed, value in kept if not lies_on(packed, t)]
                kept.append((group.pack(t), t.clone()))
            group.send()
        return kept

    def check(self, kept: Kept) -> None:
        for packed, value in self.random.sample(kept, len(kept)):
            self.right.append((MoveGroup.unpack(packed) == value).all())

    def use_what_is_free(self) -> None:
        for n in (1, 4):
            torch.empty((n * self.rows, self.width), device=self.device).fill_(-1.0)


def lies_on(packed: Any, t: torch.Tensor) -> bool:
    """Whether a tensor that was packed is on the device still, where this one lies."""
    source = packed.storage.source if isinstance(packed, MovedTensor) else packed[0]
    return source is not None and source.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
