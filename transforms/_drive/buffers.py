"""Buffers of a driven module: they come from the state, and what the forward made of them goes into the next one.

    persistent               ride in the state; a forward works on copies, so the state that it began from keeps its own
    not persistent           masks, rotary tables: stay with the transform's copy of the module
      given to the state     ride in it too, each rank's own (`fsdp.buffers(module, every=True)`)
      changed in place       refused: evaluation, a retried step and other transforms would not see it
      replaced               a cache, most likely: a warning

A buffer that something else in the module holds too (an attribute, another name) is refused when it changes.

Ranks agree on a buffer along the axes along which they share the module that has it, see `shared_axes`.

WriteWatch: weights that a forward changes in place, found at the operation or after the call.

    how they are changed                     seen
    an operation (clamp_, max_norm, out=)    after each call: lent weights share a version counter with their bucket
    through .data                            in a module's first call, and with Schedule(debug=True) in every one
    assignment (self.weight = Parameter())   after each call: something else is in the weight's slot

Gathered weights are borrowed, replicated ones are the state's own: a change would be lost, or stay, by strategy.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn as nn

from functional_fsdp import Layout, PackedWeight, Spec, SpecError, State
from functional_fsdp._seams import changed, objects, refuse_meta, torch_private, written_by
from functional_fsdp.extend import all_reduce, bytes_of, every_buffer, lineage_of, ranks_of


def clear(module: nn.Module, held: dict[str, Any], name: str) -> None:
    """Take away what a module's code put in the place of the parameter that `held` had."""
    for part in module.modules():
        if held is part._parameters:
            for place in (vars(part), part._buffers, part._modules):
                place.pop(name, None)


def version(t: torch.Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts."""
    return 0 if t.is_inference() else t._version


def place(t: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's bytes begin, also of one that has none, as where a graph is made."""
    t = t.bits if isinstance(t, PackedWeight) else t
    return t.untyped_storage()._cdata, int(t.storage_offset())


class WriteWatch(torch_private.TorchDispatchMode):
    """Refuses operations that write into these weights, before they do. For one call: each operation costs more.

    Args:
        weights: {path: tensor}, contiguous.
        ours: whether the package itself is at work: a unit that is held may be gathered again where it lies.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, weights: Mapping[str, torch.Tensor], ours: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.ours = ours
        self.spans: dict[int, list[tuple[int, int, str]]] = {}
        for path, t in weights.items():
            if t.numel():
                spans = self.spans.setdefault(t.untyped_storage()._cdata, [])
                spans.append((*_bytes(t), path))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in () if self.ours() else written(func, args, kwargs):
            spans = self.spans.get(value.untyped_storage()._cdata)
            if spans:
                start, stop = _bytes(value)
                paths = [path for a, b, path in spans if a < stop and start < b]
                if paths:
                    raise changed(paths, f"in place, by {func}")
        return func(*args, **kwargs)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to, when it is called with these."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or schema.name == "aten::set_":  # which writes no bytes
        return []
    found = written_by(func, args, kwargs)
    return [t for t in found if t.layout is torch.strided and t.numel()]


def _bytes(t: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between a tensor's first element and its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    start = int(t.storage_offset())
    return start * t.element_size(), (start + last + 1) * t.element_size()


Rule = Literal["mean", "first", "local"]


class Buffers:
    """The buffers of one module: `lend` puts a state's into it, `collect` takes them out again."""

    def __init__(self, module: nn.Module, rule: Rule) -> None:
        if rule not in ("mean", "first", "local"):
            raise SpecError(
                f"buffers={rule!r}: expected 'mean' (averaged over the data ranks), 'first' (the first rank's) or "
                "'local' (each rank's own)."
            )
        self.rule = rule
        self.module = module
        self.parts = [*module.modules()]
        self.persistent = {path: (held, name) for path, held, name in every_buffer(module, persistent=True)}
        every = {path: (held, name) for path, held, name in every_buffer(module)}
        self.rest = {path: place for path, place in every.items() if path not in self.persistent}
        self.absent = [*_absent(module)]
        self.aliases = _aliases(module, every)
        self.dicts = [part._buffers for part in self.parts]
        self.sizes = [*map(len, self.dicts)]
        self.device: torch.device | None = None
        self.places = dict(self.persistent)  # of what is lent
        self.given: Any = None  # the paths in the state, when `places` was found
        self.lent: dict[str, torch.Tensor] = {}
        self.before: dict[str, tuple[torch.Tensor, int, torch.Tensor | None]] = {}  # of what stays: version, a copy
        self.rode: set[str] = set()  # what came with a state, and was looked at
        self.checked: set[str] = set()  # what kernels may write to, is not in the state, and has not changed so far
        self.warned: set[str] = set()
        self.layout: Layout | None = None  # that `axes` are of
        self.forms: dict[tuple[str, ...], Any] = {}
        self.axes: dict[str, tuple[str, ...]] = {}  # by path: those along which ranks have one buffer
        self.own = {path: held[name] for path, (held, name) in every.items()}

    def lend(self, state: State, device: torch.device, collects: bool = True, compares: bool = True) -> None:
        """Copies of the state's buffers into the module, of all others the module's own; all on the device.

        Args:
            collects: `collect` follows, which asks what the forward changed.
            compares: ranks look whether their modules have the same, where they should. False in a rehearsal.
        """
        given = state.buffers if isinstance(state.buffers, dict) else {}
        if given.keys() != self.given or device != self.device:
            self.places = self.persistent | {path: place for path, place in self.rest.items() if path in given}
            self.move(device, given)
            if compares:
                self.compare(state)
            self.given = given.keys()  # now that nothing was refused
        if collects:
            self.note()
        if not self.places:
            return
        self.lent = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        source = {path: given.get(path, self.own[path]) for path in self.places}
        for path, buffer in source.items():
            by_dtype.setdefault(buffer.dtype, []).append(path)
        for paths in by_dtype.values():
            tensors = [source[path].to(device) for path in paths]
            copies = _copies(tensors)
            self.lent |= dict(zip(paths, copies, strict=True))
        self.versions = {path: tensor._version for path, tensor in self.lent.items()}
        for path, tensor in self.lent.items():
            held, name = self.places[path]
            held[name] = tensor

    def move(self, device: torch.device, given: Collection[str]) -> None:
        """The module's own buffers, once.

        Raises:
            SpecError: one has no values, and the state has none for it.
        """
        self.device = device
        every = self.persistent | self.rest
        for path, (held, name) in every.items():
            if held[name].device.type != "meta":
                held[name] = self.own[path] = held[name].to(device)
            elif path not in given:
                refuse_meta(path)

    def compare(self, state: State) -> None:
        """Where one rank had the values, tables that stay with the module are the same on every rank, once.

        Raises:
            SpecError: on every rank, where they differ.
        """
        rest = [path for path in self.rest if path not in self.places]
        ranks, src = ranks_of(state), lineage_of(state).src
        if src is None or ranks.size == 1 or not rest:
            return
        mine = {path: _digest(self.own[path]) for path in rest}
        found = ranks.everyone(mine, "buffers that are not persistent")
        for path in rest:
            for rank, theirs in enumerate(found):
                if theirs.get(path) != found[0].get(path):
                    raise SpecError(
                        f"ranks have different buffers {path!r}, which is not persistent, so it is no part of a state "
                        f"dict: ranks 0 and {rank} of the mesh. shard(src={src}) has sent the weights, and the buffers "
                        "that it was given. Give it all of them: buffers=fsdp.buffers(module, every=True). Or make the "
                        "module with its tables on every rank."
                    )

    def _live(self) -> set[int]:
        """The dicts of modules in training mode, whose kernels may write running statistics."""
        return {id(part._buffers) for part in self.parts if part._buffers and part.training}

    def note(self) -> None:
        """How the buffers that stay with the module are before a forward."""
        if not (self.persistent or self.rest):
            return
        self.live = self._live()
        for path, (held, name) in self.rest.items():
            if path not in self.places:
                t = held[name]
                looks = path not in self.checked and id(held) in self.live and t.is_floating_point()
                self.before[path] = (t, version(t), t.clone() if looks else None)

    def collect(self, state: State) -> Any:
        """The buffers of the new state: the old ones if the forward can have changed nothing.

        Kernels write running statistics without telling (their versions do not change), and so does code through
        `.data`: what modules in training mode have counts as changed. Ranks agree on all of that, so that what one of
        them alone has written is no other collective.

        Raises:
            SpecError: it changed one that the state does not have, or removed one, or made one.
        """
        filled = any(part._buffers.get(name) is not None for _, part, name in self.absent)
        if filled or [*map(len, self.dicts)] != self.sizes:
            self._refuse_new()
        if not (self.persistent or self.rest):
            return state.buffers
        now = {path: _get(held, name) for path, (held, name) in self.places.items()}
        changed = self.changed(now)
        given = state.buffers if isinstance(state.buffers, dict) else {}
        mine = {}
        for path, t in changed.items():
            if t is None:
                raise SpecError(f"the forward removed the buffer {path!r}, which is in the state. Fill it with zeros.")
            if torch_private.is_wrapped(t) and torch_private.base_of(t).shape != self.lent[path].shape:
                raise SpecError(
                    f"the forward assigned the buffer {path!r} inside of vmap, and it is another one for each sample: "
                    f"{[*torch_private.base_of(t).shape]} in the place of {[*self.lent[path].shape]}. A state has one "
                    "of each. Put the module in evaluation mode, or have it keep such a buffer as it is."
                )
            looks = path in self.aliases and (path not in self.rode or _averaged(t) or self.told(t, path))
            if looks and self.other(t, path):
                raise SpecError(
                    f"the forward changed the buffer {path!r}, whose memory {self.aliases[path]} has too: that would "
                    "not follow, since buffers come from the state. Keep it in one place, or read it by a property."
                )
            if path in given:
                mine[path] = t.detach()
                self.rode.add(path)
            elif (path not in self.checked or self.told(t, path)) and self.other(t, path):  # which waits for the device
                raise SpecError(
                    f"the forward changed the buffer {path!r}, which is not in the state. Give the state its buffers: "
                    "shard(params, spec, optimizer, buffers=fsdp.buffers(model)), or build it with init."
                )
            else:
                self.checked.add(path)
        self._look_at_rest()
        return {**given, **self._agreed(state, mine)} if mine else state.buffers

    def changed(self, now: dict[str, Any]) -> dict[str, Any]:
        """Those of the lent buffers that may have been changed."""
        live = self.live | self._live()
        return {
            path: t for path, t in now.items()
            if self.told(t, path) or id(self.places[path][0]) in live
        }  # fmt: skip

    def told(self, t: torch.Tensor | None, path: str) -> bool:
        """Whether what is in the place of a lent buffer says that it was changed."""
        return t is None or t is not self.lent[path] or t._version != self.versions[path]

    def spoilt(self, t: torch.Tensor, counted: int, copied: torch.Tensor | None) -> bool:
        """Whether a buffer was changed in place, since its version was this and it was copied, if it was."""
        return version(t) != counted or (copied is not None and not torch.equal(t, copied))

    def other(self, t: torch.Tensor, path: str) -> bool:
        """Whether a buffer has other values than the module's own."""
        return not torch.equal(t, self.own[path].to(t.device))

    def _look_at_rest(self) -> None:
        """Buffers that stay with the module, after a forward."""
        for path, (t, counted, copied) in self.before.items():
            held, name = self.rest[path]
            new = _get(held, name)
            if new is t and self.spoilt(t, counted, copied):
                raise SpecError(
                    f"the forward changed the buffer {path!r} in place, which is not persistent, and not in the state: "
                    "evaluation, a retried step and other transforms would not see it. Make it persistent, or give the "
                    "state all buffers: buffers=fsdp.buffers(model, every=True), init(..., every_buffer=True)."
                )
            if copied is not None:
                self.checked.add(path)
            if new is not t and path not in self.warned:
                self.warned.add(path)
                warnings.warn(
                    f"the forward replaced the buffer {path!r}, which is not persistent: it stays with this "
                    "transform's copy of the model, which is right for a cache. If it is more, make it persistent, or "
                    "give the state all buffers: buffers=fsdp.buffers(model, every=True).",
                    stacklevel=4,
                )

    def _refuse_new(self) -> None:
        """Caches may come in a forward; what a state dict would have may not."""
        every = every_buffer(self.module, persistent=True)
        new = [(path, held, name) for path, held, name in every if path not in self.persistent]
        absent = {path for path, _, _ in self.absent}
        for path, held, name in new:
            if path in absent:
                held[name] = None
            else:
                del held[name]
        self.sizes = [*map(len, self.dicts)]
        if new:
            raise SpecError(
                f"the forward registered the buffer {new[0][0]!r}, which the state cannot know of. Register it when "
                "the module is built, or with persistent=False."
            )

    def restore(self) -> None:
        """The module's own buffers back into it, of those that were lent."""
        for path, (held, name) in self.places.items():
            held[name] = self.own[path]

    def _agreed(self, state: State, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the rule, across the ranks that share a buffer. Integers and flags have no mean: by "mean" they are the
        first rank's, too. One all-reduce an axis and dtype of floats, one for all integers, one for all bytes. What is
        the ranks' own (`local_buffers`) stays so."""
        if self.rule == "local" or all(n == 1 for n in state.spec.axes.values()):
            return mine
        local = state.local_buffers
        shared = {p: t for p, t in mine.items() if p in self.persistent and p not in local}
        if self.layout is not state.layout:
            self.layout, self.axes = state.layout, shared_axes(self.persistent, state.layout, state.spec)
        for first in (False, True):
            kinds = {p: t for p, t in shared.items() if (self.rule == "first" or not _averaged(t)) is first}
            for axes in dict.fromkeys(self.axes[path] for path in kinds):
                if not axes:
                    continue
                some = {path: t for path, t in kinds.items() if self.axes[path] == axes}
                zeros = first and any(self.coordinate(state)[axis] for axis in axes)
                tensors = [_sent(t) for t in some.values()]
                tensors = [torch.zeros_like(t) for t in tensors] if zeros else tensors
                op: Any = "sum" if first else "mean"
                found = all_reduce(state, tensors, op, axes, "buffers", self.form(tuple(some)))
                mine = mine | {path: t.to(some[path].dtype) for path, t in zip(some, found, strict=True)}
        return mine

    def form(self, paths: tuple[str, ...]) -> Any:
        """What ranks compare: which buffers these are. The same object for equal paths."""
        if paths not in self.forms:
            self.forms[paths] = "buffers", torch_private.pytree.tree_structure(dict.fromkeys(paths, 0))
        return self.forms[paths]

    def coordinate(self, state: State) -> Mapping[str, int]:
        """This rank's place on the mesh."""
        return ranks_of(state).coordinate


def shared_axes(paths: Iterable[str], layout: Layout, spec: Spec) -> dict[str, tuple[str, ...]]:
    """The data axes along which ranks have one and the same buffer, by its path; pure.

    They are those along which ranks have the module of the buffer: that all its leaves are averaged over. A module
    without leaves is a part of the nearest one around it that has some in it. If these differ (it is a part of a block
    of which some leaves are of experts), the spec's placement of the buffer's path says.
    """
    data = {leaf.path: bucket.placement.data for bucket in layout.buckets.values() for leaf in bucket.leaves}
    own: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)  # by module, of its leaves
    below: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)  # and of its parts' leaves
    for path, source in zip(layout.paths, layout.source, strict=True):
        module = path.rpartition(".")[0]
        own[module].add(data[source])
        while module:
            below[module].add(data[source])
            module = module.rpartition(".")[0]
        below[""].add(data[source])
    found = {}
    for path in paths:
        module = path.rpartition(".")[0]
        several = own.get(module)
        if several is None:
            while module not in below:
                module = module.rpartition(".")[0]
            several = below[module]
            if len(several) > 1:
                several = _by_rule(path, spec) or several
        found[path] = tuple(axis for axis in spec.data if all(axis in axes for axes in several))
    return found


def _get(held: Any, name: str) -> torch.Tensor | None:
    """A buffer by its name: of a dict, or of what a script module has in its place."""
    return held[name] if name in held else None  # noqa: SIM401


def _by_rule(path: str, spec: Spec) -> set[tuple[str, ...]]:
    try:
        return {spec.placement_of(path).data}
    except SpecError:  # no rule matches it
        return set()


def _digest(t: torch.Tensor) -> str:
    """Of a tensor's bytes in their order."""
    host = t.detach().cpu().resolve_conj().resolve_neg().contiguous()  # lives as long as its bytes are read
    return hashlib.sha256(bytes_of(host)).hexdigest()


def _averaged(t: torch.Tensor) -> bool:
    """Whether a buffer of this kind has a mean over ranks."""
    return t.is_floating_point() or t.is_complex()


def _sent(t: torch.Tensor) -> torch.Tensor:
    """A buffer as it travels: integers as one dtype, flags as bytes, floats that no backend adds up as float32."""
    if not _averaged(t):
        return t.to(torch.int64 if t.dtype.itemsize > 1 else torch.uint8)
    return t.float() if t.dtype.itemsize == 1 else t


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One call for tensors of one dtype; each with a version counter of its own, since autograd saves some of them."""
    if tensors[0].dtype in NUMBERS:
        return [*torch_private.foreach_mul(tensors, 1)]
    return [t.clone() for t in tensors]


NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32)


def _absent(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Persistent buffers that are registered as None: (path, module, name)."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, part, name


def _aliases(module: nn.Module, every: dict[str, tuple[dict[str, Any], str]]) -> dict[str, str]:
    """Buffers whose memory something else in the module has too: another buffer, or an attribute (in words)."""
    holders: dict[int, list[str]] = {}
    for path, (held, name) in every.items():
        holders.setdefault(_storage(held[name]), []).append(path)
    found = {path: f"the buffer {other!r}" for paths in holders.values() for path in paths for other in paths
             if other != path}  # fmt: skip
    if not holders:
        return found
    parts = [*module.named_modules()]
    tables = {id(held) for _, part in parts for held in (part._buffers, part._parameters, part._modules)}
    walk = objects.Walk(lambda x: id(x) not in tables and not isinstance(x, torch.Tensor))
    for where, t in walk(objects.Part(path, part) for path, part in parts):
        if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.numel() and not t.is_meta:
            for path in holders.get(_storage(t), ()):
                found[path] = f"the attribute {where.lstrip('.')!r}"
    return found


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)
