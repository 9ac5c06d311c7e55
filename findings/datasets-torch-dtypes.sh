#!/usr/bin/env bash
# datasets' torch format gives float64 columns as float32, and uint64 columns as int64: large values are inf or negative.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet datasets==5.2.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import datasets, numpy, torch
from datasets import Dataset

print("torch", torch.__version__, "datasets", datasets.__version__)
columns = {
    "time": numpy.array([1764432000.25, 1764432000.5]),  # seconds since 1970
    "large": numpy.array([1e300, 1.0]),
    "hash": numpy.array([2**63 + 5, 2], numpy.uint64),
}
data = Dataset.from_dict(columns)
print("columns:", {name: feature.dtype for name, feature in data.features.items()})
assert [f.dtype for f in data.features.values()] == ["float64", "float64", "uint64"]
seen = data.with_format("torch")[:]
for name, value in seen.items():
    print(f"with_format('torch'), {name}: {value.dtype} {value.tolist()}")
assert [v.dtype for v in seen.values()] == [torch.float32, torch.float32, torch.int64]
assert seen["time"][0] == seen["time"][1] and seen["large"][0] == float("inf") and seen["hash"][0] < 0
asked = data.with_format("torch", columns=["time", "large"], dtype=torch.float64)[:]
print("with_format('torch', dtype=torch.float64), time:", asked["time"].dtype, asked["time"].tolist())
assert asked["time"].tolist() == columns["time"].tolist() and asked["large"][0] == 1e300
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
