#!/usr/bin/env bash
# torch.optim.SGD(fused=True) with momentum on the CPU: the last bits of an element depend on where the tensor is cut.
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
def run(cuts):
    torch.manual_seed(0)
    w, grads = torch.randn(1027), [torch.randn(1027) for _ in range(5)]
    parts = [p.clone() for p in w.split(cuts)]
    for p in parts: p.requires_grad_()
    made = make(parts)
    for g in grads:
        for p, part in zip(parts, g.split(cuts)): p.grad = part.clone()
        made.step()
    return torch.cat([p.detach() for p in parts])
def differ(): return int((run([1027]) != run([5, 501, 521])).sum())
make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)
fused = differ()
make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=False, foreach=False)
plain = differ()
print("elements of 1027 with other bits after 5 steps when the tensor is cut in three:")
print("SGD fused", fused, "| SGD not fused", plain)
assert fused > 0 and plain == 0
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
