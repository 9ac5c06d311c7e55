"""Late copies: which nodes of a graph are marked, and with which options torch.compile is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

import functional_fsdp as fsdp
from functional_fsdp import transforms as T
from functional_fsdp.transforms._compile.compile_units import PASS, mark_copies, with_late_copies

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


def test_what_is_unpacked_of_bytes_is_marked_and_what_else_they_meet_is_not() -> None:
    made = fx.Graph()
    bits, other, x = (made.placeholder(f"primals_{i}") for i in range(3))
    bits.meta["val"] = other.meta["val"] = torch.zeros(32, dtype=torch.uint8)
    x.meta["val"] = torch.zeros(8, 4)
    code = made.get_attr("code")
    values = made.call_function(aten.index.Tensor, (code, [bits]))
    weight = made.call_function(aten.view.default, (values, [4, 8]))
    product = made.call_function(aten.mm.default, (x, weight))
    noise = made.call_function(aten.rand_like.default, (values,))
    both = made.call_function(aten.add.Tensor, (bits, other))
    made.output((product, noise, both))
    assert marked(made) == ["index.Tensor", "view.default"]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))
        return x + y


@pytest.mark.parametrize("precision", [{"gather": fsdp.fp8_block}, {"main": fsdp.nf4(nested=True)}])
def test_compiled_units_keep_bytes_for_the_backward(precision: dict[str, Any]) -> None:
    """Cut in two as Inductor does, but compiled by nobody: what goes from the forward to the backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    kept: list[list[Any]] = []

    def cut(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with config.patch(with_late_copies({})["options"]):
            joint = joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs | {"compiler": "inductor"})
        returned: Any = forward.graph.output_node().args[0]
        kept.append([node.meta["val"] for node in returned[1:]])
        return forward, backward

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    rule = fsdp.Precision(compute=torch.bfloat16, inputs=True, **precision)
    params, model = fsdp.functionalize(torch.nn.Sequential(Net(), Net()))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh("cpu"), precision=rule))
    fsdp.drop_gradients(
        T.forward_backward(model, loss_fn, compile={"backend": backend})(state, torch.randn(512, 256))[0]
    )
    assert any(kept)
    for tensors in filter(None, kept):  # of one graph, or of two if other tests have compiled these classes
        assert [t.dim() for t in tensors if t.dtype is torch.uint8] == [1, 1]
        assert not [t for t in tensors if t.dtype is not torch.uint8 and t.numel() == 256 * 1024]


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x.requires_grad_()).square().mean()
    return loss


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
