#!/usr/bin/env bash
# Fused optimizers on the CPU pair elements by memory, not by index: a moment with other strides than its weight gives wrong weights, without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import copy, torch, torch.nn as nn
from torch.optim import SGD, Adagrad, AdamW
print("torch", torch.__version__)


def run(cls, options, *, fused, change):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).double()
    optimizer = cls(model.parameters(), fused=fused, **options)
    for i in range(4):
        if i == 2 and change:  # the weight has other strides from here on, its moments keep theirs
            model.to(memory_format=torch.channels_last)
        torch.manual_seed(i)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 5, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return model.weight.detach().contiguous()


def error(cls, options, change):
    right = run(cls, options, fused=False, change=change)
    return (run(cls, options, fused=True, change=change) - right).abs().max().item()


for cls, options in ((AdamW, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9}), (Adagrad, {"lr": 0.1})):
    same, other = error(cls, options, False), error(cls, options, True)
    print(f"{cls.__name__}: fused less not fused {same:.0e}; with .to(memory_format=channels_last) after two steps {other:.1e}")
    assert same < 1e-12 and other > 1e-3
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
