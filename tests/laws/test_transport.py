"""The laws that every transport passes, that of CONTRIBUTING.md included."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.commands import code_under
from support.copies import abandoned
from support.presets import PRESETS, ranks_of
from support.problems import LOOPS, batch, loss_fn, net, reference, sharded
from support.ranks import launch
from support.tables import marked

import functional_fsdp as fsdp
from functional_fsdp import SpecError, extend
from functional_fsdp import transforms as T

TRANSPORTS = ("by_sums", "copy_engine", "collective")  # those that CPUs have, and that of CONTRIBUTING.md


def block() -> str:
    """The code as it stands in the guide."""
    return code_under("A transport of your own")


def by_sums() -> Any:
    names: dict[str, Any] = {}
    exec(compile(block(), "CONTRIBUTING.md", "exec"), names)
    return names["BySums"]()


def test_the_guides_transport_is_short() -> None:
    assert block().count("\n") <= 30


def transport_of(name: str) -> Any:
    return by_sums() if name == "by_sums" else name


def dtype_of(transport: str, preset: str, loop: str) -> torch.dtype:
    """Copy engines add float32 gradients up themselves; float64 ones are the backend's."""
    here = transport == "copy_engine" and (loop == "whole" or preset in ("zero3", "hfsdp"))
    return torch.float32 if here else torch.float64


def steps_of(preset: str, loop: str, name: str) -> tuple[list[Any], str]:
    transport, dtype = transport_of(name), dtype_of(name, preset, loop)
    return sharded(preset, loop, 3, 2, dtype, transport=transport), repr(fsdp.Spec({"data": 2}, transport=transport))


ROWS = [*itertools.product(TRANSPORTS, PRESETS, LOOPS)]
#: those in which a transport gathers; and of those in which it does not, one for each preset
QUICK = [*itertools.product(TRANSPORTS, ("zero3", "hsdp", "hfsdp"), ("by_unit",))]
QUICK += [*zip(itertools.cycle(TRANSPORTS), PRESETS, itertools.cycle(LOOPS), strict=False)]
QUICK.append(("copy_engine", "zero1", "whole"))


@pytest.mark.parametrize(("transport", "preset", "loop"), marked(ROWS, QUICK))
def test_steps_are_the_plain_modules(transport: str, preset: str, loop: str) -> None:
    ranks, dtype = ranks_of(preset), dtype_of(transport, preset, loop)
    within = 1e-12 if dtype is torch.float64 else 1e-5
    for seen, said in launch(steps_of, (preset, loop, transport), nprocs=ranks):
        assert transport in said
        for (_, mine, _), (_, grads, _) in zip(seen, reference(ranks, 3, 2, dtype), strict=True):
            for path, grad in grads.items():
                torch.testing.assert_close(mine[path], grad, rtol=within, atol=within)


def parted(name: str) -> tuple[int, bool, bool]:
    return abandoned(transport_of(name))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_parted_meet_again(transport: str) -> None:
    for met, same, resting in launch(parted, (transport,), nprocs=2):
        assert met >= 4
        assert same
        assert resting


class InARing(extend.Carrier):
    """Says records of a kind that there is not."""

    def gathers(self, bucket: Any, whole: Any, steps: Any) -> Any:
        return tuple((one._replace(kind="ring"), out) for one, out in steps)


class Ring(extend.Transport):
    name = "ring"

    def on(self, run: Any, layout: Any) -> Any:
        return InARing(run, layout)


def of_an_unknown_kind() -> str:
    params, _ = fsdp.functionalize(net(torch.float64))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh(), transport=Ring()))
    with pytest.raises(fsdp.ScheduleError) as found:
        fsdp.unshard(state, state.units[0])
    return str(found.value)


def test_a_record_of_an_unknown_kind_is_refused() -> None:
    for said in launch(of_an_unknown_kind, nprocs=2):
        assert "kind 'ring'" in said
        assert "'all_gather', 'reduce_scatter'" in said


def driven(own: bool) -> tuple[Any, list[tuple[str, ...]]]:
    """Weights after driven steps, and the kinds of what is logged on the gather lane; a step is abandoned between."""
    params, model = fsdp.functionalize(net(torch.float64))
    spec = fsdp.Spec(fsdp.local_mesh(), transport=by_sums() if own else "collective")
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    forward_backward = T.forward_backward(model, loss_fn)
    log = state.version.lineage.runtime.issued["gather"]
    before = 0
    for i in range(4):
        if i == 1:
            before = log.count  # in the first step ranks agree on each use, beside the plan
        if i == 2:
            fsdp.unshard(state, state.units[1])  # and never released: the step begins anew
        state, _ = forward_backward(state, batch(i, dist.get_rank(), 0))
        state = fsdp.step(state)
    jobs = list(log.tail)[-(log.count - before) :]
    return fsdp.full_params(state), [tuple(one.kind for one in job) for job in jobs]


def test_a_driven_model_goes_by_it_and_a_step_can_begin_anew() -> None:
    for (weights, kinds), (right, plain) in zip(
        launch(driven, (True,), nprocs=2), launch(driven, (False,), nprocs=2), strict=True
    ):
        torch.testing.assert_close(weights, right, rtol=1e-12, atol=1e-12)
        assert {kind for job in kinds for kind in job} == {"all_reduce"}
        assert {kind for job in plain for kind in job} == {"all_gather"}
        assert len(kinds) == len(plain)


def test_what_is_no_transport_is_refused() -> None:
    with pytest.raises(SpecError, match=r"Spec\(transport=3\): expected one of 'collective', .*or a transport"):
        fsdp.Spec({"data": 2}, transport=3)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"Make one of this class: Transport\(\)"):
        fsdp.Spec({"data": 2}, transport=extend.Transport)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"Transport has no on\(run, layout\)"):
        extend.Transport().on(None, None)
    assert by_sums() != fsdp.symmetric()
    assert fsdp.Spec({"data": 2}, transport="copy_engine").with_transport("collective").transport.name == "collective"
