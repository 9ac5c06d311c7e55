"""Where a State comes from: `shard` takes a pytree of whole parameters and keeps this rank's slices of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.nn as nn

from .._common.calls import outside_inference, provided
from .._common.device import checksum, host_memory, make_room
from .._common.errors import CommError, RestartError, SpecError, TreeError, as_names, expect
from .._common.torch_names import pytree
from .._common.tree import flatten, match, refuse_surrogates
from .._engine.gathers import CollectiveTransport, resolve_transport
from .._optim.optimizer import as_optimizer, check_labels, initial
from .._plan.layout import Bucket, Layout, Leaf, LeafInfo, Unit, plan_layout
from .._plan.plan import keeps_copy
from .._plan.route import residual_states, states_of
from .._runtime.agreement import Joint, Topic, agree
from .._runtime.runtime import Runtime, runtime_of
from .._spec.precision import FLOATS
from .._spec.settings import describe_settings
from .._spec.spec import Spec
from .._storage import FlatBuffer, PackedWeight, leaf_shards, no_scales, refresh, stored_as
from .state import Lineage, State, Version

_with_dtensors, _cut_of = provided("axes.with_dtensors"), provided("axes.cut_of")
_one_source = provided("one_source.OneSource")


def is_dtensor(t: Any) -> bool:
    """Whether it is one. Where nobody has imported them, which takes seconds, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


@torch.no_grad()
def local_part(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, without a graph; another tensor itself."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def describe(tree: Any) -> tuple[list[LeafInfo], tuple[str, ...], pytree.TreeSpec]:
    """What a layout needs to know of the leaves: tied ones once, with aliases; and the tree's paths and structure.

    Raises:
        TreeError: a leaf that is no tensor, or of a kind that cannot be sharded.
    """
    if isinstance(tree, nn.Module):
        raise TreeError(
            f"the tree of parameters is a module ({type(tree).__name__}). Split it: params, model = "
            f"functionalize(module), then shard(params, spec); or build it as shards: init(make, spec)."
        )
    paths, leaves, treedef = flatten(tree)
    if not paths:
        raise TreeError("the tree of parameters has no leaves.")
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise TreeError(f"two leaves have the path {twice!r}: their keys read alike. Rename one of them.")
    infos: dict[Any, LeafInfo] = {}

    def add(key: Any, info: LeafInfo) -> None:
        first = infos.get(key)
        infos[key] = info if first is None else first._replace(aliases=(*first.aliases, info.path))

    for path, leaf in zip(paths, leaves, strict=True):
        where = f"the leaf {path!r} of the tree of parameters"
        expect(where, leaf, torch.Tensor, "a tensor; keep what is no parameter out of the tree", TreeError)
        packed: Any = leaf if type(leaf) is PackedWeight and not leaf.flipped else None
        if packed is not None:
            form, key = packed.form, _identity(packed.bits, path)
            add(key, LeafInfo(path, form.shape, form.dtype, False, (), form))
            continue
        known = type(leaf) in (torch.Tensor, nn.Parameter) or is_dtensor(leaf)
        if not known or leaf.is_sparse or leaf.is_quantized or leaf.is_complex():
            raise TreeError(
                f"the leaf {path!r} is a {type(leaf).__name__} of layout {leaf.layout} and dtype {leaf.dtype}; "
                "expected a plain, dense, real tensor, or a DTensor. Convert it first."
            )
        if leaf.dtype is torch.float16:
            raise SpecError(
                f"the leaf {path!r} is float16, which needs loss scaling. Convert it: leaf.bfloat16() or leaf.float()."
            )
        if leaf.dtype.is_floating_point and leaf.dtype not in FLOATS:
            raise SpecError(
                f"the leaf {path!r} is {leaf.dtype}; expected one of {', '.join(map(str, FLOATS))}, or integers."
            )
        trainable = leaf.requires_grad if isinstance(leaf, nn.Parameter) else True
        add(_identity(leaf, path), LeafInfo(path, tuple(leaf.shape), leaf.dtype, trainable))
    return list(infos.values()), paths, treedef


def _identity(leaf: torch.Tensor, path: str) -> Any:
    """Equal for two leaves that are the same tensor, or views of the same bytes in the same way."""
    if leaf.device.type == "meta":
        return id(leaf)
    leaf = local_part(leaf)
    if not leaf.numel():
        return path
    return (leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)


def make_layout(params: Any, spec: Spec) -> Layout:
    """The layout that `shard(params, spec)` would use. Pure, needs no process group.

    Args:
        params: a pytree of tensors, on the meta device or not; only shapes, dtypes and what is tied count.
        spec: on a mesh, or on axis sizes, `Spec({"data": 1024})`.

    Raises:
        SpecError: a pattern that matches nothing, a leaf in two units or without a placement. TreeError: a leaf that is
            no tensor.

    >>> print(make_layout({"w": torch.empty(1000, 1000, device="meta")}, Spec({"data": 1024})).padding() < 0.05)
    True
    """
    infos, paths, _ = describe(params)
    return plan_layout(infos, _with_dtensors(needs_spec("make_layout", spec), *flatten(params)[:2]), paths)


@outside_inference
def shard(
    params: Any,
    spec: Spec,
    optimizer: Any = None,
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    local_buffers: Sequence[str] = (),
    seed: int = 0,
    src: int | None = None,
) -> State:
    """Shard a pytree of whole parameters: leaves of global shape -> flat shards [n / ranks].

    Args:
        params: a pytree of tensors, the same on every rank (the parameters of `functionalize`, or any dicts, lists,
            ...). They are copied, never changed. The same tensor at two paths is tied: stored once, handed out at both.
            DTensors, as `parallelize_module` makes them, on axes of the spec's mesh: each rank gives its part.
        spec: placement, precision, units. `State.spec` has rules for DTensors besides, as `Spec(own=)` says them.
        optimizer: an `(init, update)` pair, as `adamw(lr=3e-4)`; None for inference.
        buffers: tensors by path that ride along (`State.buffers`): `buffers(module)` for what a module has. Copied.
        local_buffers: patterns of buffers that may differ by rank, `["*"]` for all (see `buffers="local"` of
            `forward_backward`). Driven steps leave them as each rank has made them, whatever their rule.
        seed: what `State.rng` starts from.
        src: the rank whose `params` and `buffers` count, where only one has read them. Others give the same trees, with
            leaves of the same shapes and dtypes that are not read: on the meta device, say. Buffers that are not
            persistent (rotary tables) are no part of a state dict: `buffers(module, every=True)` has them too. Driven
            models compare in their first call those that the state has not been given.

    Returns:
        a State between steps, on the mesh's device.

    Ranks are compared by what they were given: the tree, the bits of every leaf and buffer, every setting of the spec
    and the optimizer, and the seed. Leaves may differ along axes that their placement's data axes leave out (experts).
    Functions are compared by name, code, defaults, what they close over and the plain globals they read; what cannot be
    compared so (locks, generators, objects of C) is named when the spec or the state is printed. An object may say
    itself what counts: by a method `__fsdp_settings__()`, whose result is compared in its place.

    Raises:
        TreeError: a leaf that is no plain tensor; ranks whose trees, values or buffers differ, naming the first that
            does.
        SpecError: whatever is wrong with units, patterns or dtypes; DTensors that are partial, uneven, or on other axes
        or ranks than the mesh has; ranks whose settings differ, naming the first.
        If one rank raises, all do: the others name it and what it met.

    Collective: two exchanges of digests on the host (of lines, where they differ); an all-gather where a placement
    keeps a compute copy; with `src` an all-reduce of each unit's bytes along each axis of the mesh. On GPUs and a mesh
    of one axis an exchange of what is connected, and a collective of a few bytes of each kind that is not.

    Example:
        >>> from functional_fsdp import adamw, local_mesh, shard
        >>> state = shard({"w": torch.ones(4, 4)}, Spec(local_mesh()), adamw(lr=1e-3))
        >>> state.units
        ('w',)
    """
    run = runtime_of(needs_spec("shard", spec).mesh)
    source = None if src is None else _one_source(run, src)

    def look() -> tuple[Any, list[Topic]]:
        infos, paths, treedef = describe(params)
        leaves = flatten(params)[1]
        spec_ = _with_dtensors(spec, paths, leaves)
        if source is not None:
            source.refuse_parts(paths, leaves)
        values = dict(zip(paths, (local_part(leaf).detach() for leaf in leaves), strict=True))
        for path, leaf in values.items():
            if leaf.device.type == "meta" and (source is None or source.here):
                raise TreeError(
                    f"shard: the leaf {path!r} is on the meta device and has no values. Use init(lambda: Model(...), "
                    "spec), which materialises one unit at a time."
                )
        plan, topics = given(infos, paths, spec_, as_optimizer(optimizer), seed)
        if source is not None:
            topics.append(source.topic(buffers or {}))
        return (infos, paths, treedef, values, spec_, plan), topics

    with Joint(run, "shard") as joint, connecting(joint, spec, optimizer is not None):
        infos, paths, treedef, values, spec, plan = agree(joint, "what is given", look)
        spec, plan = resolve_transport(spec, infos, paths, plan)
        said = "{path: tensor}, as fsdp.buffers(model) gives"
        held: Any = expect("shard(buffers)", buffers or {}, Mapping | tuple | list, said)
        if source is not None:
            source.check(plan)
            held = source.buffers(held)

        def fetch(unit: Unit) -> Any:
            return values if source is None else source.of_unit(unit, values)

        return build(joint, plan, spec, optimizer, treedef, fetch, held, local_buffers, seed, src=src)


@contextmanager
def connecting(joint: Joint, spec: Spec, trains: bool) -> Iterator[None]:
    """Meanwhile, on a mesh of one axis, connect the communicators of a step's collectives, if all ranks were given such
    a spec. The first step would do it, and be held up. Collective."""
    run = joint.run
    if not (run.lanes.connects and run.groups and len(run.sizes) == 1):
        yield
        return
    collective = type(spec.transport) is CollectiveTransport
    used = [lane for lane in ("gather", "reduce") if collective and (trains or lane == "gather")]
    every = joint(lambda: (used, run.lanes.unconnected()), "what is connected")
    if all(theirs == used for theirs, _ in every):  # where some are under way, ranks may see that at other times
        run.lanes.connect([lane for lane in used if any(lane in missing for _, missing in every)])
    try:
        yield
    except BaseException as error:  # whoever has left without a word may not have begun: nobody waits for it
        if joint.known or not isinstance(error, CommError | RestartError | KeyboardInterrupt):
            run.lanes.connected()
        raise
    run.lanes.connected()


def needs_spec(where: str, spec: Spec) -> Spec:
    """Refuse what is no Spec."""
    return expect(f"{where}(spec)", spec, Spec, "a Spec, as Spec(mesh, zero3('data'))")


def given(
    infos: list[LeafInfo], paths: Sequence[str], spec: Spec, optimizer: Any, seed: int
) -> tuple[Layout, list[Topic]]:
    """The layout by the spec, and what ranks are to have been given alike, but for values; a spec that cannot be
    honoured is refused here."""
    whole = hasattr(seed, "__index__") and not isinstance(seed, torch.Tensor | type)
    if not whole or not -(1 << 63) <= seed < 1 << 63:
        raise SpecError(f"seed={seed!r}: expected a whole number of 64 bits, from -2**63 to 2**63 - 1.")
    plan = plan_layout(infos, spec, paths)
    check_labels(optimizer, spec)
    kinds = [
        f"{i.dtype}{'' if i.trainable else ' frozen'}{f' tied to {list(i.aliases)}' if i.aliases else ''}"
        for i in infos
    ]
    trees = [f"{info.path} {info.shape} {kind}" for info, kind in zip(infos, kinds, strict=True)]
    settings = [*describe_settings(spec, "Spec"), *describe_settings(optimizer, "optimizer")]
    build_alike = "Build the same parameters on every rank (seed them alike, or use init)."
    give_alike = "Give every rank the same. An object of which not all counts says what does: by __fsdp_settings__()."
    return plan, [
        Topic(trees, TreeError, "trees", "leaf", build_alike),
        Topic([*settings, f"seed: {seed!r}"], SpecError, "settings", "one", give_alike),
        Topic(
            [f"the layout {plan.hash}"], SpecError, "layouts", "thing", "Print fsdp.make_layout(params, spec) on both."
        ),
    ]


def build(
    joint: Joint,
    plan: Layout,
    spec: Spec,
    optimizer: Any,
    treedef: pytree.TreeSpec,
    fetch: Callable[[Unit], Any] | None,
    buffers: Any,
    local_buffers: Sequence[str],
    seed: int,
    then: Callable[[dict[str, FlatBuffer], Any], None] | None = None,
    src: int | None = None,
) -> State:
    """Assemble a State from a layout; `fetch(unit)` gives the unit's whole leaves by path, one unit at a time;
    without it main weights are zero. `then(main, buffers)` fills what has its values from elsewhere. Without both
    nothing that ranks share is made."""
    run, where = joint.run, joint.what
    optimizer = as_optimizer(optimizer)

    def assemble() -> tuple[Any, list[Topic]]:
        nonlocal local_buffers
        local_buffers = as_names(f"{where}(local_buffers)", local_buffers)
        make_room([bucket.nbytes("main") for bucket in plan.buckets.values() if not bucket.on_host], run.device)
        main = {name: _empty(bucket, "main", spec, run.device) for name, bucket in plan.buckets.items()}
        sums: dict[str, torch.Tensor] = {}
        parts: set[str] = set()
        for unit in plan.units:
            if fetch is None:
                break
            values = _stored(unit, fetch(unit), run.device)
            for bucket in unit.buckets:
                _fill(main[bucket.name], values, run)
                if run.size > 1:
                    sums |= {leaf.path: checksum(values[leaf.path]) for leaf in bucket.leaves}
                parts |= {leaf.path for leaf in bucket.leaves if _is_part(leaf, values[leaf.path])}
            del values
        copies = {name: _empty(b, "weights", spec, run.device) for name, b in plan.buckets.items() if keeps_copy(b)}
        scales = {name: no_scales(b, run.device) for name, b in plan.buckets.items() if b.in_float8}
        kept = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(run.device), buffers)
        if then is not None:
            then(main, kept)
        opt = initial(optimizer, {name: main[name] for name in plan.trainable}) if optimizer is not None else {}
        count = torch.zeros((), dtype=torch.int64, device=run.device)
        rng = torch.tensor(seed, dtype=torch.int64, device="cpu")
        held = _buffers(where, kept, local_buffers, run.size > 1)
        return (main, copies, scales, opt, kept, count, rng), [_values(where, sums, parts, plan, spec), held]

    with torch.no_grad():
        main, weights, scales, opt, kept, count, rng = agree(joint, "values", assemble)
        if fetch or then:
            refresh(main, weights, scales)
    own = [path for path in flatten(buffers)[0] if any(match(pattern, path) is not None for pattern in local_buffers)]
    lineage = Lineage(run, plan, spec, 0, count, own, src)
    lineage.enroll()
    static = (spec, plan, optimizer, treedef, Version(lineage, 0))
    made = State(main, weights, scales, {}, opt, kept, count, rng, {}, no_residual(plan, spec, run.device), *static)
    return made._prepared() if fetch or then else made


def _empty(bucket: Bucket, kind: str, spec: Spec, device: torch.device) -> FlatBuffer:
    """A bucket's shard of main weights, of zeros (its padding stays so), or of compute copies, which are gathered."""
    make = torch.zeros if kind == "main" else torch.empty
    bucket = bucket if kind == "main" else bucket.gathered
    dtype = bucket.main if kind == "main" else bucket.gather
    numel = bucket.numel // bucket.slices(kind)
    stays = bucket.on_host if kind == "main" else bucket.copy_on_host
    local = host_memory(numel, dtype, device) if stays else make(numel, dtype=dtype, device=device)
    return FlatBuffer(local, bucket, states_of(bucket, kind), spec.mesh)


def no_residual(layout: Layout, spec: Spec, device: torch.device) -> dict[str, FlatBuffer]:
    """Zeros for each bucket of which what packing loses is kept, as many as a rank packs."""
    made = {}
    for name, bucket in layout.trainable.items():
        if bucket.feedback:
            local = torch.zeros(bucket.owed, dtype=bucket.wire, device=device)
            made[name] = FlatBuffer(local, bucket, residual_states(bucket), spec.mesh)
    return made


def _stored(unit: Unit, values: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """A unit's leaves as they are stored: bytes of those that are packed, which a device does; others as given."""
    found = {}
    for leaf in (leaf for bucket in unit.buckets for leaf in bucket.leaves):
        value = values[leaf.path].detach()
        found[leaf.path] = stored_as(value if leaf.form is None else value.to(device), leaf.form)
    return found


def _fill(buffer: FlatBuffer, values: Any, run: Runtime) -> None:
    """Copy what of the leaves lies in this rank's part of a bucket. Never builds the whole bucket."""
    for leaf, first, local in leaf_shards(buffer):
        if local.numel():
            mine = values[leaf.path].detach()
            if leaf.cuts and not _is_part(leaf, mine):
                mine = _cut_of(mine, leaf.cuts, run.coordinate)
            local.copy_(mine.reshape(-1)[first : first + local.numel()])


def _is_part(leaf: Leaf, value: torch.Tensor) -> bool:
    """Whether a value of a leaf that is cut, along axes of the model's own, is this rank's part of it."""
    return bool(leaf.cuts) and leaf.form is None and value.numel() != prod(leaf.whole)


def _values(where: str, sums: dict[str, torch.Tensor], parts: Container[str], plan: Layout, spec: Spec) -> Topic:
    """The checksum of every leaf. Ranks may have leaves of their own along axes that its gradients do not average, and
    have parts of their own of those in `parts`."""
    numbers = read_sums(list(sums.values()))
    own_of = {
        leaf.path: (*bucket.unlike(spec.axes), *(bucket.cut if leaf.path in parts else ()))
        for bucket in plan.buckets.values() for leaf in bucket.leaves
    }  # fmt: skip
    own = [own_of[path] for path in sums]
    alike = "Build the same parameters on every rank (seed them alike, or use init)."
    alike = "Have make() do the same on every rank." if where == "init" else alike
    lines = [f"{path} checksum {n:016x}" for path, n in zip(sums, numbers, strict=True)]
    return Topic(lines, TreeError, "values", "leaf", alike, own)


def _buffers(where: str, buffers: Any, local: Sequence[str], several: bool) -> Topic:
    """Every buffer and its checksum; of those that may differ by rank, that they are there."""
    paths, leaves, _ = flatten(buffers)
    refuse_surrogates("a buffer", paths)
    for pattern in local:
        if all(match(pattern, path) is None for path in paths):
            raise SpecError(
                f"{where}(local_buffers): the pattern {pattern!r} matches nothing. There are {len(paths)} buffers"
                f"{f', as {paths[0]!r}' if paths else ''}."
            )
    own = [any(match(pattern, path) is not None for pattern in local) for path in paths]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sums = iter(read_sums([checksum(tensor) for tensor in tensors] if several else []))
    lines = []
    for path, leaf, mine in zip(paths, leaves, own, strict=True):
        tensor = several and isinstance(leaf, torch.Tensor)
        said = f"{tuple(leaf.shape)} {leaf.dtype} checksum {next(sums):016x}" if tensor else describe_settings(leaf)[0]
        lines.append(f"{path} of this rank" if mine else f"{path} {said}")
    remedy = "Give every rank the same, or say which ones may differ: local_buffers=[pattern, ...]."
    return Topic(lines, TreeError, "buffers", "one", remedy)


def read_sums(sums: list[torch.Tensor]) -> list[int]:
    """Checksums on the host: one copy for all of a device."""
    found: dict[int, int] = {}
    for device in {number.device for number in sums}:
        which = [i for i, number in enumerate(sums) if number.device == device]
        found |= dict(zip(which, torch.stack([sums[i] for i in which]).tolist(), strict=True))
    return [found[i] % (1 << 64) for i in range(len(sums))]
