#!/usr/bin/env bash
# autograd casts a gradient to the dtype of its leaf: a float8 leaf gets a float8 gradient, rounded to 3 bits of mantissa.
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
x = torch.linspace(0.5, 2.0, 64)
w = torch.zeros(64).to(torch.float8_e4m3fn).requires_grad_()
(w.float() * x / 3).sum().backward()
exact = x / 3
print("leaf", w.dtype, "gradient", w.grad.dtype)
error = ((w.grad.float() - exact).abs() / exact).max().item()
print(f"largest relative error of a gradient: {error:.3f}")
assert w.grad.dtype == torch.float8_e4m3fn
assert error > 0.02
seen = []
w.grad = None
v = w.float()
v.register_hook(lambda g: seen.append(g.dtype))
(v * x / 3).sum().backward()
assert seen == [torch.float32]
print("the same gradient one operation earlier is float32: only the leaf's own copy was rounded")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
