"""`init`: build a model straight into shards, never holding more than one unit of it.

The module is constructed once, with fake tensors that have no memory, while every operation that writes one is
recorded: its own initialisers run, `reset_parameters`, `self.apply(init_weights)`, `trunc_normal_` and all. Then,
unit by unit, what led to the unit's parameters is replayed for real, sliced, and dropped. Each random operation is
seeded by (seed, its position in the recording), so a parameter's bits depend neither on the world size nor on the
placement.

    record   0 empty S0   1 uniform_ S0   2 empty S1   3 normal_ S1   4 mul_ S0        S: a storage, not a tensor,
    replay(S1)                            2 empty      3 normal_                       so views and .data just work

Where the construction asks for a value (`if mask.any()`), what led to that one tensor is replayed on the spot.
Recording initialisation on fake tensors is the idea of torchdistX's deferred_init (see its documentation).
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from ._axes import dtensor_form, with_dtensors
from ._common.calls import outside_inference
from ._common.errors import FsdpError, SpecError, expect
from ._common.torch_names import FakeTensor, pytree
from ._engine.gathers import resolve_transport
from ._io.load_weights import weights_given
from ._nn.module import buffers
from ._nn.skeleton import skeleton_of
from ._optim.optimizer import as_optimizer
from ._plan.layout import Unit
from ._runtime.agreement import Joint, Topic, agree
from ._runtime.runtime import runtime_of
from ._shared.device import forked_random, seed_generators
from ._shared.torch_names import TorchDispatchMode, disable_current_modes, fake_tensors, to_scalar
from ._spec.spec import Spec
from ._state.shard import build, connecting, describe, given, is_dtensor, local_part, needs_spec
from ._state.state import State
from ._storage import FlatBuffer, written_by

M = TypeVar("M", bound=nn.Module)
BY_ITSELF = "parallelize_module(..., src_data_rank=None) has each rank cut what it has made, and sends nothing."


class WeightSource(Protocol):
    """Tensors by name that a model's weights come from, as `open_checkpoint` gives them."""

    what: str
    tensors: Mapping[str, Any]


class View(NamedTuple):
    """A tensor as the recording keeps it: which storage, and how it looks at it."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Recorded(NamedTuple):
    """One recorded operation; tensors in `args` and `kwargs` are Views. `writes`: the storages it makes or changes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[View]
    writes: set[int]


class Recorder(TorchDispatchMode):
    """Every operation that makes or changes a fake tensor, in order."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self.fake = fake_tensors()
        self.seed, self.device = seed, device
        self.calls: list[Recorded] = []
        self.alive: dict[int, Any] = {}  # storages, so that their numbers are not given out again

    def view(self, t: Any) -> Any:
        """A fake tensor as a View; a real one (a literal) stays what it is."""
        if not isinstance(t, FakeTensor):
            return t
        storage = t.untyped_storage()
        self.alive[storage._cdata] = storage
        return View(storage._cdata, tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # it changes what it is given, of which its schema does not tell
            raise SpecError(
                f"init: the module's construction sends tensors to other ranks ({func}), which have no values yet. "
                f"{BY_ITSELF} Or build the module for real, and use functionalize(module) and shard(params, spec)."
            )
        if func is to_scalar and isinstance(args[0], FakeTensor):
            with disable_current_modes():
                return self.replay([self.view(args[0])])[0].item()
        seen = pytree.tree_map(self.view, (args, kwargs))  # as they are now: `.data =` may change them later
        read = {v.storage for v in _views(seen)}
        result = func(*args, **kwargs)
        self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()  # its weakrefs forbid Module.to
        outs = _views(pytree.tree_map(self.view, result))
        changed = _views([self.view(t) for t in written_by(func, args, kwargs)])
        writes = {v.storage for v in outs} - read | {v.storage for v in changed}
        if writes:
            self.calls.append(Recorded(func, seen[0], seen[1], outs, writes))
        return result

    def replay(self, wanted: Iterable[Any]) -> list[torch.Tensor]:
        """Real values of the `wanted` Views, by running again what their storages depend on, in the same order."""
        wanted = list(wanted)
        needed = {v.storage for v in wanted if isinstance(v, View)}
        chosen = []
        for index in range(len(self.calls) - 1, -1, -1):
            if self.calls[index].writes & needed:
                chosen.append(index)
                needed |= {v.storage for v in _views((self.calls[index].args, self.calls[index].kwargs))}
        real: dict[int, torch.UntypedStorage] = {}

        def value(v: Any) -> Any:
            if isinstance(v, torch.Tensor):
                return v.clone()
            if isinstance(v, torch.UntypedStorage) and v.device.type == "meta":
                raise SpecError(
                    "init: the module's construction reads weights by torch.load, which gives shapes only to tensors "
                    "that have no values yet. Leave that out, and name the file: init(make, spec, weights=file)."
                )
            if not isinstance(v, View):
                return v
            if v.storage not in real:
                raise SpecError(
                    f"init: a tensor of shape {v.size} was made where it could not be recorded. Build the module for "
                    f"real and use functionalize(module) and shard(params, spec). {BY_ITSELF}"
                )
            storage = real[v.storage]
            return torch.empty(0, dtype=v.dtype, device=storage.device).set_(storage, v.offset, v.size, v.stride)

        with torch.no_grad(), forked_random(self.device):
            for index in reversed(chosen):
                func, args, kwargs, outs, _ = self.calls[index]
                args, kwargs = pytree.tree_map(value, (args, kwargs), is_leaf=lambda x: isinstance(x, View))
                if torch.Tag.nondeterministic_seeded in func.tags:
                    kwargs = {key: None if key == "generator" else value for key, value in kwargs.items()}
                    seed = hashlib.sha256(f"{self.seed} {index}".encode()).digest()[:7]
                    seed_generators(int.from_bytes(seed, "little"))
                made = func(*args, **kwargs)
                tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
                for v, t in zip(outs, tensors, strict=True):
                    if v.storage not in real:
                        if (t.stride(), t.storage_offset()) != (v.stride, v.offset):
                            t = torch.empty_strided(v.size, v.stride, dtype=t.dtype, device=t.device).copy_(t)
                        real[v.storage] = t.untyped_storage()
            return [value(v) for v in wanted]


def _views(tree: Any) -> list[View]:
    leaves = pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, View))
    return [leaf for leaf in leaves if isinstance(leaf, View)]


class _Copies(TorchFunctionMode):
    """Copies of fake tensors, by `copy.deepcopy`. torch's own would copy their mode, and its weak references with it.

    While the module is made, a copy is an operation that is recorded. While a skeleton is copied (`real`), what was
    fake in the module (buffers, tensors in attributes) becomes real.
    """

    def __init__(self, recorder: Recorder, real: bool) -> None:
        super().__init__()
        self.recorder, self.real = recorder, real

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            fake, memo = args
            if id(fake) not in memo:
                memo[id(fake)] = self.again(fake) if self.real else self.twin(fake, memo)
            return memo[id(fake)]
        if self.real and func is torch.Tensor.__deepcopy__ and is_dtensor(args[0]):
            whole, memo = args
            if id(whole) not in memo:
                memo[id(whole)] = dtensor_form(whole)(self.again(local_part(whole)))
            return memo[id(whole)]
        return func(*args, **(kwargs or {}))

    def again(self, fake: Any) -> torch.Tensor:
        return self.recorder.replay([self.recorder.view(fake)])[0].requires_grad_(fake.requires_grad)

    def twin(self, fake: Any, memo: dict[int, Any]) -> torch.Tensor:
        """Another fake tensor, with the attributes that the user has given to this one."""
        if not fake.is_leaf:
            raise SpecError(
                "init: a tensor that was computed from others which require gradients is copied by copy.deepcopy, and "
                "torch copies leaves only. Compute it in the forward, or under torch.no_grad()."
            )
        made: Any = fake.detach().clone()
        made = nn.Parameter(made, fake.requires_grad) if isinstance(fake, nn.Parameter) else made
        own = {*vars(made), "_is_param", "_debug_trace"}
        given = {name: x for name, x in vars(fake).items() if name not in own and "_memo" not in name}
        vars(made).update(copy.deepcopy(given, memo))
        return made if isinstance(fake, nn.Parameter) else made.requires_grad_(fake.requires_grad)


@outside_inference
def init(
    make: Callable[[], M],
    spec: Spec,
    optimizer: Any = None,
    *,
    local_buffers: Sequence[str] = (),
    seed: int = 0,
    every_buffer: bool = False,
    weights: str | os.PathLike[str] | WeightSource | Mapping[str, torch.Tensor] | None = None,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    convert: Mapping[str, Any] | Callable[[M], Mapping[str, Any]] | None = None,
    partial: bool | str | Sequence[str] = False,
) -> tuple[State, M]:
    """Build a model as shards: one unit at a time is made by the module's own initialisers, sliced and dropped.

    Args:
        make: builds the module, as `lambda: GPT(config)`. It runs with fake tensors, which have no memory. It may call
            `parallelize_module(..., src_data_rank=None)`, along an axis of the spec's mesh.
        spec, optimizer, local_buffers: as for `shard`.
        seed: decides every bit of the weights, whatever the world size and the placement. They are not those of
            `torch.manual_seed(seed); make()`, and seeds and generators within `make` do not count.
        every_buffer: the state gets the buffers that are not persistent, too; see `buffers`.
        weights: where their values come from in the place of the initialisers: a folder or file of any format that
            `open_checkpoint` knows, or {name: tensor}; each rank reads its runs only. See `load_weights`.
        rename, convert, partial: as for `load_weights`; `convert` may also be a function that is given the module, as
            `conversions_of` is. Leaves that may be missing by `partial`, and are, are initialised.

    Returns:
        the State, its persistent buffers included, and the skeleton with real buffers, for `bind`.

    Memory: the shards plus one unit, on the mesh's device.

    Raises:
        SpecError: a module whose construction needs what fake tensors cannot give (numpy, shapes that hang on values).
        SpecError, TreeError: ranks that were given different settings or make different models, as for `shard`.
        If one rank raises, all do.

    Collective: as `shard`.

    Example: `state, model = fsdp.init(lambda: GPT(config), spec, fsdp.adamw(lr=3e-4), seed=0)`.
    """
    run = runtime_of(needs_spec("init", spec).mesh)

    def look() -> tuple[Any, list[Topic]]:
        recorder, module = _recorded(make, seed, run.device)
        params = dict(module.named_parameters(remove_duplicate=False))
        views = {path: recorder.view(local_part(p)) for path, p in params.items()}
        shapes = {views[path]: nn.Parameter(_meta(p), requires_grad=p.requires_grad) for path, p in params.items()}
        infos, paths, treedef = describe({path: shapes[views[path]] for path in params})
        spec_ = with_dtensors(spec, paths, [*params.values()])
        plan, topics = given(infos, paths, spec_, as_optimizer(optimizer), seed)
        fill = None
        if weights is not None:
            fill, more = weights_given(weights, convert(module) if callable(convert) else convert, rename, partial)
            topics += more
        with torch.no_grad(), _Copies(recorder, real=True):
            skeleton = skeleton_of(module, spec_)
        return (infos, paths, treedef, recorder, views, skeleton, fill, spec_, plan), topics

    with Joint(run, "init") as joint, connecting(joint, spec, optimizer is not None):
        infos, paths, treedef, recorder, views, skeleton, fill, spec, plan = agree(joint, "what is given", look)
        spec, plan = resolve_transport(spec, infos, paths, plan)

        def fetch(unit: Unit) -> dict[str, torch.Tensor]:
            return dict(zip(unit.paths, recorder.replay(views[path] for path in unit.paths), strict=True))

        kept = buffers(skeleton, every=every_buffer)
        tied = {p: one for p, one in zip(plan.paths, plan.source, strict=True) if p != one}

        def read(main: dict[str, FlatBuffer], held: Any) -> None:
            fill(main, held, tied)

        maker = fetch if fill is None or partial else None
        then = None if fill is None else read
        return build(joint, plan, spec, optimizer, treedef, maker, kept, local_buffers, seed, then), skeleton


def _recorded(make: Callable[[], M], seed: int, device: torch.device) -> tuple[Recorder, M]:
    """The module, made with fake tensors, and what made it."""
    if isinstance(make, nn.Module):
        raise SpecError(
            f"init: expected a function that builds the module, as lambda: {type(make).__name__}(...), not a module. "
            f"For weights that exist use functionalize(module) and shard(params, spec)."
        )
    recorder = Recorder(seed, device)
    try:
        with warnings.catch_warnings(), torch.device(device), _Copies(recorder, real=False), recorder.fake, recorder:
            module = make()
    except FsdpError:  # some are RuntimeErrors, too
        raise
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise SpecError(
            f"init: the module could not be built with tensors that have no values yet ({type(error).__name__}: "
            f"{str(error).split(chr(10))[0]}). If its construction looks at values, build it for real and use "
            f"functionalize(module) and shard(params, spec)."
        ) from error
    return recorder, expect("what init's make() returned", module, nn.Module, "a module")


def _meta(p: torch.Tensor) -> torch.Tensor:
    return torch.empty(p.shape, dtype=p.dtype, device="meta")
