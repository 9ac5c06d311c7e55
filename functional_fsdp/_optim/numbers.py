"""Numbers that users give to optimizers, as a learning rate: one for all leaves, or one for each label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from .._common.errors import SpecError

__all__ = ["by_label", "number", "numbers", "pair_of"]


def by_label(name: str, value: Any, label: str) -> Any:
    """The value for a label, where there are several."""
    if not isinstance(value, Mapping):
        return value
    if label not in value and "default" not in value:
        keys = " or ".join(dict.fromkeys((repr(label), "'default'")))
        raise SpecError(f"{name}={dict(value)}: nothing for the label {label!r}. Add a number under {keys}.")
    return value[label] if label in value else value["default"]


def number(where: str, value: Any, below: float = math.inf) -> None:
    """Refuse what is no finite number in [0, below)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        least = "a number in [0, 1)" if below == 1 else "a finite number of at least 0"
        raise SpecError(f"{where} is {value!r}; expected {least}.")


def numbers(where: str, value: Any, rates: bool = False) -> None:
    """The same of a setting that may be given by label. `rates`: of functions and tensors, too, which may change."""
    if isinstance(value, Mapping):
        for label, one in value.items():
            numbers(f"{where} for the label {label!r}", one, rates)
    elif not (rates and (callable(value) or (isinstance(value, torch.Tensor) and not value.dim()))):
        number(where, value)


def pair_of(where: str, value: Any) -> Any:
    """Betas as a tuple, or as tuples by label."""
    if isinstance(value, Mapping):
        return {label: pair_of(f"{where} for the label {label!r}", one) for label, one in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise SpecError(f"{where} is {value!r}; expected a pair of numbers, as (0.9, 0.999).")
    for k, beta in enumerate(value):
        number(f"{where}[{k}]", beta, 1)
    return tuple(value)
