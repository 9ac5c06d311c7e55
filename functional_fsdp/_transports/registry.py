"""The transports there are: a line makes one known by its name."""

from __future__ import annotations

from .._engine.carrier import CollectiveTransport
from .._spec.transport import NAMES
from .auto import Auto
from .copy_engine import CopyEngine
from .symmetric import Symmetric, symmetric

__all__ = ["symmetric"]

NAMES.update({one.name: one for one in (CollectiveTransport(), Symmetric(), CopyEngine(), Auto())})
