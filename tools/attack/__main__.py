"""make attack N=5000 SEED=0: so many specs and, in proportion, of the other kinds; KIND=kills: so many of one kind;
CASE=specs:0:17: one case alone, shrunk; PACKAGE=/path/to/a/checkout: the package that is there;
ARGS="--worlds 4,8 --simulate ranks,random:1,random:2": specs and driven on so many simulated ranks, in these orders."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TOOLS), str(TOOLS.parent / "tests")]  # this folder is the package `attack`, and takes `support`

SHARES = {
    "specs": 1.0,
    "driven": 1.0,
    "functions": 0.4,
    "objects": 1.0,
    "buffers": 0.5,
    "written": 0.5,
    "remat": 0.5,
    "interrupts": 0.2,
    "kills": 0.04,
    "files": 0.1,
    "differ": 0.1,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="cases: of specs, and of the others in proportion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=SHARES, help="only this kind, n cases of it")
    parser.add_argument("--case", help="one case: kind:seed:index")
    parser.add_argument("--players", type=int, default=os.cpu_count(), help="processes, each with its own ranks")
    parser.add_argument("--shrink", type=float, default=30.0, help="seconds for each group of failures; 0: none")
    parser.add_argument("--without", default="", help="features of specs that are known to fail: absent,replace,late")
    parser.add_argument("--worlds", default="", help="numbers of ranks of specs and driven, as 4,8")
    parser.add_argument(
        "--simulate", default="", help="orders of turns in which specs and driven run, as ranks,random:1"
    )
    parser.add_argument("--json", help="a file for all verdicts")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["ATTACK_WITHOUT"] = args.without
    os.environ["ATTACK_WORLDS"], os.environ["ATTACK_ORDERS"] = args.worlds, args.simulate

    import functional_fsdp as fsdp
    from attack import forks, harness, players, shrink

    print(f"the package in {Path(fsdp.__file__).parent}, seed {args.seed}", flush=True)
    if args.case:
        kind, seed, index = args.case.split(":")
        case = harness.draw(kind, int(seed), int(index))
        verdict = harness.play_one(case)
        print(f"{args.case}: {verdict.column}\n{verdict.text}\n{shrink.described(case)}", flush=True)
        if not verdict.fine and args.shrink:
            case, again = shrink.shrunk(case, verdict.column, args.shrink)
            print(f"\n{'shrunk' if again else 'did not come again'}:\n{again and again.text}\n{shrink.described(case)}")
        return not verdict.fine
    counts = {args.kind: args.n} if args.kind else {kind: max(1, round(n * args.n)) for kind, n in SHARES.items()}
    if args.simulate or args.worlds:
        counts = {kind: args.n for kind in counts if kind in harness.SIMULATED}
    begun = time.monotonic()
    forks.prepare()
    found = players.play_all(counts, args.seed, args.players)
    print(players.table(found))
    print(f"{time.monotonic() - begun:.0f} s in all, {args.players} players", flush=True)
    if args.json:
        plain = {name: v.plain() for one in found.values() for name, v in one.verdicts.items()}
        Path(args.json).write_text(json.dumps(plain, indent=1))
    print(players.report(found, args.players, args.shrink), flush=True)
    return int(any(one.bad() for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
