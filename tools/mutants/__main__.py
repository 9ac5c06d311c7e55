"""make mutants N=100 SEED=0: so many small mistakes in the package, and which of them no test notices;
PACKAGE=/path/to/a/checkout: the package and the tests that are there;
AGAINST=/path/to/a/checkout: only mistakes that can be made there too, and which of the survivors survive there."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "tools")  # so that this folder is the package `mutants`


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", type=Path, default=ROOT, help="a checkout, with its own tests")
    parser.add_argument("--against", type=Path, help="another checkout: what survives here is looked for there")
    parser.add_argument("--only", default="", help="mutants whose file:line begins so")
    parser.add_argument("--processes", type=int, default=2, help="copies that run tests at a time")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "functional_fsdp_mutants")
    parser.add_argument("--list", action="store_true", help="say which mutants it would be")
    args = parser.parse_args()

    from mutants import operators, play
    from mutants.cover import cover

    def played(checkout: Path, mutants: list[operators.Mutant]) -> list[play.Played]:
        known = cover(checkout, args.kept, args.processes)
        begun = time.monotonic()

        def said(one: play.Played) -> None:
            print(f"{one.verdict:9} {one.seconds:5.0f} s  {one.mutant.name}", flush=True)
            lines[one.mutant.name] = one.plain()
            (args.kept / f"seed{args.seed}.{checkout.name}.json").write_text(json.dumps([*lines.values()], indent=1))

        lines: dict[str, dict[str, object]] = {}
        results = play.play_all(checkout, mutants, known, args.processes, said)
        print(
            f"{checkout}: {dict(Counter(one.verdict for one in results))}, {time.monotonic() - begun:.0f} s\n",
            flush=True,
        )
        return results

    checkout = args.package.resolve()
    drawn = operators.mutants_of(checkout / "functional_fsdp")
    others = operators.mutants_of(args.against.resolve() / "functional_fsdp") if args.against else []
    if args.against:
        drawn = operators.in_both(drawn, others)
    drawn = [one for one in drawn if f"{one.file}:{one.line}".startswith(args.only)]
    print(f"{len(drawn)} mutants, of which {args.n} are drawn", flush=True)
    drawn = operators.draw(drawn, args.n, args.seed)
    if args.list:
        print("\n".join(f"{one.name} | {one.before} -> {one.after}" for one in drawn))
        return 0
    survivors = [one for one in played(checkout, drawn) if one.verdict in play.LEFT]
    before: dict[operators.Mutant, str] = {}
    if args.against and survivors:
        pairs = {one.mutant: operators.found_again(one.mutant, others) for one in survivors}
        there = played(args.against.resolve(), [other for other in pairs.values() if other])
        verdicts = {one.mutant: one.verdict for one in there}
        before = {mutant: verdicts[other] for mutant, other in pairs.items() if other}
    for one in survivors:
        change = one.mutant
        there_too = f", there: {before[change]}" if change in before else ""
        print(f"{change.file}:{change.line} {change.function} ({one.verdict}{there_too})")
        print(f"    - {change.before}\n    + {change.after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
