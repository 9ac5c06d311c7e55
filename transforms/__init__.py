"""Transforms: small functions around a train step, each in a file of its own. The core does not know them."""

from .vjp import vjp

__all__ = ["vjp"]
