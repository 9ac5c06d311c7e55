"""The transports there are: a line makes one known by its name."""

from __future__ import annotations

from ._auto import Auto
from ._carrier import CollectiveTransport
from ._copies import CopyEngine
from ._symmetric import Symmetric, symmetric
from ._transport import NAMES

__all__ = ["symmetric"]

NAMES.update({one.name: one for one in (CollectiveTransport(), Symmetric(), CopyEngine(), Auto())})
