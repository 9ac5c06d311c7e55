#!/usr/bin/env bash
# The gradient of a vmap over embeddings with weights of their own ignores padding_idx: its row gets a gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn.functional as F
def loss(weight, tokens): return F.embedding(tokens, weight, padding_idx=0).square().sum()
torch.manual_seed(0)
weight, tokens = torch.randn(5, 2), torch.tensor([[0, 1, 2], [3, 0, 0]])
want = torch.stack([torch.func.grad(loss)(weight, row) for row in tokens])
each = weight.expand(2, 5, 2).clone().requires_grad_()
(outside,) = torch.autograd.grad(torch.vmap(loss)(each, tokens).sum(), each)
inside = torch.vmap(torch.func.grad(loss))(each.detach(), tokens)
print("gradient of row 0, the padding's, one member at a time:", want[:, 0].tolist())
print("the gradient inside of the vmap:", inside[:, 0].tolist())
print("the gradient of the vmap:", outside[:, 0].tolist())
assert not want[:, 0].any() and not inside[:, 0].any() and outside[1, 0].all()
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
