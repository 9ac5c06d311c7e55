"""Uses: how far a driven pass is, for what goes by that. A driver says it at each use of a unit.

USES[device](driver, forward, backward, gradients)     the so many-th use of its forward, and of its backward
                                                       (0: not yet); bytes of main gradients that a use leaves
USES[device](driver, 0, 0, 0)                          the pass is over

Only units that have at least half of the mean of weights count: what a norm keeps is no measure of what a block does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["USES"]

#: who is told, by the device that computes
USES: dict[torch.device, Callable[[Any, int, int, int], None]] = {}
