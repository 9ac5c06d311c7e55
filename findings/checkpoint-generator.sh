#!/usr/bin/env bash
# torch.utils.checkpoint rewinds the global random numbers, not those of a torch.Generator: a dropout that draws from one has another mask in the recomputation.
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
from torch.utils.checkpoint import checkpoint

print("torch", torch.__version__)


def run(recompute, own):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0) if own else None

    def dropped(w):
        mask = torch.empty(16).bernoulli_(0.5, generator=generator)
        return (w * mask).exp().sum()  # its gradient is mask * exp(w * mask)

    w = torch.zeros(16, requires_grad=True)
    loss = checkpoint(dropped, w, use_reentrant=False) if recompute else dropped(w)
    loss.backward()
    return loss.item(), w.grad


for own in (False, True):
    (loss, gradient), (loss_2, gradient_2) = run(False, own), run(True, own)
    print(f"{'a torch.Generator' if own else 'global random numbers'}: losses are equal {loss == loss_2}, "
          f"gradients {torch.equal(gradient, gradient_2)}; weights that are kept {gradient.int().tolist()}, {gradient_2.int().tolist()}")
    assert loss == loss_2 and torch.equal(gradient, gradient_2) is not own
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
