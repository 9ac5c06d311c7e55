"""How fast weights are read, by an earlier version of this package and this one in turn: tools/peers/speed.py BEFORE

BEFORE is a source tree, as `git archive COMMIT | tar -x -C BEFORE` gives it. Each reads what it has written, MIB of it
(1024), on one rank, from the host's cache: seconds of CPU, which other programs change least.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS, SIDE, UNITS = int(os.environ.get("ROUNDS", "5")), 2048, int(os.environ.get("MIB", "1024")) // 16
READ = f"""
import sys, time, torch, functional_fsdp as fsdp
make = lambda: torch.nn.Sequential(*(torch.nn.Linear({SIDE}, {SIDE}, bias=False) for _ in range({UNITS})))
spec, where, write = fsdp.Spec(fsdp.local_mesh("cpu")), sys.argv[1], len(sys.argv) > 2
if write:
    state, _ = fsdp.init(make, spec)
    fsdp.save_safetensors(state, where + "/safetensors"), fsdp.save(state, where + "/dcp")
else:
    fsdp.init(lambda: torch.nn.Linear(2, 2), spec)
    ways = lambda: fsdp.init(make, spec, weights=where + "/safetensors"), lambda: fsdp.load(where + "/dcp", spec)
    for read in ways:
        read()
        begun = time.process_time()
        read()
        print(time.process_time() - begun)
"""


def ran(tree: str, *args: str) -> list[float]:
    env = {**os.environ, "PYTHONPATH": tree, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", READ, *args], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return [float(line) for line in done.stdout.split()]


def main(before: str) -> None:
    now = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as folder:
        for tree in (before, now):
            (Path(folder) / Path(tree).name).mkdir()
            ran(tree, f"{folder}/{Path(tree).name}", "write")
        found: dict[str, list[list[float]]] = {before: [], now: []}
        for _ in range(ROUNDS):
            for tree, seconds in found.items():
                seconds.append(ran(tree, f"{folder}/{Path(tree).name}"))
                print(Path(tree).name, seconds[-1], flush=True)
    for i, kind in enumerate(("safetensors", "DCP")):
        one, two = (statistics.median(seconds[i] for seconds in found[tree]) for tree in (before, now))
        print(f"{kind}: before {one:.3f} s, now {two:.3f} s, ratio {two / one:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
