"""Adafactor (arXiv:1804.04235): of a matrix it keeps the mean squares of rows and of columns, not of each element.

    state = fsdp.shard(params, spec, adafactor.Adafactor())

Shards are flat and end anywhere in a row. So each rank adds up what it has of rows and columns, one all-reduce makes
that whole for all leaves, and another, of a number a leaf, clips the updates. Every rank keeps all means. A vector is a
matrix of one column; of more dims the last one is the columns. Every leaf needs a gradient in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from functional_fsdp import Leaf, extend


def sides(leaf: Leaf) -> tuple[int, int]:
    columns = max(1, leaf.shape[-1]) if len(leaf.shape) > 1 else 1
    return max(1, leaf.numel // columns), columns


def sums(leaf: Leaf, start: int, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The squares of this rank's part: of gradients for each row and for each column, and of weights."""
    (rows, columns), end = sides(leaf), start + g.numel()
    square = F.pad(g.square(), (start % columns, -end % columns)).view(-1, columns)  # whole rows, zeros for the others'
    by_row = F.pad(square.sum(1), (start // columns, rows - start // columns - len(square)))
    return torch.cat([by_row, square.sum(0), w.square().sum()[None]])


@dataclass(frozen=True)
class Adafactor:
    lr: float = 1e-2  # at most, and 1 / sqrt(step) later; times the root mean square of a leaf's weights
    clip: float = 1.0  # the largest root mean square of an update, before that
    communicates: ClassVar[bool] = True  # so that updates get a sender

    def init(self, main: Any) -> Any:
        leaves = [(leaf, buffer.local) for buffer in main.values() for leaf in buffer.bucket.leaves]
        return {leaf.path: [local.new_zeros(n) for n in sides(leaf)] for leaf, local in leaves}

    def update(self, grads: Any, opt: Any, main: Any, count: torch.Tensor, sender: extend.Sender) -> tuple[Any, Any]:
        step, updates = (count + 1).double(), []
        pairs = [zip(*map(extend.leaf_shards, (main[name], grads[name])), strict=True) for name in main]
        parts = [(*mine, grad.local) for some in pairs for mine, grad in some]
        along = [buffer.sharded() for buffer in main.values() for _ in buffer.bucket.leaves]
        totals = sender.sum([sums(*part) for part in parts], along)
        for (leaf, start, _, g), total in zip(parts, totals, strict=True):
            (rows, columns), (row, column), skip = sides(leaf), opt[leaf.path], start % sides(leaf)[1]
            for mean, new in ((row, total[:rows] / columns), (column, total[rows:-1] / rows)):
                mean.lerp_(new + 1e-30, step.pow(-0.8).to(mean.dtype))
            mine = row[start // columns : -(-(start + g.numel()) // columns), None] / row.mean() * column
            updates.append(g * mine.flatten()[skip : skip + g.numel()].rsqrt())
        lengths = sender.sum([update.square().sum() for update in updates], along)
        for (leaf, _, w, _), total, update, length in zip(parts, totals, updates, lengths, strict=True):
            size, too_long = (total[-1] / leaf.numel).sqrt(), (length / leaf.numel).sqrt() / self.clip
            w.sub_(update * step.rsqrt().clamp(max=self.lr) * size.clamp(min=1e-3) / too_long.clamp(min=1))
        return main, opt
