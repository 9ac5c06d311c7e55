"""Precision: the dtype of each stage of a weight's and a gradient's life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._common.errors import SpecError

__all__ = ["FLOAT8S", "FLOATS", "LeafPrecision", "Precision"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)


def _name(dtype: torch.dtype | None) -> str:
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


class LeafPrecision(NamedTuple):
    """The dtype of each stage of one leaf, and where its gradients are summed: "native" or "fp32".

    copy: whether shards are kept in the dtype of `gather` beside main weights, which have another one.
    """

    main: torch.dtype
    compute: torch.dtype
    grads: torch.dtype
    wire: torch.dtype
    sum: str
    gather: torch.dtype
    copy: bool = False

    def __str__(self) -> str:
        said = [f"{kind} {_name(getattr(self, kind))}" for kind in ("main", "compute", "grads", "wire")]
        if self.copy:
            said.insert(2, f"gather {_name(self.gather)}")
        return f"{', '.join(said)}, sum {self.sum}"


_NO_SUM = (
    "Precision(sum='fp32') of a float64 wire would lose digits. Sums in float32 are of bfloat16 or float32 wires; "
    "leave sum out, or set wire=torch.float32."
)


@dataclass(frozen=True)
class Precision:
    """The dtype of each stage of a weight's and a gradient's life.

    Attributes:
        main: main weights and optimizer state. None: float32, or float64 for float64 leaves.
        compute: gathered weights, and so compute. None: as `main` if that was given, else each leaf's own dtype.
        gather: what is gathered, of which each rank keeps its shard beside main weights: `step` casts it once, and
            gathers cast nothing. The dtype `compute`, which is then named, too: 2 bytes an element of bfloat16, divided
            by the ranks that shard weights. Or torch.float8_e4m3fn or torch.float8_e5m2, for the matrices of linears
            that multiply in float8: a byte an element, with one scale a matrix. Compute sees a `Float8Weight`, whose
            dtype is `compute`, and so is that of its gradient. None: main weights, cast by each gather.
        grads: main gradients, in which reduced gradients are accumulated. None: as `main`. `step` casts them to `main`
            for the optimizer, so fused kernels never see a mix.
        wire: what travels in a reduction: gradients are cast to it once, when they are staged. None: as `compute`.
        sum: where a reduction is added up. "native": by the backend, in the wire's dtype and its own order. "fp32":
            each rank gets the summands of its part (an all-to-all) and adds them up in float32 in the order of the
            ranks, ((r0 + r1) + r2) + ..., the same bits in every run; further axes carry float32. What a rank gets
            takes as many bytes as the staging once more. "auto": "fp32" where the transport adds up itself, as
            copy_engine does, else "native".
        inputs: cast floating inputs of a driven model's parts to the dtype that they compute in, as FSDP2 does.

    Integer and boolean leaves keep their dtype throughout.

    Raises:
        SpecError: for float16 (use bfloat16, which needs no loss scaling), for other dtypes than float64, float32 and
            bfloat16, for a `gather` that is neither float8 nor `compute`, and for `sum="fp32"` of a float64 wire.

    >>> print(Precision(compute=torch.bfloat16).resolve(torch.float32))
    main float32, compute bfloat16, grads float32, wire bfloat16, sum native
    """

    main: torch.dtype | None = None
    compute: torch.dtype | None = None
    grads: torch.dtype | None = None
    wire: torch.dtype | None = None
    sum: str = "auto"
    inputs: bool = False
    gather: torch.dtype | None = None

    def __post_init__(self) -> None:
        for kind in ("main", "compute", "grads", "wire"):
            dtype = getattr(self, kind)
            if dtype is torch.float16:
                raise SpecError(
                    f"Precision({kind}=torch.float16): float16 needs loss scaling, which is not supported. "
                    f"Use torch.bfloat16, which has float32's range."
                )
            if dtype is not None and dtype not in FLOATS:
                raise SpecError(f"Precision({kind}={dtype}): expected one of {', '.join(map(str, FLOATS))} or None.")
        if self.gather is not None and self.gather not in FLOAT8S and (self.gather is not self.compute):
            raise SpecError(
                f"Precision(gather={self.gather}, compute={self.compute}): expected one of "
                f"{', '.join(map(str, FLOAT8S))}; or the dtype of compute, named there, too; or None: then gathers "
                "cast main weights to the dtype of compute."
            )
        if self.sum not in ("auto", "native", "fp32"):
            raise SpecError(f"Precision(sum={self.sum!r}): expected 'auto', 'native' or 'fp32'.")
        if not isinstance(self.inputs, bool):
            raise SpecError(f"Precision(inputs={self.inputs!r}): expected True or False.")
        if self.sum == "fp32" and (self.wire or self.compute or self.main) is torch.float64:
            raise SpecError(_NO_SUM)

    def resolve(self, leaf: torch.dtype, exact: bool = False) -> LeafPrecision:
        """The dtypes of a leaf whose own dtype is `leaf`; nothing is left to be decided."""
        if not leaf.is_floating_point:
            return LeafPrecision(leaf, leaf, leaf, leaf, "native", leaf)
        main = self.main or torch.promote_types(leaf, torch.float32)
        compute = self.compute or self.main or leaf
        wire = self.wire or compute
        if self.sum == "fp32" and wire is torch.float64:
            raise SpecError(_NO_SUM)
        exact = self.sum == "fp32" or (self.sum == "auto" and exact and wire is not torch.float64)
        gather = self.gather or compute
        copy = self.gather is not None and gather is not main
        return LeafPrecision(main, compute, self.grads or main, wire, "fp32" if exact else "native", gather, copy)

    def __str__(self) -> str:
        main = _name(self.main) if self.main else "float32 (float64 where leaves are)"
        compute = _name(self.compute) if self.compute else "as main" if self.main else "as the leaf"
        grads, wire = _name(self.grads) if self.grads else "as main", _name(self.wire) if self.wire else "as compute"
        added = "as the transport does" if self.sum == "auto" else self.sum
        compute += " (inputs too)" * self.inputs + (f", gather {_name(self.gather)}" if self.gather else "")
        return f"main {main}, compute {compute}, grads {grads}, wire {wire}, sum {added}"
