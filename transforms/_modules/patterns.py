"""Modules of a model, by patterns of their paths."""

from __future__ import annotations

import torch.nn as nn

from functional_fsdp import SpecError
from functional_fsdp.extend import match

__all__ = ["outermost"]


def outermost(verb: str, model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """(path, module) of the modules that match a pattern, without those that lie in another of them.

    Raises:
        SpecError: a pattern that matches no module.
    """
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        before = len(chosen)
        for path, module in model.named_modules():
            if path and match(pattern, path) == path:
                chosen[path] = module
        if len(chosen) == before:
            raise SpecError(
                f"{verb}: the pattern {pattern!r} matches no module of {type(model).__name__}. Its parts are "
                f"{', '.join(repr(name) for name, _ in model.named_children())}, ..."
            )
    return [(path, module) for path, module in chosen.items() if not any(path.startswith(f"{o}.") for o in chosen)]
