#!/usr/bin/env bash
# torch.optim.Muon orthogonalises in bfloat16 whatever the dtype of weights and gradients, float64 too.
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
def update(noise):
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    w.grad = torch.randn(8, 8, dtype=torch.float64) * (1 + noise)
    torch.optim.Muon([w], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return w.detach()
u = update(0.0)
as_bf16 = u.float().bfloat16().double()
print("dtype of the weights and the gradient: float64")
same = (u == as_bf16).double().mean().item()
print(f"share of the update's elements that are numbers of bfloat16: {same:.2f}")
assert same == 1.0, same
assert torch.equal(u, update(1e-7)), "a change of 1e-7 is seen"
print("a gradient that differs by 1e-7 gives the same float64 update, bit by bit")
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
