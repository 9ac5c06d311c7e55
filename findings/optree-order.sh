#!/usr/bin/env bash
# optree sorts the keys of dicts and skips None, torch's pytrees do neither: leaves of one put back by the other swap weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
pip install --quiet optree==0.20.0
cat > "$folder/show.py" <<'PYTHON'
import torch, optree
tree = {"weight": torch.full((2,), 1.0), "bias": torch.full((2,), 2.0)}
ours = torch.utils._pytree.tree_leaves(tree)
theirs = optree.tree_leaves(tree)
print("torch's pytree:", [t[0].item() for t in ours], "| optree:", [t[0].item() for t in theirs])
assert [t[0].item() for t in ours] == [1.0, 2.0] and [t[0].item() for t in theirs] == [2.0, 1.0]
spec = torch.utils._pytree.tree_structure(tree)
swapped = torch.utils._pytree.tree_unflatten(theirs, spec)
print("leaves of optree put back by torch's structure: weight is", swapped["weight"][0].item(), "(was 1.0), no error")
assert swapped["weight"][0].item() == 2.0
t = {"a": None, "b": torch.ones(1)}
print("None: leaves of torch", len(torch.utils._pytree.tree_leaves(t)), ", of optree", len(optree.tree_leaves(t)))
assert len(torch.utils._pytree.tree_leaves(t)) == 2 and len(optree.tree_leaves(t)) == 1
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch optree'.split()))"
python show.py
