"""`python -m functional_fsdp.look FILE`: print a flight record, or of what fingerprints are; of two, compare them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .fingerprint import Prints, compare
from .flight import read_flight, said_of_flight

USAGE = "usage: python -m functional_fsdp.look FLIGHT.json | PRINTS.json | FIRST.json SECOND.json"


def main(paths: Sequence[str]) -> int:
    """Print what the files say. Returns the exit status: 0, 1 if two runs differ, 2 if a file is of no known kind."""
    try:
        if len(paths) == 2:
            found = compare(*paths)
            print(found)
            return 0 if found else 1
        if len(paths) != 1 or paths[0].startswith("-"):
            print(USAGE, file=sys.stderr)
            return 2
        try:
            print(Prints.load(paths[0]))
        except ValueError as prints:
            try:
                print(said_of_flight(read_flight(paths[0])))
            except ValueError as flight:
                raise ValueError(f"{prints}\n{flight}") from None
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
