"""The gradient sink: what becomes of gradients that are reduced, and of the weights that they update.

    reduce lane ── first of a step ──▶ memory for main gradients, of the device or the host
                ── later ones ───────▶ added there
                └─ or used up where they come, piece by piece, so that there are no main gradients (`Arrival`)

It also knows from when on an update may go beside the backward, and which compute copies updates have renewed. Who
takes part in a step (updates on arrival, host memory) does so through it; the engine knows none of them. `Arrival`, of
one bucket, and `UpdatesOnArrival`, of a step, are in `_capture`.

Main gradients lie in the device's memory, or in the host's, which is kept from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._common.calls import provided
from .._common.record import Mark
from .._plan.layout import Bucket, Layout, Unit
from .._plan.route import States
from .._runtime.runtime import Runtime
from .._storage import FlatBuffer, Stored, clear_padding, in_order

_gradients_on_host = provided("host_memory.gradients_on_host")


class GradientSink:
    """Where the gradients of one lineage end.

    Attributes:
        grads: the main gradients of the step so far, by bucket.
        pool: the host's memory that main gradients had, or have.
        pending: the `UpdatesOnArrival` that takes part from the step's first gradient on. consumers: its `Arrival`s, by
            bucket, from then on.
        untouched: by bucket, oldest first: from when on nothing but an update touches its main weights and gradients.
            Where updates do not overlap it stays empty.
        updated_beside: buckets that the last eager step reduced once, and updated beside its backward.
        renewed: buckets whose compute copies this step's updates have renewed.
        streams: the buffers through which what lies in the host's memory is updated, once there are any.
    """

    def __init__(self, run: Runtime, layout: Layout, mesh: Any) -> None:
        self.run, self.layout, self.mesh = run, layout, mesh
        self.grads: dict[str, FlatBuffer] = {}
        self.pool: dict[Any, Any] = {}
        self.pending: Any = None
        self.consumers: dict[str, Any] = {}
        self.untouched: dict[str, Mark] = {}
        self.updated_beside: tuple[str, ...] = ()
        self.renewed: set[str] = set()
        self.streams: Any = None
        self._step: Any = None

    # ---------------------------------------------------------------- main gradients

    def set_gradients(self, grads: Any) -> None:
        """Go on from these main gradients: a transform may have put others in the state's place."""
        if grads is not self.grads and (grads or self.grads):
            self.grads = dict(grads or {})
            clear_padding(self.grads.values())  # a program's `tree_map` may have put something there
            self.touched()

    def hold(self, bucket: Bucket, local: torch.Tensor, states: States) -> None:
        """These are a bucket's main gradients from here on."""
        self.grads[bucket.name] = FlatBuffer(local, bucket, states, self.mesh)

    def put_in_order(self) -> None:
        """Main gradients as the layout has its buckets."""
        self.grads = in_order(self.layout, self.grads)

    def restart(self) -> None:
        """Back to the state between steps, in which there are none."""
        self.grads = {}

    def memory(self, bucket: Bucket, numel: int) -> torch.Tensor:
        """Memory for so many main gradients."""
        if bucket.grads_on_host:
            return _gradients_on_host(self.pool, self.run, bucket, numel)
        return torch.empty(numel, dtype=bucket.grads, device=self.run.device)

    # ---------------------------------------------------------------- gradients that are used up

    @contextmanager
    def consuming(self, step: Any) -> Iterator[None]:
        """Within, a step is taken in which this one takes part."""
        self.pending = step
        try:
            yield
        finally:
            self.end_step()

    def begin(self, state: Stored) -> None:
        """The first gradients of a step come in which somebody takes part."""
        self._step, self.pending = self.pending, None
        if self._step is not None:
            self.consumers.update(self._step.begin(state))

    def end_step(self) -> None:
        """The step is over, or is captured no more. Compute has waited for what was done with its gradients."""
        self.pending = self._step = None
        self.consumers.clear()

    @property
    def keeps_all(self) -> bool:
        """Whether all gradients of this step are kept: none is used up where it comes."""
        return self.pending is None and not self.consumers

    def used_up(self, bucket: str) -> bool:
        """Whether this bucket's gradients were used up where they came."""
        return bucket in self.consumers and self.consumers[bucket].used

    def check(self, state: Stored, skip: Any = None, lacking: Collection[str] = ()) -> None:
        """Whether a step may end in which gradients were used up. See `UpdatesOnArrival.check`."""
        used = [one for one in self.consumers.values() if one.used]
        if used and self._step is not None:
            self._step.check(state, used, skip, lacking)

    def check_anew(self) -> None:
        """Whether the step may begin anew: not if gradients were used up."""
        for one in self.consumers.values():
            if one.used:
                one.refuse("the step was begun anew")

    # ---------------------------------------------------------------- when an update may begin

    def there(self, buckets: Iterable[Bucket], mark: Mark) -> None:
        """The gradients of these are there from this mark on."""
        for bucket in buckets:
            self.untouched.pop(bucket.name, None)
            if not (self.consumers and self.used_up(bucket.name)):
                self.untouched[bucket.name] = mark

    def touched(self, unit: Unit | None = None) -> None:
        """The main weights of a unit, or all of the state, are read once more: an update has to wait for that, too."""
        for one in self.consumers.values():
            if one.used and (unit is None or any(bucket.name == one.name for bucket in unit.buckets)):
                one.refuse("weights were read, or gradients replaced,")
        if unit is None:
            self.untouched.clear()
        elif self.untouched:
            for bucket in unit.buckets:
                self.untouched.pop(bucket.name, None)

    def drop(self) -> None:
        """Compute has waited for all reductions, or they will never run."""
        self.untouched.clear()

    # ---------------------------------------------------------------- updates

    def begin_update(self, renewed: Iterable[str]) -> None:
        """An eager step updates all weights but those whose gradients were used up, of which these are renewed."""
        self.updated_beside, self.renewed = (), {*renewed}

    def note_beside(self, names: Sequence[str]) -> None:
        """These buckets were reduced once, and are updated beside the backward."""
        self.updated_beside = tuple(names)

    def note_lacking(self, names: Collection[str]) -> None:
        """In these, leaves got no gradient: the next step is not taken to be like this one."""
        self.updated_beside = tuple(name for name in self.updated_beside if name not in names)

    def renew(self, names: Iterable[str]) -> None:
        """An update has renewed the compute copies of these."""
        self.renewed.update(names)

    def renewed_copies(self, put_back: Sequence[Any]) -> Collection[str]:
        """The buckets whose compute copies are renewed already, once; none where some of main weights were put back."""
        along = self.streams.along(put_back) if self.streams is not None else ()
        return {*along, *self.renewed} if self.renewed and not put_back else along

    def stream_by(self, make: Callable[[torch.device], Any]) -> Any:
        """The streams of this lineage, made when they are first needed."""
        if self.streams is None:
            self.streams = make(self.run.device)
        return self.streams
