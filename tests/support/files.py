"""Files that lie in memory."""

from __future__ import annotations

import io
from typing import Any

import torch


def saved(found: Any) -> io.BytesIO:
    """What torch.save writes, to be read from its beginning."""
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return file
