#!/usr/bin/env bash
# torchmetrics keeps what compute() gave: after merge_state or load_state_dict it gives the old result, until an update.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet torchmetrics==1.9.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import torch, torchmetrics
from torchmetrics import MeanMetric

print("torch", torch.__version__, "torchmetrics", torchmetrics.__version__)


def metric(value):
    made = MeanMetric()
    made.persistent(True)
    made.update(value)
    return made


found = {}
for asked_before in (False, True):
    for name in ("merge_state", "load_state_dict"):
        one, other = metric(1.0), metric(5.0)
        if asked_before:
            one.compute()
        one.merge_state(other) if name == "merge_state" else one.load_state_dict(other.state_dict())
        found[name, asked_before] = one.compute().item()
        print(f"means of 1 and of 5, {name}, compute() before it: {asked_before}: {found[name, asked_before]}")
one.update(5.0)
print("after an update, too:", one.compute().item())
assert list(found.values()) == [3.0, 5.0, 1.0, 1.0] and one.compute() == 5
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
