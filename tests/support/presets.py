"""The presets of placements that the tables of tests go through. A new one is a line here."""

from __future__ import annotations

import functional_fsdp as fsdp

AXES = {
    "ddp": ("data",),
    "zero1": ("data",),
    "zero2": ("data",),
    "zero3": ("data",),
    "hsdp": ("replica", "shard"),
    "hfsdp": ("replica", "shard"),
}
PRESETS = tuple(AXES)
TWO_AXES = tuple(preset for preset, axes in AXES.items() if len(axes) == 2)


def placement_of(preset: str) -> fsdp.Placement:
    return getattr(fsdp, preset)(*AXES[preset])


def ranks_of(preset: str, otherwise: int = 2) -> int:
    """On how many ranks its rows run: 2 × 2 of one with two axes."""
    return 4 if preset in TWO_AXES else otherwise
