#!/usr/bin/env bash
# torch.func.grad of a loss of integer dtype gives zeros, where torch.autograd.grad raises.
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
w, x = torch.ones(3), torch.arange(3.)
loss = lambda w: (w * x).sum().to(torch.int64)
g = torch.func.grad(loss)(w)
print("torch.func.grad of a loss of dtype int64:", g)
assert torch.equal(g, torch.zeros(3))
leaf = w.clone().requires_grad_()
try:
    torch.autograd.grad(loss(leaf), leaf)
except RuntimeError as e:
    print("torch.autograd.grad of the same loss raises:", str(e).splitlines()[0])
else:
    raise AssertionError("autograd.grad accepted it")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
