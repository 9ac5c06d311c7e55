#!/usr/bin/env bash
# bitsandbytes on a CPU with AVX-512 scales 4-bit weights by other blocks than their own where a row is no whole number of blocks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet bitsandbytes==0.50.2 numpy
cat > "$folder/show.py" <<'PYTHON'
import bitsandbytes, torch, torch.nn as nn
from bitsandbytes.cextension import lib
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

avx = bool(lib.has_avx512f_cpu())
print("torch", torch.__version__, "bitsandbytes", bitsandbytes.__version__, "AVX-512:", avx)
torch.manual_seed(0)


def off(a, b):
    return ((a - b).norm() / b.norm()).item()


for kind in ("nf4", "fp4"):
    for row in (64, 96, 128, 160):
        w = torch.randn(64, row)
        data, state = quantize_4bit(w, blocksize=64, quant_type=kind)
        codes = torch.stack([data.flatten() >> 4, data.flatten() & 15], 1).flatten().long()
        by_hand = (state.code[codes].view(-1, 64) * state.absmax[:, None]).view_as(w)
        layer = bitsandbytes.nn.Linear4bit(row, 64, bias=False, compute_dtype=torch.float32, quant_type=kind)
        layer.load_state_dict({"weight": w})
        x = torch.randn(8, row)
        found = off(dequantize_4bit(data, state), w), off(by_hand, w), off(layer.to("cpu")(x).detach(), x @ w.T)
        print(f"{kind}, rows of {row}, blocks of 64: weights off by {found[0]:.0%}, by hand {found[1]:.0%}; Linear4bit {found[2]:.0%}")
        assert found[1] < 0.13 and (found[0] > 0.15) == (found[2] > 0.15) == (avx and row % 64 > 0)
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
