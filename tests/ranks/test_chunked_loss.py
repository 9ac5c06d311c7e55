"""A head and its cross entropy in chunks: the loss and the gradients of the plain ones, and no table of all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from _gpt import GPT, Config
from support.driven import raised, refused, start
from support.problems import full_grads, largest
from support.ranks import by_rank, each_rank
from support.tables import marked
from torch.utils._python_dispatch import TorchDispatchMode

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

VOCABULARY, TOKENS, CHUNKS = 131, 21, 4
Grads = tuple[torch.Tensor, ...]


class LargestTensor(TorchDispatchMode):
    """The most elements of a floating tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.most = max([self.most, *sizes])
        return out


# ---------------------------------------------------------------- a head


def inputs(dtype: torch.dtype, bias: bool, ignored: int = -100) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(3, TOKENS // 3, 8), (VOCABULARY, 8), *([(VOCABULARY,)] if bias else [])]
    labels = torch.randint(VOCABULARY, (3, TOKENS // 3))
    labels[0, :4] = ignored
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes], labels


def plain(labels: torch.Tensor, **rule: Any) -> Callable[..., torch.Tensor]:
    def loss(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, w, b).flatten(0, -2), labels.flatten(), **rule)

    return loss


def chunked(labels: torch.Tensor, chunks: int = CHUNKS, **rule: Any) -> Callable[..., torch.Tensor]:
    def loss(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return T.linear_cross_entropy(h, w, labels, b, chunks=chunks, **rule)

    return loss


def by_autograd(loss: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> Grads:
    return torch.autograd.grad(loss(*given) * 0.3, given)


def by_func(loss: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> Grads:
    places = tuple(range(len(given)))
    found: Grads = torch.func.grad(lambda *t: loss(*t) * 0.3, argnums=places)(*(t.detach() for t in given))
    return found


def farthest(found: Any, wanted: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rule", [{}, {"ignore_index": 5}, {"reduction": "sum"}])
def test_a_head_in_chunks_has_the_loss_and_the_gradients_of_the_plain_one(
    dtype: torch.dtype, bound: float, bias: bool, rule: dict[str, Any]
) -> None:
    given, labels = inputs(dtype, bias, rule.get("ignore_index", -100))
    scale = TOKENS if rule.get("reduction") == "sum" else 1
    want = plain(labels, **rule)
    for chunks in (1, CHUNKS, 1000):
        some = chunked(labels, chunks, **rule)
        assert abs(some(*given) - want(*given)).item() < bound * scale
        with torch.no_grad():
            assert abs(some(*given) - want(*given)).item() < bound * scale
        for grads in (by_autograd(some, given), by_func(some, given)):
            assert farthest(grads, by_autograd(want, given)) < bound * scale


def test_where_no_label_counts_the_loss_is_nan_and_gradients_are_zeros_as_torch_has_it() -> None:
    given, labels = inputs(torch.float64, True)
    labels.fill_(-100)
    for loss in (plain(labels), chunked(labels)):
        assert loss(*given).isnan()
        assert not any(grad.any() for grad in by_autograd(loss, given))


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_gradient(frozen: int) -> None:
    given, labels = inputs(torch.float64, False)
    given[frozen].requires_grad_(False)
    trained = given[1 - frozen]
    want = torch.autograd.grad(plain(labels)(*given), trained)
    assert farthest(torch.autograd.grad(chunked(labels)(*given), trained), want) < 1e-12


def test_second_derivatives_are_those_of_the_plain_loss() -> None:
    given, labels = inputs(torch.float64, True)
    values = [t.detach() for t in given]
    along = [torch.randn_like(t) for t in values]

    def penalty(loss: Callable[..., torch.Tensor]) -> Grads:
        grads = torch.autograd.grad(loss(*given), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads) + loss(*given), given)

    def around_func(loss: Callable[..., torch.Tensor]) -> Grads:
        by_hidden = torch.func.grad(lambda h: loss(h, *given[1:]))(values[0])
        return torch.autograd.grad(by_hidden.square().sum(), given[1:])

    def product(loss: Callable[..., torch.Tensor]) -> Any:
        return torch.func.jvp(torch.func.grad(loss, argnums=(0, 1, 2)), (*values,), (*along,))[1]

    for derivative in (penalty, around_func, product):
        assert farthest(derivative(chunked(labels)), derivative(plain(labels))) < 1e-12


def test_each_sample_has_its_gradient_under_vmap() -> None:
    (h, w), labels = inputs(torch.float64, False)

    def each(loss: Callable[..., Callable[..., torch.Tensor]]) -> torch.Tensor:
        one = torch.func.grad(lambda w, h, y: loss(y)(h, w))
        found: torch.Tensor = torch.func.vmap(one, in_dims=(None, 0, 0))(w.detach(), h.detach(), labels)
        return found

    assert (each(chunked) - each(plain)).abs().max() < 1e-12


def test_the_gradient_of_a_vmap_and_a_slope() -> None:
    (h, w), labels = inputs(torch.float64, False)
    many = torch.stack([h.detach(), 0.5 * h.detach()]).requires_grad_()

    def both(loss: Callable[..., torch.Tensor]) -> Grads:
        total = torch.func.vmap(loss, in_dims=(0, None))(many, w).sum()
        slope = torch.func.jvp(lambda h: loss(h, w.detach()), (many[0].detach(),), (many[1].detach(),))[1]
        return *torch.autograd.grad(total, (many, w)), slope

    assert farthest(both(chunked(labels)), both(plain(labels))) < 1e-12


@pytest.mark.parametrize(
    "how", ["a gradient in it", pytest.param("a product with the Hessian in it", marks=pytest.mark.large)]
)
def test_compiled_code_has_the_same_gradients(how: str) -> None:
    """torch.compile drops the backward of autograd.Functions under torch.func, and says that nothing needs one."""
    given, labels = inputs(torch.float64, True)
    loss, values = chunked(labels), [t.detach() for t in given]

    def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(fn, fullgraph=True, backend="aot_eager")

    def product(loss: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        return lambda *t: torch.func.jvp(torch.func.grad(loss, argnums=(0, 1, 2)), t, t)[1]

    if how == "a gradient in it":
        found = compiled(lambda *t: torch.func.grad(lambda *t: loss(*t) * 0.3, argnums=(0, 1, 2))(*t))(*values)
        want = by_autograd(plain(labels), given)
    else:
        found, want = compiled(product(loss))(*values), product(plain(labels))(*values)
    assert farthest(found, want) < 1e-12


def test_a_sum_in_float32_of_bfloat16_products_is_nearer() -> None:
    given, labels = inputs(torch.float64, False)
    (_, want) = by_autograd(plain(labels), given)
    low = [t.detach().bfloat16().requires_grad_() for t in given]
    errors = [
        float((by_autograd(chunked(labels, 21, accum_dtype=dtype), low)[1].double() - want).norm())
        for dtype in (torch.float32, None)
    ]
    assert errors[0] < errors[1] < 0.05 * want.norm()


@pytest.mark.parametrize("by", [by_autograd, by_func])
def test_no_table_of_all_logits_is_made(by: Any) -> None:
    given, labels = inputs(torch.float32, True)
    with LargestTensor() as seen:
        by(plain(labels), given)
    assert seen.most >= TOKENS * VOCABULARY  # the mode would see it
    with LargestTensor() as seen:
        by(chunked(labels), given)
    assert seen.most < TOKENS * VOCABULARY / 2


def test_arguments_that_make_no_sense_are_refused() -> None:
    (h, w), labels = inputs(torch.float32, False)
    loss: Any = T.linear_cross_entropy
    refused(
        (lambda: loss(h, w, labels[:, 1:]), "labels of shape (3, 6) for hidden of (3, 7, 8); expected (3, 7)"),
        (lambda: loss(h, w, labels, chunks=0), "chunks=0): expected a number of chunks, at least 1"),
        (lambda: loss(h, w, labels, reduction="none"), "reduction='none'): expected 'mean' or 'sum'"),
    )


# ---------------------------------------------------------------- a model


def gpt(tied: bool) -> GPT:
    torch.manual_seed(0)
    model = GPT(Config(vocab=61, width=16, depth=2, heads=2)).double()
    if tied:
        model.head.weight = model.embed.weight
    return model


def tokens_of(rank: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    tokens, labels = torch.randint(61, (2, 2, 6), generator=generator)
    labels[0, : 1 + rank] = -100
    return tokens, labels


def plain_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)


def in_chunks(model: nn.Module, **rule: Any) -> tuple[Any, Any]:
    return T.chunked_loss(model, head="head", hidden=GPT.features, chunks=3, **rule)


WAYS = ["whole tree", "by hand", "driven", "driven, remat", "microbatches"]


def trained(way: str, tied: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of rank 0 and the gradients, of one round."""
    params, model = fsdp.functionalize(gpt(tied))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=1.0))
    model, loss_fn = in_chunks(model)
    data = tokens_of(dist.get_rank())
    if way == "whole tree":
        state, params = fsdp.unshard(state)
        grads, loss = torch.func.grad_and_value(lambda p: loss_fn(fsdp.bind(model, p), *data))(params)
        return loss.item(), full_grads(fsdp.finish_reductions(fsdp.reduce(state, grads)))
    if way == "by hand":  # the head is a stage
        state, params = fsdp.unshard(state)
        w = {k.removeprefix("head."): v for k, v in params.items() if k.startswith("head.")}
        h, back = T.vjp(lambda p: GPT.features(fsdp.bind(model, p), data[0]), params)  # type: ignore[arg-type]
        loss, head_back = T.vjp(lambda w, h: fsdp.bind(model.head, w)(h, data[1]), w, h)
        dw, dh = head_back(w, torch.ones_like(loss))
        (grads,) = back(params, dh)
        grads = {k: v if v is not None else torch.zeros_like(params[k]) for k, v in grads.items()}
        grads["head.weight"] = grads["head.weight"] + dw["weight"]
        return loss.item(), full_grads(fsdp.finish_reductions(fsdp.reduce(state, grads)))
    if way == "driven, remat":
        model = T.remat(model, "blocks.*", "head")
    if way == "driven, compiled":
        model = T.compile_units(model, "head", backend="aot_eager")
    forward_backward: Any = T.forward_backward(model, loss_fn)
    if way == "microbatches":
        forward_backward = T.accumulate(forward_backward, 2)
        data = tuple(map(torch.cat, zip(*(tokens_of(dist.get_rank(), micro) for micro in range(2)), strict=True)))  # type: ignore[assignment]
    if way == "compiled by T.compile":
        before = fsdp.full_params(state)

        def train_step(state: fsdp.State, *data: torch.Tensor) -> Any:
            state, loss = forward_backward(state, *data)
            return fsdp.step(state), loss

        state, loss = T.compile(train_step, backend="aot_eager")(state, *data)
        return loss.item(), {key: before[key] - leaf for key, leaf in fsdp.full_params(state).items()}
    state, loss = forward_backward(state, *data)
    return loss.item(), full_grads(fsdp.finish_reductions(state))


ROWS = [(way, tied, 2) for way in (*WAYS, "driven, compiled") for tied in (False, True)]
ROWS += [("compiled by T.compile", tied, 1) for tied in (False, True)]
FEW = [*((way, i % 2 == 1, 2) for i, way in enumerate(WAYS)), ROWS[-1]]


@pytest.mark.parametrize(("way", "tied", "world"), marked(ROWS, FEW))
def test_a_model_in_chunks_has_the_loss_and_the_gradients_of_the_plain_one(way: str, tied: bool, world: int) -> None:
    model, micro = gpt(tied), 2 if way == "microbatches" else 1
    losses = [[plain_loss(model, *tokens_of(rank, k)) for k in range(micro)] for rank in range(world)]
    torch.stack([loss for row in losses for loss in row]).mean().backward()
    want = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    fsdp.local_mesh()  # simulated ranks do not compile whole steps: that is done in the world of this process
    ranks = fsdp.launch(trained, (way, tied), nprocs=2, simulate=True) if world > 1 else [trained(way, tied)]
    for rank, (loss, grads) in enumerate(ranks):
        assert abs(loss - torch.stack(losses[rank]).mean().item()) < 1e-12
        assert largest(grads, want) < 1e-12


@each_rank(2)
def test_a_mean_over_the_tokens_of_all_ranks() -> None:
    state, model = start(gpt(False), average="sum")
    plain, data = gpt(False), [tokens_of(rank) for rank in range(2)]
    n = sum(int((labels != -100).sum()) for _, labels in data)
    loss = torch.stack([plain_loss(plain, *one, "sum") for one in data]).sum() / n
    want = dict(zip(dict(plain.named_parameters()), torch.autograd.grad(loss, [*plain.parameters()]), strict=True))
    model, loss_fn = in_chunks(model, reduction="sum")
    tokens, labels = data[dist.get_rank()]
    state, _ = T.forward_backward(model, loss_fn)(state, tokens, labels=labels)
    state, count = fsdp.psum(state, (labels != -100).sum())
    assert largest(full_grads(T.divide(state, count)), want) < 1e-12


def observed(some: bool) -> tuple[int, str, int]:
    """The largest tensor of a step, the plan, and the peak that is predicted."""
    params, model = fsdp.functionalize(GPT(Config(vocab=1024, width=16, depth=2, heads=2)))
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    loss_fn: Any = plain_loss
    if some:
        model, loss_fn = T.chunked_loss(model, head="head", hidden=GPT.features, chunks=8)
    tokens, labels = torch.randint(1024, (2, 1, 256))
    forward_backward = T.forward_backward(model, loss_fn)
    peak = T.step_memory(forward_backward, state, tokens, labels).peak
    with LargestTensor() as mode:
        state, _ = forward_backward(state, tokens, labels)
    return mode.most, repr(fsdp.step(state).cursor.plan), peak


def test_a_driven_step_makes_no_table_of_logits_and_gathers_as_before() -> None:
    some, plain = (fsdp.launch(observed, (some,), nprocs=2, simulate=True)[0] for some in (True, False))
    assert plain[0] >= 1024 * 256
    assert some[0] <= 1024 * 256 // 8
    assert some[1] == plain[1]  # the head is one use of its unit
    assert plain[2] - some[2] > 2 * (1024 * 256 * 4)  # of logits and what cross entropy makes of them


# ---------------------------------------------------------------- transformers


SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SMALL,
    "Qwen3": {**SMALL, "tie_word_embeddings": True, "head_dim": 8},
    "GPT2": {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1,
             "eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}  # fmt: skip


def language_model(kind: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    return transformers.AutoModelForCausalLM.from_config(config).double()


@pytest.mark.parametrize("kind", FAMILIES)
def test_of_transformers_models_head_and_hidden_states_are_found(kind: str) -> None:
    module = language_model(kind, **FAMILIES[kind])
    tokens = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[1, :3] = -100
    logits = module(tokens, use_cache=False).logits
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert abs(want - module(tokens, labels=labels).loss).item() < 1e-5  # which is taken in float32
    grads = dict(zip(dict(module.named_parameters()), torch.autograd.grad(want, [*module.parameters()]), strict=True))
    state, model = start(module)
    model, loss_fn = T.chunked_loss(model, chunks=3)
    state, loss = T.forward_backward(model, loss_fn)(state, tokens, labels)
    assert abs(loss - want).item() < 1e-12
    assert largest(full_grads(fsdp.finish_reductions(state)), grads) < 1e-12
    state = fsdp.drop_gradients(state)
    state, params = fsdp.unshard(state)
    bound = fsdp.bind(model, params)
    by_func = torch.func.grad(lambda p: loss_fn(fsdp.bind(model, p), input_ids=tokens, labels=labels))(params)
    assert largest(fsdp.tie(state, by_func), grads) < 1e-12
    assert torch.equal(bound(tokens, use_cache=False).logits, logits)  # without labels it is what it was


AFTER = "does something to the logits after 'lm_head'"


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        pytest.param("Gemma2", {**SMALL, "head_dim": 8}, AFTER, marks=pytest.mark.large),
        ("Granite", {**SMALL, "logits_scaling": 3.0}, AFTER),
        ("OPT", {"vocab_size": 61, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "max_position_embeddings": 32}, "does not call 'model' and 'lm_head'"),
    ],
)  # fmt: skip
def test_a_model_that_does_more_than_head_and_loss_is_refused(kind: str, settings: Any, said: str) -> None:
    _, model = fsdp.functionalize(language_model(kind, **settings))
    refused((lambda: T.chunked_loss(model), said))


def test_a_head_that_is_not_found_is_refused() -> None:
    _, model = fsdp.functionalize(gpt(False))
    refused(
        (lambda: T.chunked_loss(model), "GPT is not known as a language model of transformers"),
        (lambda: T.chunked_loss(model, head="norm", hidden=GPT.features), "the head 'norm' of GPT is a RMSNorm"),
        (lambda: in_chunks(model)[1](model), "without labels"),
    )


def head_along(rule: Any) -> tuple[str, float]:
    """What is said of a head that lies so along "tp", and how far its loss is from the plain one."""
    torch.manual_seed(0)
    module, tokens = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double(), torch.arange(4)
    spec = fsdp.Spec(fsdp.local_mesh(), fsdp.zero3("data"), own={"1.*": rule, "*": "tp"})
    params, model = fsdp.functionalize(module, spec)
    model, loss_fn = T.chunked_loss(model, head="1", hidden=lambda model, tokens: model[0](tokens), chunks=2)
    state = fsdp.shard(params, spec, fsdp.sgd(lr=0.1))
    found: list[float] = []
    said = raised(lambda: found.append(T.forward_backward(model, loss_fn)(state, tokens, tokens)[1].item()))
    return said, abs(sum(found) - F.cross_entropy(module(tokens), tokens).item())


def test_a_head_that_is_cut_is_refused() -> None:
    """Its loss would be of a part of the vocabulary."""
    with fsdp.simulate(data=1, tp=2) as ranks:
        assert all(not said and far < 1e-12 for said, far in by_rank(ranks(head_along, "tp")))
        for said, _ in by_rank(ranks(head_along, ("tp", 0))):
            assert "the head has 4 of its 8 rows on this rank" in said


def test_a_head_whose_weight_has_other_rows_than_it_says_is_not_cut() -> None:
    """One that is tied to an embedding with more rows, for a size that suits kernels."""
    module = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 8, bias=False)).double()
    module[1].weight, tokens = module[0].weight, torch.arange(4)
    params, model = fsdp.functionalize(module)
    model, loss_fn = T.chunked_loss(model, head="1", hidden=lambda model, tokens: model[0](tokens), chunks=2)
    _, loss = T.forward_backward(model, loss_fn)(fsdp.shard(params, fsdp.Spec(fsdp.local_mesh())), tokens, tokens)
    torch.testing.assert_close(loss, F.cross_entropy(module(tokens), tokens).detach())
