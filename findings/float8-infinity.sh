#!/usr/bin/env bash
# A cast to float8_e4m3fn makes 448 of infinity and of what is too large since torch 2.13, and NaN of them in 2.11; float8_e5m2 keeps infinity.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
cat > "$folder/show.py" <<'PYTHON'
import math, sys, torch
from torch import inf, nan

x = torch.tensor([448.0, 500.0, inf, -inf, nan])
found = {}
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"):
    found[name] = x.to(getattr(torch, name)).float().tolist()
    print("torch", torch.__version__, name, f"{x.tolist()} -> {found[name]}")
expected = [448.0, 448.0, 448.0, -448.0, nan] if sys.argv[1] == "2.13.0" else [448.0, nan, nan, nan, nan]
same = lambda a, b: all(p == q or math.isnan(p) and math.isnan(q) for p, q in zip(a, b))
assert torch.__version__.startswith(sys.argv[1])
assert same(found["float8_e4m3fn"], expected)
assert same(found["float8_e5m2"], [448.0, 512.0, inf, -inf, nan])
assert same(found["float8_e4m3fnuz"], [nan] * 5)
PYTHON
for version in 2.11.0 2.13.0; do
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet "torch==$version"
    "$folder/venv/bin/pip" install --quiet numpy
    "$folder/venv/bin/python" "$folder/show.py" "$version" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
    rm -rf "$folder/venv"
done
