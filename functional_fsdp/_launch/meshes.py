"""The meshes that `local_mesh` made in this process, and the axes of one if nobody says."""

from __future__ import annotations

from typing import Any

made: dict[Any, Any] = {}  # one for each shape, since one of several axes brings new process groups
default_axes: dict[str, int] = {"data": -1}
