"""A model that is made on its ranks, on any device."""

from __future__ import annotations

import torch
from support.problems import Net, mesh_and_placement

import functional_fsdp as fsdp


def initialised(preset: str) -> dict[str, torch.Tensor]:
    mesh, placement = mesh_and_placement(preset)
    state, _ = fsdp.init(Net, fsdp.Spec(mesh, placement), seed=3)
    return fsdp.full_params(state)
