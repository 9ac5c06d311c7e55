#!/usr/bin/env bash
# torch.func.vjp does not notice that a tensor it needs was changed in place before the pullback, where autograd raises.
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
w, x = torch.ones(3), torch.arange(1., 4.)
f = lambda x, w: (x * w).sum()
out, pull = torch.func.vjp(lambda x: f(x, w), x)
before = pull(torch.ones(()))[0]
out, pull = torch.func.vjp(lambda x: f(x, w), x)
w.mul_(10)
after = pull(torch.ones(()))[0]
print("torch.func.vjp, gradient", before, "| weight changed between forward and pullback:", after)
assert torch.equal(before, torch.ones(3)) and torch.equal(after, torch.full((3,), 10.0))
leaf = x.clone().requires_grad_()
out = f(leaf, w)
w.mul_(10)
try:
    torch.autograd.grad(out, leaf)
except RuntimeError as e:
    print("torch.autograd raises:", str(e)[:75])
else:
    print("torch.autograd:", "did not raise"); raise AssertionError
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
