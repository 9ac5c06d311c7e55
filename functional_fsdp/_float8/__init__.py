"""Weights gathered in float8: their scales, their casts, and the linears of torchao that take them as they are."""
