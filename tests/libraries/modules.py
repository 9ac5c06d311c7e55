"""Libraries that want an nn.Module, on modules that `fsdp.as_module` made, beside the plain one. Run by hand:

    pip install --no-deps --target /tmp/libraries curvlinops-for-pytorch laplace-torch nngeometry backpack-for-pytorch \
        beartype torchdiffeq opacus einops einconv unfoldNd opt_einsum linear_operator jaxtyping wadler_lindig mpmath \
        torchmetrics lightning-utilities scipy asdfghjkl tqdm scikit-learn joblib threadpoolctl
    PYTHONPATH=/tmp/libraries:$PWD OMP_NUM_THREADS=1 python tests/libraries/modules.py

Each line says whether numbers of a module with a state's weights, of one with lent weights, and of the plain module are
the same. What is not installed is left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn

import functional_fsdp as fsdp
from functional_fsdp import transforms as T

SHAPES = (12, 4, 6, 3)  # samples, inputs, hidden, classes
X = torch.randn(SHAPES[0], SHAPES[1], generator=torch.Generator().manual_seed(1))
Y = torch.arange(SHAPES[0]) % SHAPES[3]
CRITERION = nn.CrossEntropyLoss()


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SHAPES[1], SHAPES[2]), nn.Tanh(), nn.Linear(SHAPES[2], SHAPES[3]))


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=6)


def curvlinops(module: nn.Module) -> list[torch.Tensor]:
    found = []
    for name in ("HessianLinearOperator", "GGNLinearOperator", "KFACLinearOperator"):
        torch.manual_seed(0)
        kind = getattr(import_module("curvlinops"), name)
        operator = kind(module, CRITERION, [*module.parameters()], [(X, Y)])
        found.append(operator @ torch.ones(operator.shape[1]))
    return found


def laplace(module: nn.Module) -> list[torch.Tensor]:
    found = []
    for structure in ("kron", "diag", "full"):
        how = {"subset_of_weights": "all", "hessian_structure": structure}
        posterior = import_module("laplace").Laplace(module, "classification", **how)
        posterior.fit(loader())
        found.append(posterior(X))
    return found


def nngeometry(module: nn.Module) -> list[torch.Tensor]:
    objects, metrics = import_module("nngeometry.object"), import_module("nngeometry.metrics")
    kinds = (objects.PMatDense, objects.PMatKFAC)
    return [metrics.FIM(model=module, loader=loader(), representation=kind).trace() for kind in kinds]


def backpack(module: nn.Module) -> list[torch.Tensor]:
    library, extensions = import_module("backpack"), import_module("backpack.extensions")
    module = library.extend(module)
    with library.backpack(extensions.DiagGGNExact()):
        library.extend(nn.CrossEntropyLoss())(module(X), Y).backward()
    return [p.diag_ggn_exact for p in module.parameters()]  # type: ignore[attr-defined]


def opacus(module: nn.Module) -> list[torch.Tensor]:
    wrapped = import_module("opacus.grad_sample").GradSampleModule(module)
    CRITERION(wrapped(X), Y).backward()
    return [p.grad_sample for p in wrapped.parameters()]


def beartype(module: nn.Module) -> list[torch.Tensor]:
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out

    call.__annotations__ = {"model": nn.Module, "x": torch.Tensor, "return": torch.Tensor}
    return [import_module("beartype").beartype(call)(module, X)]


def torchdiffeq(module: nn.Module) -> list[torch.Tensor]:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.back = module, nn.Linear(SHAPES[3], SHAPES[1])

        def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.back(self.inner(x)).tanh()
            return out

    torch.manual_seed(0)
    how = {"method": "euler", "options": {"step_size": 0.25}}
    out = import_module("torchdiffeq").odeint_adjoint(Field(), X, torch.tensor([0.0, 1.0]), **how)[-1]
    return [*torch.autograd.grad(out.square().mean(), [*module.parameters()])]


def torch_itself(module: nn.Module) -> list[torch.Tensor]:
    doubled = {path: 2 * p.detach() for path, p in module.named_parameters()}
    return [torch.func.functional_call(module, doubled, (X,)), torch.export.export(module, (X,)).module()(X),
            torch.jit.trace(module, (X,))(X), *module.state_dict().values()]  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    params, model = fsdp.functionalize(plain())
    state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.sgd(lr=0.1))
    _, weights = fsdp.unshard(state)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "a state's": lambda: fsdp.as_module(model, state),
        "lent": lambda: fsdp.as_module(model, weights),
        "recomputes": lambda: fsdp.as_module(T.remat(model, "0", "2"), weights),
    }
    for library in (torch_itself, beartype, curvlinops, laplace, nngeometry, backpack, opacus, torchdiffeq):
        try:
            want = library(plain())
        except ImportError as error:
            print(f"{library.__name__:12s} not here: {error}")
            continue
        for kind, make in kinds.items():
            try:
                got = library(make())
                right = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True))
                print(f"{library.__name__:12s} {kind:10s} {'same' if right else 'OTHER NUMBERS'}")
            except Exception as error:  # it says what the library wants
                print(f"{library.__name__:12s} {kind:10s} {type(error).__name__}: {str(error)[:150]}")


if __name__ == "__main__":
    main()
