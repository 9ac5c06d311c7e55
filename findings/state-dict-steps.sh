#!/usr/bin/env bash
# get_optimizer_state_dict before the first step takes a step: it counts, and of Rprop and ASGD the step size is 0 in it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import ASGD, Adamax, AdamW, RAdam, Rprop
print("torch", torch.__version__)


def moves(cls, look):
    """How far the weights go in the first two steps, and the count after them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).double()
    optimizer = cls(model.parameters())
    if look:
        get_optimizer_state_dict(model, optimizer)
    found = []
    for _ in range(2):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        found.append((model.weight - before).abs().mean().item())
    return found, int(optimizer.state[model.weight]["step"])


for cls, ratio in ((AdamW, 0.7451), (Adamax, 0.5263), (RAdam, 0.5268), (Rprop, 0.0001), (ASGD, 0.0)):
    (plain, two), (looked, three) = moves(cls, False), moves(cls, True)
    print(f"{cls.__name__}: the first step moves weights by {plain[0]:.1e}, after a look by {looked[0]:.1e}; two steps count {two} and {three}")
    assert (two, three) == (2, 3) and abs(looked[0] / plain[0] - ratio) < 1e-3
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
