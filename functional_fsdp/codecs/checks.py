"""What cannot be packed: refused where a precision is made, and where a layout is planned."""

from __future__ import annotations

from math import prod

from .._common.calls import provide
from .._common.errors import SpecError
from .._plan.layout import LeafInfo
from .._spec.placement import Placement
from .._spec.precision import FLOAT8S, Codec, LeafPrecision, Precision, WireAlong
from .._spec.spec import Spec

__all__ = ["check_precision", "refuse_gather", "refuse_wire"]


def check_precision(precision: Precision) -> None:
    """Refuse what a `Precision` says of codecs, and of gathers in another dtype, that cannot be.

    Raises:
        SpecError: a codec without blocks, feedback without a codec, a dtype that is not gathered.
    """
    _check_wire(precision)
    _check_gather(precision)


def _check_wire(precision: Precision) -> None:
    """Refuse what cannot travel in few bits."""
    if not isinstance(precision.feedback, bool):
        raise SpecError(f"Precision(feedback={precision.feedback!r}): expected True or False.")
    codec = precision.wire.codec if isinstance(precision.wire, WireAlong) else precision.wire
    if not isinstance(codec, Codec):
        if precision.feedback:
            raise SpecError(
                f"Precision(wire={precision.wire}, feedback=True): feedback is of wires in a codec, whose errors it "
                "keeps for the next step. Give one, as wire=fsdp.fp8_block, or leave feedback out."
            )
        return
    if not codec.block:
        raise SpecError(
            f"Precision(wire={precision.wire}): it packs all of a tensor at once, and ranks are sent parts. Give a "
            "codec with blocks, as fsdp.fp8_block or fsdp.int8(64)."
        )
    if precision.sum == "native" and isinstance(precision.wire, Codec):
        raise SpecError(
            f"Precision(wire={precision.wire}, sum='native'): backends do not add up packed numbers. Leave sum out: "
            "they are added up in float32, in the order of ranks."
        )


def _check_gather(precision: Precision) -> None:
    """Refuse what cannot be gathered."""
    if isinstance(precision.gather, Codec):
        if not precision.gather.block:
            raise SpecError(
                f"Precision(gather={precision.gather}): it packs all of a tensor at once, and each rank has a part. "
                "Give a codec with blocks, as fsdp.mxfp8 or fsdp.fp8_block."
            )
    elif precision.gather is not None and precision.gather not in FLOAT8S and precision.gather is not precision.compute:
        raise SpecError(
            f"Precision(gather={precision.gather}, compute={precision.compute}): expected one of "
            f"{', '.join(map(str, FLOAT8S))}; or a codec with blocks, as fsdp.mxfp8; or the dtype of compute, "
            "named there, too; or None: then gathers cast main weights to the dtype of compute."
        )


def refuse_gather(leaf: LeafInfo, placement: Placement, dtypes: LeafPrecision) -> None:
    """What cannot be gathered in float8, or in a codec."""
    said = f"Precision(gather={dtypes.gather_codec or dtypes.gather}) of the leaf {leaf.path!r}"
    if dtypes.gather_codec is None and len(leaf.shape) != 2:
        raise SpecError(
            f"{said}, of shape {leaf.shape}: expected a matrix [n, m], of a linear that multiplies in float8. Name the "
            f"weights of such linears only, or give this leaf a rule before that one, {{{leaf.path!r}: Precision()}}."
        )
    if placement.on_host:
        raise SpecError(
            f"{said}: its state lies in the host's memory ({placement}), through which scales cannot follow an update. "
            'Use memory_kind="device" for it, or leave gather out.'
        )


def refuse_wire(leaf: LeafInfo, placement: Placement, dtypes: LeafPrecision, spec: Spec) -> None:
    """What does not send gradients in few bits."""
    codec, axis = dtypes.codec, dtypes.codec_axis
    if axis and axis not in placement.data:
        raise SpecError(
            f"Precision(wire={{{axis!r}: {codec}}}) of the leaf {leaf.path!r}: its gradients are reduced along "
            f"{', '.join(map(repr, placement.data)) or 'no axis'}. Name one of these, or leave wire out for this leaf."
        )
    second = bool(axis) and prod(spec.axes[one] for one in placement.hops[: placement.hops.index(axis)]) > 1
    if spec.transport.name != "collective" and not (second and spec.transport.exact):
        raise SpecError(
            f"Precision(wire={codec}) of the leaf {leaf.path!r}: the transport {spec.transport.name!r} does not move "
            "packed gradients. Use Spec(transport='collective')."
        )
    if placement.on_host:
        raise SpecError(
            f"Precision(wire={codec}) of the leaf {leaf.path!r}: its state lies in the host's memory ({placement}), "
            'and what is left of packing would not. Use memory_kind="device" for it, or another wire.'
        )


provide("codecs", check_precision, refuse_gather, refuse_wire)
