"""Errors of the package that no test met: python tools/errors_met LINES, after a run of the tests that wrote LINES.

    ERRORS_MET=/tmp/lines PYTHONPATH=tools/errors_met make test
    python tools/errors_met /tmp/lines

A line of the output is a place that makes an error and that was not reached: file:line, the error, how its text begins.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"SpecError", "TreeError", "StaleStateError", "ScheduleError", "CheckpointError", "CommError", "RestartError"}


def makers(tree: ast.AST) -> list[ast.Call]:
    """Calls that make an error."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            kind = name
            if name == "refuse" and node.args and isinstance(node.args[0], ast.Constant):
                kind = str(node.args[0].value)
            if kind in KINDS:
                found.append(node)
    return found


def main() -> int:
    met: dict[str, set[int]] = defaultdict(set)
    for line in Path(sys.argv[1]).read_text().split():
        file, _, number = line.rpartition(":")
        for folder in ("functional_fsdp", "transforms"):
            if f"/{folder}/" in file:
                met[file[file.rindex(f"/{folder}/") + 1 :].replace("functional_fsdp/transforms", "transforms")].add(
                    int(number)
                )
    every = unmet = 0
    for folder in ("functional_fsdp", "transforms"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            source = path.read_text()
            for node in makers(ast.parse(source)):
                every += 1
                if not met[name] & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                    unmet += 1
                    text = " ".join((ast.get_source_segment(source, node) or "").split())
                    print(f"{name}:{node.lineno}: {text:.200}")
    print(f"{every - unmet} of {every} met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
