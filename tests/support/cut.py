"""Leaves as files hold them, by conversions: what one process writes of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from functional_fsdp._io.conversions import Conversions
from functional_fsdp._io.pieces import blocks, pieces


def written(held: Mapping[str, torch.Tensor], convert: Conversions, cuts: int = 3) -> dict[str, torch.Tensor]:
    """What files hold of leaves in memory, each written by so many runs."""
    found: dict[str, torch.Tensor] = {}
    for path, leaf in held.items():
        flat, n = leaf.detach().flatten(), -(-leaf.numel() // cuts) or 1
        for piece in pieces(path, leaf.shape, convert.get(path, path)):
            there = found.setdefault(piece.name, leaf.new_full(piece.shape, torch.nan)).view(-1)
            for start in range(0, leaf.numel(), n):
                for block in blocks(piece, start, min(start + n, leaf.numel())):
                    values = block.of(flat[start:], start)
                    there[block.file : block.file + block.numel] = values.reshape(-1)
    return found
