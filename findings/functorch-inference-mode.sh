#!/usr/bin/env bash
# torch 2.11: torch.func.grad gives zeros under torch.inference_mode, without an error; torch 2.13 gives the gradient.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore CUDA_VISIBLE_DEVICES=
cat > "$folder/show.py" <<'PYTHON'
import sys, torch
x = torch.arange(1.0, 4.0)
f = lambda w: (w * w).sum()
with torch.inference_mode():
    inside = torch.func.grad(f)(x)
print("torch", torch.__version__, "| outside:", torch.func.grad(f)(x).tolist(), "| under inference_mode:", inside.tolist())
assert inside.tolist() == ([0.0] * 3 if sys.argv[1] == "zeros" else [2.0, 4.0, 6.0])
PYTHON
for case in "2.11.0 zeros" "2.13.0 right"; do
  set -- $case
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet "torch==$1" numpy
  "$folder/$1/bin/python" "$folder/show.py" "$2"
done
