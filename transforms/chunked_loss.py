"""chunked_loss: a language model's head and its cross entropy, some tokens at a time, so that no table of all logits
is made.

    hidden [tokens, width]  ──▶  for each chunk of tokens:  logits [tokens / chunks, vocabulary], their loss, and
                                 what they give to the gradients of hidden and of the head's weight
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F

from functional_fsdp import SpecError, bind
from functional_fsdp._seams import expect, torch_private
from functional_fsdp.extend import refuse, skeleton_of, traced_as

from ._modules import once_a_class, subclass

M = TypeVar("M", bound=nn.Module)
Reduction = Literal["mean", "sum"]
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # of hidden, weight and bias


class Rule(NamedTuple):
    """How a loss is taken. The arguments of `linear_cross_entropy`."""

    chunks: int
    ignore_index: int
    reduction: Reduction
    accum_dtype: torch.dtype | None


# ---------------------------------------------------------------- the loss of a head


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunks: int = 8,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The cross entropy of `F.linear(hidden, weight, bias)`, some tokens at a time.

    Args:
        hidden: [..., width], what the head is given. weight: [vocabulary, width]. bias: [vocabulary].
        labels: [...], integers; of a token whose label is `ignore_index` neither loss nor gradient counts.
        chunks: of how many parts the tokens are; logits of one of them are there at a time.
        reduction: "mean" over the labels that count, or "sum".
        accum_dtype: in which the weight's gradient is added up over chunks. None: in that of the logits, as Liger
            does; `torch.float32` is more exact where that is bfloat16, and takes memory and time of the weight's size.

    Returns:
        the loss, a tensor [] of at least float32, equal to `F.cross_entropy(F.linear(hidden, weight, bias).float(),
        labels)` but for the order of sums.

    The gradients are computed with the loss, where logits are there, and kept until the backward: three products of the
    head's size, none of them twice. Alive at a time are logits of one chunk, a copy of them in float32, the gradients
    of `hidden`, and that of `weight`. Nothing waits for the device. It may be called under `torch.func.grad`, in
    `T.vjp`, in compiled code and in CUDA graphs. Where gradients of gradients are asked for
    (`create_graph=True`), and inside of two torch.func transforms, of `vmap` or of `jvp`, it is written out, chunk by
    chunk, and torch keeps all logits. Of code that is compiled with one gradient in it there is no second one.

    Raises:
        SpecError: no chunk; labels that are no integers, or of another shape than the tokens; an unknown reduction.
        RuntimeError of torch's: for a second backward through one loss.

    Collective: none.

    Source: Hsu et al. 2024 (Liger Kernel, arXiv:2410.10989), whose gradients are made in the forward, in chunks of
    tokens; Wijmans et al. 2024 (Cut Cross-Entropy, arXiv:2411.09009); chunks of tokens also in torchtune's
    `LinearCrossEntropyLoss`. torch 2.13's `F.linear_cross_entropy(options=)` does so without transforms and compilers.

    Example:
        >>> hidden, head = torch.randn(2, 5, 8), torch.randn(32, 8)
        >>> labels = torch.randint(32, (2, 5))
        >>> loss = T.linear_cross_entropy(hidden, head, labels, chunks=2)
        >>> torch.allclose(loss, F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten()))
        True
    """
    rule = Rule(chunks, ignore_index, reduction, accum_dtype)
    _check(rule)
    if labels.shape != hidden.shape[:-1]:
        refuse(
            "SpecError",
            f"linear_cross_entropy: labels of shape {tuple(labels.shape)} for hidden of {tuple(hidden.shape)}; "
            f"expected {tuple(hidden.shape[:-1])}, one label for each token.",
        )
    if labels.is_floating_point():
        refuse("SpecError", f"linear_cross_entropy: labels are {labels.dtype}; expected integers, one for each token.")
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.flatten().long()
    if not torch.is_grad_enabled() or _written_out() or _outer(rows, weight, bias):
        return _plain(rows, weight, bias, targets, rule)
    return _once(rows, weight, bias, targets, rule)


def _check(rule: Rule) -> None:
    if isinstance(rule.chunks, bool) or not isinstance(rule.chunks, int) or rule.chunks < 1:
        refuse("SpecError", f"linear_cross_entropy(chunks={rule.chunks!r}): expected a number of chunks, at least 1.")
    if rule.reduction not in ("mean", "sum"):
        refuse("SpecError", f"linear_cross_entropy(reduction={rule.reduction!r}): expected 'mean' or 'sum'.")


def _written_out() -> bool:
    """Whether derivatives are taken of what is computed here by more than one plain gradient."""
    levels = [level.key() for level in torch_private.func_levels()]
    taken = [key for key in levels if key != torch_private.FUNCTIONALIZE]
    return taken not in ([], [torch_private.GRAD]) or torch_private.forward_ad._current_level >= 0


@traced_as(lambda *tensors: False)
def _outer(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd follows, around one gradient of torch.func's, what is computed here."""
    if not _transformed():
        return False
    below = (torch_private.unwrapped(t) if torch_private.is_wrapped(t) else t for t in tensors if t is not None)
    return any(t.requires_grad for t in below)


def _transformed() -> bool:
    return torch_private.func_interpreter() is not None


# Dynamo runs these for real, while it is within the transforms itself: torch._dynamo.assume_constant_result
_written_out._dynamo_marked_constant = True  # type: ignore[attr-defined]
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _chunks(rule: Rule, *tensors: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    n = max(min(rule.chunks, len(tensors[0])), 1)
    return zip(*(t.tensor_split(n) for t in tensors), strict=True)


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _plain(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """In differentiable operations of torch."""
    index = rule.ignore_index
    losses = [
        F.cross_entropy(_wide(F.linear(x, weight, bias)), y, ignore_index=index, reduction="sum")
        for x, y in _chunks(rule, rows, targets)
    ]
    total = torch.stack(losses).sum()
    return total / (targets != index).sum() if rule.reduction == "mean" else total


@torch.no_grad()
def _loss_and_grads(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, rule: Rule,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, Grads]:  # fmt: skip
    """The loss, and its gradients by rows, weight and bias: those that are wanted."""
    counts = targets != rule.ignore_index
    number = counts.sum()
    losses, by_rows = [], []
    by_weight: torch.Tensor | None = None
    by_bias: torch.Tensor | None = None
    matrix = weight
    for x, y, valid in _chunks(rule, rows, targets, counts):
        logits = F.linear(x, weight, bias)
        x, matrix = x.to(logits.dtype), matrix.to(logits.dtype)  # under autocast they are others
        label = torch.where(valid, y, 0).unsqueeze(1)
        logs = F.log_softmax(_wide(logits), dim=1)
        losses.append(torch.where(valid, -logs.gather(1, label).squeeze(1), 0).sum())
        each = torch.ones_like(number, dtype=logs.dtype) / (number if rule.reduction == "mean" else 1)
        share = torch.where(valid, each, 0).unsqueeze(1)
        p = logs.exp_().mul_(share)  # the gradient by logits: of the mean, p / n, less 1 / n at the label
        d = p.scatter_add_(1, label, -share).to(logits.dtype)
        del logits, logs, p
        if wanted[0]:
            by_rows.append(d @ matrix)
        if wanted[1]:
            by_weight = _add_product(by_weight, d.t(), x, rule.accum_dtype)
        if wanted[2]:
            some = d.sum(0, dtype=rule.accum_dtype)
            by_bias = some if by_bias is None else by_bias.add_(some)
        del d
    total = torch.stack(losses).sum()
    grads = torch.cat(by_rows) if by_rows else None, by_weight, by_bias
    cast = [t if t is None else t.to(like) for t, like in zip(grads, (rows, weight, bias), strict=True)]
    return total / number if rule.reduction == "mean" else total, (*cast,)  # type: ignore[return-value]


def _add_product(to: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if to is None:
        return (a @ b).to(dtype or a.dtype)
    return to.addmm_(a, b) if to.dtype == a.dtype else to.add_(a @ b)


class _Once(torch.autograd.Function):
    """A loss whose gradients were computed with it. `transformed`: whether torch.func takes them."""

    @staticmethod
    def forward(rows: Any, weight: Any, bias: Any, targets: Any, rule: Rule, wanted: Any, transformed: bool) -> Any:
        loss, grads = _loss_and_grads(rows, weight, bias, targets, rule, wanted)
        return loss, *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        grads = output[1:]
        ctx.mark_non_differentiable(*(t for t in grads if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], *grads)
        ctx.rule, ctx.wanted, ctx.transformed = inputs[4:]

    @staticmethod
    def backward(ctx: Any, by: Any, *others: Any) -> Any:
        rows, weight, bias, targets, *grads = ctx.saved_tensors
        if by is None:
            return (None,) * 7
        if torch.is_grad_enabled() and not ctx.transformed:  # gradients of gradients will be asked for
            inputs = [t for t, on in zip((rows, weight, bias), ctx.wanted, strict=True) if on]
            again = iter(
                torch.autograd.grad(_plain(rows, weight, bias, targets, ctx.rule), inputs, by, create_graph=True)
            )
            return *(next(again) if on else None for on in ctx.wanted), None, None, None, None
        scaled = torch.mul if ctx.transformed else torch.Tensor.mul_  # in place: a second backward is torch's error
        return *(t if t is None else scaled(t, by) for t in grads), None, None, None, None


def _wanted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[bool, bool, bool]:
    return rows.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad


def _in_graph(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """In plain operations, since torch.compile drops the backward of autograd.Functions under torch.func: the loss
    and, with the value 0, what is linear in each tensor and has its gradient."""
    # inside of a transform Dynamo takes `requires_grad` to be false
    wanted = (True, True, bias is not None) if _transformed() else _wanted(rows, weight, bias)
    loss, grads = _loss_and_grads(rows, weight, bias, targets, rule, wanted)
    for t, grad in zip((rows, weight, bias), grads, strict=True):
        if t is not None and grad is not None:
            moves = (_wide(t) * grad).sum()
            loss = loss + (moves - moves.detach())
    return loss


@traced_as(_in_graph)
def _once(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """With gradients that are made in the forward."""
    wanted = _wanted(rows, weight, bias)
    loss: torch.Tensor = _Once.apply(rows, weight, bias, targets, rule, wanted, _transformed())[0]
    return loss


# ---------------------------------------------------------------- the loss of a model

Hidden = Callable[..., torch.Tensor]


def chunked_loss(
    model: M,
    *,
    head: str | None = None,
    hidden: Hidden | None = None,
    shift: bool | None = None,
    chunks: int = 8,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    accum_dtype: torch.dtype | None = None,
) -> tuple[M, Callable[..., torch.Tensor]]:
    """A causal language model whose loss is taken with its head, some tokens at a time, and this loss.

    Args:
        model: as `init` or `functionalize` gave it. Of transformers' models head and hidden states are found.
        head: the path of the linear layer that gives logits, tied or not.
        hidden: `hidden(model, *args, **kwargs)`, what the head is given, [..., width]: a method of the model, as
            `GPT.features`, or a function that calls its parts.
        shift: True: labels are the tokens, as transformers takes them, and each token is to predict the next one.
            False: each has its own label. Default: True for transformers' models.
        chunks, ignore_index, reduction, accum_dtype: as for `linear_cross_entropy`.

    Returns:
        a copy of the model (a skeleton of the same leaves), whose head called as `head(hidden, labels)` gives the loss,
        and as before without labels; and `loss_fn(model, *args, labels=None, **kwargs)`, a tensor []. Labels are the
        last positional argument where the keyword is left out: `loss_fn(model, tokens, labels)`. All three ways take
        them: `T.forward_backward(model, loss_fn)`, `loss_fn(bind(model, params), ...)`, and
        `bind(model.head, w)(h, labels)` as the last stage by hand. The head is one call of its unit: it is gathered
        once in a forward, and its gradient comes in one piece.

    Of transformers' models the loss is `model(tokens, labels=labels).loss`, without what a model adds to it (the
    balance of experts).

    Raises:
        SpecError: a head that is not found, or is not linear; a model that does something between its hidden states
            and its head, or to its logits, as one that caps them: give `hidden`, where that is before the head. Of
            transformers' models that is looked at on tensors without memory. When it is called: a head that is cut
            along an axis of the model's own (`Spec(own=)`).

    Collective: none of its own.

    Source: see `linear_cross_entropy`.

    Example:
        >>> module = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
        >>> params, model = fsdp.functionalize(module)
        >>> model, loss_fn = T.chunked_loss(model, head="1", hidden=lambda model, tokens: model[0](tokens), chunks=2)
        >>> tokens, labels = torch.randint(32, (2, 4, 6))
        >>> loss = loss_fn(fsdp.bind(model, params), tokens, labels)
        >>> torch.allclose(loss, F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten()))
        True
    """
    rule = Rule(chunks, ignore_index, reduction, accum_dtype)
    _check(rule)
    expect("chunked_loss(accum_dtype)", accum_dtype, torch.dtype | None, "a dtype, or None")
    expect("chunked_loss(ignore_index)", ignore_index, int, "a label")
    expect("chunked_loss(hidden)", hidden, Callable | None, "a function of (model, ...), or None")
    copy = skeleton_of(model)
    base = getattr(copy, "base_model_prefix", "") if hidden is None else ""
    if hidden is None and not (base and hasattr(copy, base) and hasattr(copy, "get_output_embeddings")):
        raise SpecError(
            f"chunked_loss: {type(model).__name__} is not known as a language model of transformers. Say what its head "
            "is given: hidden=lambda model, tokens: ..., and head='path'."
        )
    found = copy.get_output_embeddings() if head is None and base else None  # type: ignore[operator]
    paths = dict(copy.named_modules())
    path = head if head is not None else next((p for p, part in paths.items() if part is found and p), None)
    part = None if path is None else paths.get(path)
    if path is None or not isinstance(part, nn.Linear) or type(part).forward is not nn.Linear.forward:
        got = "no module" if part is None else f"a {type(part).__name__}"
        raise SpecError(
            f"chunked_loss: the head {path!r} of {type(model).__name__} is {got}; expected the path of an nn.Linear "
            "that gives logits, head='lm_head' say."
        )
    if base:
        _look(copy, base, path)
    part.__class__ = _with_loss(type(part))  # type: ignore[assignment]
    part.__dict__["_loss_rule"] = rule, part.weight.shape[0]
    return copy, _Loss(path, base, hidden, bool(base) if shift is None else shift, ignore_index)


class _Loss:
    """What `chunked_loss` returns: the loss of a model whose head takes labels."""

    def __init__(self, head: str, base: str, hidden: Hidden | None, shift: bool, ignore_index: int) -> None:
        self.head, self.base, self.hidden = head.split("."), base, hidden
        self.shift, self.ignore_index = shift, ignore_index

    def __call__(self, model: Any, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if labels is None:
            if not args:
                refuse("SpecError", "chunked_loss: the loss was called without labels, loss_fn(model, tokens, labels).")
            *args, labels = args  # type: ignore[assignment]
        if self.hidden is not None:
            hidden = self.hidden(model, *args, **kwargs)
        else:
            hidden = getattr(model, self.base)(*args, **{"use_cache": False, **kwargs})[0]
        if self.shift:
            labels = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        head = model
        for name in self.head:
            head = getattr(head, name)
        loss: torch.Tensor = head(hidden, labels)
        return loss


@once_a_class
def _with_loss(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a head that takes labels."""

    def forward(self: Any, input: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return F.linear(input, self.weight, self.bias)
        rule, rows = vars(self)["_loss_rule"]
        if self.weight.shape[-2] != rows:
            refuse(
                "SpecError",
                f"chunked_loss: the head has {self.weight.shape[-2]:,} of its {rows:,} rows on this rank, "
                "cut along an axis of the model's own, and the loss would be of these words alone. Leave the head "
                "whole, as Spec(own={'head.*': 'tp'}); or take the loss of cut logits by T.collectives (pmax, psum).",
            )
        return linear_cross_entropy(input, self.weight, labels, self.bias, **rule._asdict())

    return subclass(cls, forward=forward)


def _look(model: nn.Module, base: str, head: str) -> None:
    """Raise where a model does more than to give its base's output to the head, and to return that: seen on tensors
    without memory, of a dtype for which experts have kernels, and of one to which logits may be cast."""
    said: Exception | str = ""
    for dtype in (torch.bfloat16, torch.float32):
        try:
            said = _between(model, base, head, dtype)
        except Exception as error:
            said = error
        if not said:
            return
    if isinstance(said, Exception):
        why = str(said).split(". ")[0].rstrip(".")
        raise SpecError(
            f"chunked_loss: {type(model).__name__} could not be looked at: {why}. Say what its head is "
            f"given: hidden=lambda model, tokens: ..., and head={head!r}."
        ) from said
    raise SpecError(
        f"chunked_loss: {type(model).__name__} {said}, and a loss in chunks would be another one. Where it is before "
        f"the head, say what the head is given: hidden=lambda model, tokens: ..., and head={head!r}."
    )


def _between(model: nn.Module, base: str, head: str, dtype: torch.dtype) -> str:
    """What a model does between its base and its head, or after that; "" for nothing."""
    copy = skeleton_of(model)
    seen: dict[str, tuple[Any, Any]] = {}
    for path in (base, head):
        part = copy.get_submodule(path)
        cls = type(part)

        def __call__(self: Any, *args: Any, _path: str = path, _cls: Any = cls, **kwargs: Any) -> Any:
            out = _cls.__call__(self, *args, **kwargs)
            seen[_path] = args, out
            return out

        part.__class__ = subclass(cls, __call__=__call__)
    where = next((b.device for b in model.buffers() if b.device.type != "meta"), torch.device("cpu"))
    with torch.no_grad(), torch_private.fakes_that_die():
        leaves = model.named_parameters(remove_duplicate=False)
        weights = {path: torch.empty(t.shape, dtype=dtype, device=where) for path, t in leaves}
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=where)
        out = bind(copy, weights)(input_ids=tokens, use_cache=False)
    if not (seen.get(head, ((), None))[0] and base in seen and isinstance(seen[base][1][0], torch.Tensor)):
        return f"does not call {base!r} and {head!r}"
    given, states = seen[head][0][0], seen[base][1][0]
    if given.shape != states.shape or given.untyped_storage()._cdata != states.untyped_storage()._cdata:
        return f"does something between {base!r} and {head!r}"
    if out.logits is not seen[head][1]:
        return f"does something to the logits after {head!r}, as one that caps or scales them"
    return ""
