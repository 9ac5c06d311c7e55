"""Docstrings: each example of each module runs, and gives what it says that it gives.

An example has the names that its reader has: `fsdp`, `T`, `extend`, torch, those of its own module, and of `scene`: a
small model, its state, a batch and a loss. What needs a GPU, a compiler, other processes or a file from elsewhere says
`doctest: +SKIP`.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import functional_fsdp as fsdp
import functional_fsdp.transforms as T
from functional_fsdp import extend

NAMES = {
    "fsdp": fsdp,
    "T": T,
    "extend": extend,
    "torch": torch,
    "nn": nn,
    "F": F,
    "tree_map": torch.utils._pytree.tree_map,
}
MAY_SKIP = {
    "compile",
    "compile_units",
    "compile_report",
    "cuda_graph",
    "load_weights",
    "launch",
    "workers",
    "async_save",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.mlp(torch.relu(self.attn(h)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Generates(Model):
    def generate(self, ids: torch.Tensor, max_new_tokens: int, do_sample: bool = False) -> torch.Tensor:
        drawn = torch.rand(max_new_tokens) if do_sample else torch.ones(max_new_tokens)
        return torch.cat([ids, self(ids[:4]).mean() * drawn])


def scene() -> dict[str, Any]:
    """What an example may speak of without saying what it is: a state in the middle of training, and what is around."""
    torch.manual_seed(0)
    mesh, model, optimizer, batch = fsdp.local_mesh(), Generates(), fsdp.adamw(lr=1e-3), torch.randn(4, 4)
    params = fsdp.functionalize(model)[0]
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    of_weights = lambda params: sum(p.square().sum() for p in params.values())  # noqa: E731
    moments = {path: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.ones_like(p)} for path, p in params.items()}
    return {
        **{"mesh": mesh, "model": model, "optimizer": optimizer, "loss_fn": loss_fn, "loss": of_weights},
        **{"params": params, "moved": params, "old": moments, "lr": 0.1, "k": 0, "rank": 0},
        **{"batch": batch, "tokens": batch, "ids": torch.zeros(4)},
        "w": fsdp.functionalize(model.blocks[0])[0],
        "state": fsdp.shard(params, fsdp.Spec(mesh), optimizer),
        "forward_backward": T.forward_backward(model, loss_fn),
    }


def find() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(fsdp.__path__, "functional_fsdp.")]
    return [test for module in modules for test in finder.find(module) if test.examples]


@pytest.mark.parametrize("example", find(), ids=lambda test: test.name.removeprefix("functional_fsdp."))
def test_an_example_runs(example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    own, name = example.globs, example.name.rsplit(".", 1)[-1]
    lines = [line for line in example.examples if doctest.SKIP not in line.options]
    assert lines or name in MAY_SKIP, f"{example.name}: no line of this example runs"
    example.globs = {**NAMES, **own, **scene()}
    said: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append)
    assert not said, "".join(said)


PUBLIC = {"fsdp": fsdp, "T": T, "extend": extend}


def lines_of(text: str | None) -> list[str]:
    """Code of an `Example:` that is a sentence."""
    found = re.search(r"^ *Examples?: (`.+?)(?:\n *\n|\Z)", text or "", re.MULTILINE | re.DOTALL)
    some = re.findall(r"`([^`]+)`", " ".join(found[1].split())) if found else []
    return [code for code in some if not code.startswith(("@", "def ", "try", "except"))]


def sentences() -> list[tuple[str, str]]:
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(fsdp.__path__, "functional_fsdp.")]
    finder = doctest.DocTestFinder(exclude_empty=False)
    return sorted({(one.name, code) for m in modules for one in finder.find(m) for code in lines_of(one.docstring)})


def test_an_example_in_a_sentence_has_names_and_arguments_that_there_are() -> None:
    wrong, called = [], 0
    for name, code in sentences():
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Call):
                continue
            of = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(of, ast.Name) and of.id in PUBLIC:
                called += 1
                function = getattr(PUBLIC[of.id], node.func.attr, None)  # type: ignore[attr-defined]
                plain = not any(isinstance(one, ast.Starred) for one in node.args)
                words = {one.arg: None for one in node.keywords if one.arg}
                try:
                    signature = inspect.signature(function)  # type: ignore[arg-type]
                    signature.bind_partial(*[None for _ in node.args if plain], **words)
                except (TypeError, ValueError) as error:
                    wrong.append(f"{name}: {code}: {error}")
    assert not wrong
    assert called >= 30


def test_most_public_functions_with_an_example_are_seen() -> None:
    assert len(find()) >= 60
