"""How whole matrices and leaves travel to their owners and back: the all-to-alls of a plan, see `_plan.owners`."""

from __future__ import annotations

import torch

from .._common.record import Collective
from .._plan.owners import Moves, Slices
from .optimizer import Sender, Tree

__all__ = ["back", "cut", "ordered", "there"]


def cut(moves: Moves, tree: Tree) -> list[torch.Tensor]:
    """This rank's runs of a tree, views."""
    return [tree[name].local[a:b] for name, a, b, _, _ in moves.runs]


def there(moves: Moves, flat: torch.Tensor, sender: Sender, what: str) -> torch.Tensor:
    """What a rank has of all runs, one after the other, to the owners. Returns what came."""
    for hop in moves.hops:
        one = Collective("all_to_all", hop.axis, hop.most, flat.dtype, "", "side", what, hop.there)
        flat = sender.send(one, ordered(flat, hop.order), (hop.came, hop.sent))
    return flat


def back(moves: Moves, done: list[torch.Tensor], empty: torch.Tensor, sender: Sender, what: str) -> torch.Tensor:
    """The stacks that an owner has computed, flat, back to the runs. `empty`: what a rank that owns nothing sends."""
    flat = ordered(torch.cat(done), moves.held) if done else empty
    for hop in moves.hops[::-1]:
        one = Collective("all_to_all", hop.axis, hop.most, flat.dtype, "", "side", what, hop.back)
        flat = ordered(sender.send(one, flat, (hop.sent, hop.came)), hop.undone)
    return flat


def ordered(flat: torch.Tensor, order: Slices) -> torch.Tensor:
    """Slices of a flat tensor, one after the other."""
    if not order:
        return flat[:0]
    if all(order[i][1] == order[i + 1][0] for i in range(len(order) - 1)):
        return flat[order[0][0] : order[-1][1]]
    return torch.cat([flat[a:b] for a, b in order])
