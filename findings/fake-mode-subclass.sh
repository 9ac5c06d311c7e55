#!/usr/bin/env bash
# A subclass of FakeTensorMode is no FakeTensorMode to higher-order operators: their rules go by the exact class of the mode.
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
from torch._subclasses.fake_tensor import FakeTensorMode


class Own(FakeTensorMode):
    pass


def branch(x):
    return torch.ops.higher_order.cond(torch.ones((), dtype=torch.bool), lambda x: x.sin(), lambda x: x.cos(), (x,))


for cls in (FakeTensorMode, Own):
    with cls():
        try:
            print(cls.__name__, "gives", tuple(branch(torch.ones(3)).shape))
            raised = ""
        except NotImplementedError as error:
            raised = str(error)
            print(cls.__name__, "raises NotImplementedError:", raised.splitlines()[0][:120])
    assert bool(raised) == (cls is Own), raised
PYTHON
cd "$folder"
python -c "from importlib.metadata import version as v; print(*(f'{p} {v(p)}' for p in 'torch'.split()))"
python show.py
