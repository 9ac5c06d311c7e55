#!/usr/bin/env bash
# torch.compile of a torch.func.grad drops the backward of a custom autograd.Function, and differentiates its forward instead.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch
print("torch", torch.__version__)


class Scaled(torch.autograd.Function):
    """The identity, with three times the gradient."""

    @staticmethod
    def forward(x): return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output): pass

    @staticmethod
    def backward(ctx, gradient): return 3 * gradient


def loss(x): return Scaled.apply(x).sum()
def by_vjp(x): return torch.func.vjp(loss, x)[1](torch.tensor(1.0))[0]


x = torch.ones(2)
for name, gradient in (("func.grad", torch.func.grad(loss)), ("func.vjp", by_vjp)):
    eager, compiled = gradient(x), torch.compile(gradient, fullgraph=True, backend="eager")(x)
    print(f"{name}: {eager.tolist()}, compiled {compiled.tolist()}")
    assert eager.tolist() == [3, 3] and compiled.tolist() == [1, 1]
leaf = torch.ones(2, requires_grad=True)
(outside,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="eager")(leaf), leaf)
print("autograd of the compiled loss:", outside.tolist())
assert outside.tolist() == [3, 3]
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
