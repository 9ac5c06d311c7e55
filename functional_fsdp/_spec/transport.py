"""Transport: what carries the gathers of a plan and exact sums in eager steps, as a value in a Spec. Pure.

    Spec(transport=...)   Transport   which one, its options, what of it shows in a layout and in records
                              │ on(run, layout)
                              ▼
    executor              Carrier     what one lineage of states has of it on this rank: memory, jobs (`carrier`)

A new transport is a file in `_transports` with a Transport and a Carrier, and a line in `_transports.registry`. Nobody
else asks which one it is.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from .._common.errors import SpecError

__all__ = ["NAMES", "Traits", "Transport", "transport_of"]


class Traits(NamedTuple):
    """What of a transport shows in the records. gathers: the lane of its gathers. averages: whether its collectives can
    average; else they add up, and the result is divided."""

    gathers: str = "gather"
    averages: bool = True


class Transport:
    """What carries the gathers of a plan, and exact sums, in eager steps. Equal by class and options, which are its
    attributes. The top of `_engine.carrier` says what goes by it, and what never does.

    Attributes:
        name: what it is called in `Spec(transport=...)` and where specs are printed.
        stays: whether it has memory that ranks share, which is made by `shard` and stays: whether `Carrier.prepare` is
            called. (Memory of this rank only needs no `prepare`.)
        exact: whether it adds up gradients in float32, in the order of ranks, where the precision leaves that open. A
            float64 wire is added up by the backend all the same.
        traits: what of it shows in the records of what is communicated.
    """

    name: ClassVar[str] = "transport"
    stays: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    traits: Traits = Traits()

    def on(self, run: Any, layout: Any) -> Any:
        """What one lineage of states has of it, on this rank of a mesh of several ranks: a `Carrier`.

        Args:
            run: the Runtime of the mesh: `run.sizes` and `run.coordinate` by axis, `run.collective`.
            layout: the Layout of the states.
        """
        raise NotImplementedError(f"{type(self).__name__} has no on(run, layout). Write one that returns a Carrier.")

    def resolve_transport(self, run: Any, layout: Any) -> Transport:
        """The transport that this one comes to on the machine of these ranks, the same on every rank. Collective, if it
        tries anything."""
        return self

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if key != "traits")
        return f"{self.name}({options})" if options else self.name

    def __fsdp_settings__(self) -> Any:
        return repr(self)


#: by name, without options
NAMES: dict[str, Transport] = {}


def transport_of(said: object) -> Transport:
    """A transport from its name, or itself.

    Raises:
        SpecError: there is none of that name.
    """
    if isinstance(said, Transport):
        return said
    if isinstance(said, str) and said in NAMES:
        return NAMES[said]
    instance = f" Make one of this class: {said.__name__}()." if isinstance(said, type) else ""
    raise SpecError(
        f"Spec(transport={said!r}): expected one of {', '.join(map(repr, NAMES))}, or a transport with options, as "
        f"fsdp.symmetric(zero_cta=True).{instance}"
    )
