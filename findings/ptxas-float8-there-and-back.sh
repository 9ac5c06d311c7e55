#!/usr/bin/env bash
# Triton: a kernel that casts to float8_e4m3 and back reads half of the pairs from an unrelated register (ptxas 12.8).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore TRITON_CACHE_DIR="$folder/cache"
pip install --quiet triton==3.6.0
cat > "$folder/show.py" <<'PYTHON'
import re, subprocess, sys
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def there_and_back(x, data, left, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    small = value.to(tl.float8e4nv)
    tl.store(left + at, (value - small.to(tl.float32)).to(tl.bfloat16))
    tl.store(data + at, small.to(tl.uint8, bitcast=True))

kinds = {"x": "*fp32", "data": "*u8", "left": "*bf16", "SIZE": "constexpr"}
aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
source = ASTSource(fn=there_and_back, signature=kinds, constexprs={(3,): 2048}, attrs=aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))  # needs no GPU
tools, cubin = Path(triton.__file__).parent / "backends/nvidia/bin", Path(sys.argv[1])
cubin.write_bytes(compiled.asm["cubin"])
code = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
version = subprocess.run([tools / "ptxas", "--version"], capture_output=True, text=True, check=True).stdout
print("triton", triton.__version__, "ptxas", re.search(r"V[\d.]+", version)[0])
packed, strangers = set(), []
for line in code.splitlines():
    if found := re.search(r"E4M3\.F32\.PACK_AB_MERGE_C (R\d+)", line):
        packed.add(found[1])
    elif found := re.search(r"F16\.E4M3\.UNPACK_B R\d+, (R\d+)", line):
        if found[1] not in packed:
            strangers.append(found[1])
print(code.count("F16.E4M3.UNPACK_B"), "pairs are read back, of them from registers to which none was written:", strangers)
assert strangers
PYTHON
cd "$folder"
python show.py "$folder/kernel.cubin"
