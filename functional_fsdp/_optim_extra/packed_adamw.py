"""AdamW whose moments are packed by a codec, as 8-bit optimizers have them (Dettmers et al., 2022).

    planes of the moments ──unpack──▶ float32 ──AdamW──▶ weights, and moments in float32 ──pack──▶ the planes

A codec packs blocks without a look at others, and a block is of one leaf and one rank's part. So each plane is flat: a
FlatBuffer that lies as main weights do, with one number for so many elements. What an update makes of weights is made
of moments in float32, before they are packed. On GPUs it is one kernel for all of it; else some elements at once are in
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch

from .._common.calls import provide
from .._common.errors import SpecError
from .._optim.adamw import AdamW
from .._optim.optimizer import Tree, UpdatesSome, count_missed, tensors
from .._plan.layout import ALIGN
from .._runtime.agreement import Leaves
from .._spec.precision import Codec, Planes
from .._storage import FlatBuffer, padding, summary
from ..codecs.kernels import update

MOST = 1 << 22  # elements at once: what is between is some float32 tensors of so many


class PackedAdamState(NamedTuple):
    """First and second moments, packed: {plane of the codec: {bucket: FlatBuffer}}, as main weights lie; of a plane
    that has one number for k elements [n / ranks of main / k].

    missed: as of `AdamState`.
    """

    mean: dict[str, Tree]
    square: dict[str, Tree]
    missed: Tree = {}  # noqa: RUF012

    def __repr__(self) -> str:
        return f"PackedAdamState\n{summary(self._asdict())}"


@dataclass(frozen=True)
class PackedAdamW(UpdatesSome):
    """`AdamW`, of which moments are packed between steps."""

    adamw: AdamW
    codec: Codec
    by_bucket: ClassVar[bool] = True

    def __post_init__(self) -> None:
        said = f"adamw(moments={self.codec})"
        if not self.codec.block:
            raise SpecError(
                f"{said}: it packs all of a tensor at once, and each rank has a part. Give a codec with blocks, as "
                "fsdp.dynamic8 or fsdp.fp8_block(128)."
            )
        if ALIGN % self.codec.block:
            raise SpecError(
                f"{said}: it has blocks of {self.codec.block} elements, and leaves begin with every {ALIGN}th element. "
                f"Give blocks that divide {ALIGN}, as fsdp.dynamic8 has them, or fsdp.fp8_block({ALIGN})."
            )

    def __hash__(self) -> int:
        return hash((type(self), self.codec))

    def named_labels(self) -> Iterator[tuple[str, Sequence[str]]]:
        yield from self.adamw.named_labels()

    def for_step(self, count: torch.Tensor, labels: Sequence[str]) -> PackedAdamW:
        """The same for the step of this count, with what it computes of it."""
        return replace(self, adamw=self.adamw.for_step(count, labels))

    def init(self, main: Tree) -> PackedAdamState:
        self.adamw.check(main)
        for buffer in main.values():
            if buffer.bucket.on_host:
                raise SpecError(
                    f"adamw(moments={self.codec}): the state of {buffer.bucket.name!r} lies in the host's memory "
                    f"({buffer.bucket.placement}), through which packed moments do not go. Use memory_kind='device', "
                    "or leave moments out."
                )
        return PackedAdamState(self._zeros(main, self.codec), self._zeros(main, self.codec.nonnegative()), {})

    def _zeros(self, main: Tree, codec: Codec) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for plane, (every, dtype) in self._planes.items():
            trees, value = found.setdefault(plane, {}), zero(codec, plane)
            for name, buffer in main.items():
                local = buffer.local.new_full((buffer.local.numel() // every,), value, dtype=_stored(dtype))
                trees[name] = FlatBuffer(local, buffer.bucket.blocks(every), buffer.states, buffer.mesh)
        return found

    def placed(self, opt: PackedAdamState) -> PackedAdamState:
        """In the padding, which no file has, lies what stands for zero: the last block of a leaf reaches there."""
        for codec, trees in ((self.codec, opt.mean), (self.codec.nonnegative(), opt.square)):
            for plane, tree in trees.items():
                value = zero(codec, plane)
                for buffer in tree.values() if value else ():
                    for view in padding(buffer):
                        view.fill_(value)
        return opt

    @property
    def _planes(self) -> dict[str, tuple[int, torch.dtype]]:
        """Of each plane: for how many elements it has one number, and its dtype."""
        block = self.codec.block
        return {name: (block // prod(shape), dtype) for name, (shape, dtype) in self.codec.planes((block,)).items()}

    def counted(self, opt: PackedAdamState) -> tuple[str, ...]:
        return tuple(opt.missed)

    def counting(self, opt: PackedAdamState, main: Tree, names: Iterable[str]) -> PackedAdamState:
        return PackedAdamState(opt.mean, opt.square, self.adamw.counts(opt.missed, main, names))

    def update_some(
        self, given: Leaves, skip: torch.Tensor | None, grads: Tree, opt: PackedAdamState, main: Tree,
        count: torch.Tensor,
    ) -> tuple[Tree, PackedAdamState]:  # fmt: skip
        planes = self._planes
        trees = main, grads, *(opt.mean[name] for name in planes), *(opt.square[name] for name in planes)
        for lists, values in self.adamw.groups(given, trees, opt.missed, count):
            rates: dict[torch.Tensor, Any] = {}
            plain = tensors(*values[1:])  # which the kernel takes as numbers only
            for p, g, *views, taken in zip(*lists, strict=True):
                both = dict(zip(planes, views, strict=False)), dict(zip(planes, views[len(planes) :], strict=True))
                if plain or not update(self.codec, p, g, both, taken, values, skip, rates):
                    self._change(skip, p, g, both, taken, values, planes)
        count_missed([(opt.missed[name].local, some) for name, some in given.items() if name in main], skip)
        return main, opt

    def _change(
        self, skip: torch.Tensor | None, p: torch.Tensor, g: torch.Tensor, both: tuple[Planes, Planes],
        taken: torch.Tensor, numbers: tuple[Any, ...], planes: dict[str, tuple[int, torch.dtype]],
    ) -> None:  # fmt: skip
        wide = torch.promote_types(p.dtype, torch.float32)
        change = self.adamw.change if p.dtype is wide else self.adamw.plainly
        codecs = self.codec, self.codec.nonnegative()
        for start in range(0, p.numel(), MOST):
            stop = min(start + MOST, p.numel())
            here = [
                {name: plane[start // planes[name][0] : -(-stop // planes[name][0])] for name, plane in some.items()}
                for some in both
            ]
            mean, square = (
                codec.unpack({name: bits.view(planes[name][1]) for name, bits in some.items()}, (stop - start,), wide)
                for codec, some in zip(codecs, here, strict=True)
            )
            change(skip, [[p[start:stop]], [g[start:stop]], [mean], [square], [taken]], *numbers)
            for codec, some, new in zip(codecs, here, (mean, square), strict=True):
                _put(some, codec.pack(new), skip)


def _put(planes: Planes, values: Planes, skip: torch.Tensor | None) -> None:
    for name, plane in planes.items():
        value = values[name].view(plane.dtype)
        plane.copy_(value if skip is None else torch.where(skip, plane, value))


@cache
def zero(codec: Codec, plane: str) -> float:
    """What stands for zero in a plane beside larger numbers; in a plane of one number a block, zero."""
    one = torch.zeros(codec.block, device="cpu")
    one[0] = 1
    bits = codec.pack(one)[plane]
    return bits.view(_stored(bits.dtype))[-1].item() if len(bits) > 1 else 0


def _stored(dtype: torch.dtype) -> torch.dtype:
    """Of bytes in the place of float8, which backends and pickles do not know."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def packed(adamw: AdamW, moments: Any) -> PackedAdamW:
    """An AdamW with these moments: a codec, or what makes one, as `fsdp.dynamic8`."""
    codec = moments() if callable(moments) else moments
    if not isinstance(codec, Codec):
        raise SpecError(f"adamw(moments={moments!r}): expected a codec, as fsdp.dynamic8, or None.")
    return PackedAdamW(adamw, codec)


provide("optim_extra", packed)
