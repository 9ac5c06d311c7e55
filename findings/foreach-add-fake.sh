#!/usr/bin/env bash
# torch._foreach_add_ of fake tensors and a scalar tensor asks for its value; add_ of each does not.
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
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

with FakeTensorMode():
    counts, by = [torch.zeros(3), torch.zeros(5)], torch.ones(())
    for one in counts:
        one.add_(by)
    print("add_ of each:", [tuple(one.shape) for one in counts])
    try:
        torch._foreach_add_(counts, by)
        said = "nothing"
    except DataDependentOutputException as error:
        said = str(error)
print("_foreach_add_ raises:", said)
assert "_local_scalar_dense" in said
real = [torch.zeros(3), torch.zeros(5)]
torch._foreach_add_(real, torch.ones(()))
assert all(bool((one == 1).all()) for one in real)
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
