"""A store that may not answer any more."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from functional_fsdp import _distributed
from functional_fsdp._distributed import PatientStore


def test_a_store_that_answers_is_as_it_was() -> None:
    store = PatientStore(dist.HashStore(), timedelta(seconds=10))  # type: ignore[attr-defined]
    assert not store.check(["a"])
    store.set("a", "1")
    assert store.check(["a"])
    assert store.get("a") == b"1"
    assert store.delete_key("a")
    assert not store.check(["a"])


def test_a_store_that_does_not_answer_is_lost_after_the_timeout_and_says_so_at_once_from_then_on() -> None:
    begun, released = threading.Event(), threading.Event()

    class Silent:
        def check(self, keys: list[str]) -> bool:
            begun.set()
            return released.wait(60)

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("broken")

    with pytest.raises(dist.DistNetworkError, match="broken"):
        PatientStore(Silent(), timedelta(seconds=60)).set("a", "1")
    store: Any = PatientStore(Silent(), timedelta(seconds=0.1))
    for _ in range(2):
        with pytest.raises(dist.DistStoreError, match=r"did not answer within 0\.1 s"):
            store.check(["a"])
        assert begun.wait(60)
        assert store.calls.empty()  # the first is under way for good; the second was not even asked
    released.set()


def test_its_thread_ends_with_it() -> None:
    before = {*threading.enumerate()}
    store: Any = PatientStore(dist.HashStore(), timedelta(seconds=10))  # type: ignore[attr-defined]
    assert not store.check(["a"])
    (thread,) = (one for one in threading.enumerate() if one not in before and one.name == "functional_fsdp store")
    del store
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_gloo_was_given_outlives_the_wait_for_it_and_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for what was issued; shortly before the timeout one abandons the step, and a slow one comes
    to the meeting shortly before that one's. gloo must not have ended by then what is drained there."""
    given: dict[str, timedelta] = {}
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, backend, **_: given.update({backend: timeout}))
    for backend in ("gloo", "nccl"):
        _distributed.new_group([0], "reduce data", timedelta(seconds=10), backend)
    assert given == {"gloo": timedelta(seconds=20), "nccl": timedelta(seconds=10)}
