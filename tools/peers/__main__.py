"""The small checkpoints of tests/data/peers, made by the packages themselves: python tools/peers [NAME ...]

It runs in an environment with torch, transformers and safetensors as in constraints.txt, and with these, without what
they depend on (pip install --no-deps): accelerate 1.15.0, lightning 2.6.6, peft 0.21.2, torchtitan 0.3.0, megatron-fsdp
0.6.1, and deepspeed 0.19.8 (DS_BUILD_OPS=0, --no-build-isolation; it needs hjson, py-cpuinfo, ninja, msgpack,
pydantic). flax's are made by flaxed.py.

Each is a folder that two ranks on the CPU have written after three steps of AdamW, beside `expected.safetensors`:
weights ("weight/NAME"), moments ("exp_avg/NAME", "exp_avg_sq/NAME") and the mean losses of the ten steps after
("losses", float64 [10]), as the package itself had them. All is packed as NAME.tar.xz.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = [str(Path(__file__).parent), str(ROOT / "tests")]
sys.path[:0] = PLACES
os.environ["PYTHONPATH"] = os.pathsep.join([*PLACES, os.environ.get("PYTHONPATH", "")])  # of processes that are started
os.environ.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")

import made  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

TARGET = ROOT / "tests" / "data" / "peers"


def main(names: list[str]) -> int:
    TARGET.mkdir(parents=True, exist_ok=True)
    failed = []
    for i, name in enumerate(names or made.MAKERS):
        folder = Path(tempfile.mkdtemp()) / name
        folder.mkdir()
        try:
            mp.spawn(made.one, (name, str(folder), 29600 + i + os.getpid() % 300), nprocs=made.RANKS.get(name, 2))
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        for file in (*folder.rglob("zero_to_*.py"), *folder.rglob("latest_universal"), *folder.rglob("about.json")):
            file.unlink()
        with tarfile.open(TARGET / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(folder, name)
        there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        print(name, (TARGET / f"{name}.tar.xz").stat().st_size, there, flush=True)
        shutil.rmtree(folder.parent)
    print("failed:", failed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
