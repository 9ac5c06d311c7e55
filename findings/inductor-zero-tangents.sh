#!/usr/bin/env bash
# torch.compile of gradients of a hessian: right by aot_eager; Inductor writes a product into a zero tangent, which has
# no memory.
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
from torch.func import grad_and_value, hessian
from torch.nn.functional import linear
torch.manual_seed(0)
w, v, x = torch.randn(32, 32), torch.randn(1, 32), torch.randn(3, 32)

def loss(w, v, x):
    return hessian(lambda x: linear(torch.tanh(linear(x, w)), v).sum())(x[0]).square().mean()

def both(w, v, x):
    return grad_and_value(loss, argnums=(0, 1))(w, v, x)

(want, _), _ = both(w, v, x)
(got, _), _ = torch.compile(both, backend="aot_eager")(w, v, x)
print("aot_eager:", torch.equal(got, want))
try:
    torch.compile(both, backend="inductor")(w, v, x)
except RuntimeError as error:
    print("inductor:", str(error)[:98])
else:
    raise AssertionError("Inductor compiles it")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
