"""Late copies: which nodes of a graph are marked, and with which options torch.compile is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx

from functional_fsdp.transforms._compile.code import PASS, mark_copies, with_late_copies

aten = torch.ops.aten


def graph(dtype: torch.dtype, computed: bool, copied: bool = True) -> fx.Graph:
    """An input, perhaps cast to its own dtype, turned round, and perhaps copied."""
    made = fx.Graph()
    node = made.placeholder("primals_1")
    node.meta["val"] = torch.zeros(4, 8, dtype=dtype)
    if computed:
        node = made.call_function(aten._to_copy.default, (node,))
    turned = made.call_function(aten.permute.default, (node, [1, 0]))
    made.output(made.call_function(aten.clone.default, (turned,)) if copied else turned)
    return made


def marked(made: fx.Graph) -> list[str]:
    mark_copies(made)
    return [node.target.__name__ for node in made.nodes if "recompute" in node.meta]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_copies_of_inputs_in_float8_are_marked(dtype: torch.dtype) -> None:
    assert marked(graph(dtype, False)) == ["clone.default"]
    assert marked(graph(dtype, True)) == []
    assert marked(graph(dtype, False, copied=False)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.uint8])
def test_no_others_are(dtype: torch.dtype) -> None:
    assert marked(graph(dtype, False)) == []


def test_the_pass_is_among_inductors_settings() -> None:
    plain = with_late_copies({"fullgraph": True})
    assert plain["fullgraph"]
    assert [*plain["options"]] == [PASS]
    assert with_late_copies({})["options"][PASS] is plain["options"][PASS]
    assert plain["options"][PASS].uuid()
    own = with_late_copies({"options": {"max_autotune": True}})["options"]
    assert own["max_autotune"]
    assert PASS in own
    mode = with_late_copies({"mode": "max-autotune-no-cudagraphs"})
    assert "mode" not in mode
    assert mode["options"]["max_autotune"]
    assert PASS in mode["options"]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "aot_eager"},
        {"options": {PASS.replace("_", "-"): None}},
        {"options": {PASS: None}},
        {"mode": "x", "options": {"a": 1}},
    ],
)
def test_what_is_somebody_elses_stays(options: dict[str, Any]) -> None:
    assert with_late_copies(options) == options


def test_a_pass_that_is_set_for_all_stays() -> None:
    import torch._inductor.config as config

    with config.patch({PASS: lambda graph: None}):
        assert with_late_copies({}) == {}
