#!/usr/bin/env bash
# safetensors writes the memory of a tensor whose conjugation torch has put off: what is read back is not conjugated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet safetensors==0.8.0 numpy
cat > "$folder/show.py" <<'PYTHON'
import os, safetensors, torch
from safetensors.torch import load, load_file, save, save_file
print("torch", torch.__version__, "safetensors", safetensors.__version__)
z = torch.tensor([1 + 2j, 3 - 1j])
given = {"conj": z.conj(), "resolved": z.conj().resolve_conj()}
save_file(given, os.path.join(os.environ["TMPDIR"], "z.safetensors"))
for way, read in (("save_file", load_file(os.path.join(os.environ["TMPDIR"], "z.safetensors"))), ("save", load(save(given)))):
    for name, tensor in given.items():
        print(f"{way}, {name}: {tensor.tolist()} comes back as {read[name].tolist()}")
    assert read["conj"].equal(z) and read["resolved"].equal(z.conj())
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
