"""Rules for the source itself: no hooks, no `.grad`, arrows that point one way, and documented public names."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import functional_fsdp as fsdp
from functional_fsdp import extend, transforms

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "functional_fsdp").glob("*.py"))
TRANSFORMS = sorted((ROOT / "transforms").glob("*.py"))


def nodes(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text(), str(file)))


def attributes(file: Path) -> Iterator[tuple[str, ast.Attribute]]:
    return ((node.attr, node) for node in nodes(file) if isinstance(node, ast.Attribute))


@pytest.mark.parametrize("file", CORE + TRANSFORMS, ids=lambda f: f.name)
class TestEveryFile:
    def test_registers_no_hooks(self, file: Path) -> None:
        assert not [name for name, _ in attributes(file) if name.startswith("register_") and name.endswith("hook")]

    def test_calls_no_backward(self, file: Path) -> None:
        """`def backward` of an autograd Function is fine, `loss.backward()` is not."""
        calls = (node.func for node in nodes(file) if isinstance(node, ast.Call))
        assert not [f.lineno for f in calls if isinstance(f, ast.Attribute) and f.attr == "backward"]

    def test_assigns_no_grad(self, file: Path) -> None:
        assert not [n.lineno for name, n in attributes(file) if name == "grad" and not isinstance(n.ctx, ast.Load)]

    def test_says_what_it_is_for_and_lists_its_names(self, file: Path) -> None:
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), f"{file.name} has no docstring"
        assigned = [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
        assert "__all__" in assigned, f"{file.name} has no __all__"

    def test_is_one_noun(self, file: Path) -> None:
        lines = len(file.read_text().splitlines())
        assert lines <= 400, f"{file.name} has {lines} lines; past 400 there is a second noun in it"


def private(dotted: str) -> bool:
    """Whether a name of torch's is one that is not public."""
    first, *rest = dotted.split(".")
    return first in ("torch", "dist") and any(part.startswith("_") and not part.startswith("__") for part in rest)


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("file", [f for f in CORE + TRANSFORMS if f.name != "_torch.py"], ids=lambda f: f.name)
def test_names_of_torch_that_are_not_public_are_in_one_file(file: Path) -> None:
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(dotted(node))
    assert not [name for name in found if private(name)], "take them from functional_fsdp._torch"


def test_a_private_name_is_seen() -> None:
    assert all(map(private, ["torch._C", "torch.utils._pytree", "dist._world", "torch.nn.utils.stateless._x"]))
    assert not any(map(private, ["torch.nn", "torch.__version__", "self._C", "functional_fsdp._torch"]))


@pytest.mark.parametrize("file", CORE, ids=lambda f: f.name)
def test_the_core_imports_no_transform(file: Path) -> None:
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        assert not [name for name in names if "transforms" in name.split(".")], f"line {node.lineno}"
        assert file.name == "__init__.py" or "extend" not in names, f"line {node.lineno}: what is above the core"


def imports_of(file: Path) -> set[str]:
    """The modules of the core that a file imports, those for types included."""
    found: set[str] = set()
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return found


def test_imports_go_in_no_circle() -> None:
    left = {file.stem: imports_of(file) for file in CORE}
    left = {name: found & left.keys() for name, found in left.items()}
    while free := [name for name, found in left.items() if not found]:
        left = {name: found.difference(free) for name, found in left.items() if name not in free}
    assert not left, "these import each other, or what does"


#: each of these is known to a transport's own files, and to the list of them
TRANSPORTS = {"_auto.py", "_carrier.py", "_copies.py", "_signals.py", "_slab.py", "_symmetric.py", "_transports.py"}


@pytest.mark.parametrize("file", [f for f in CORE + TRANSFORMS if f.name not in TRANSPORTS], ids=lambda f: f.name)
def test_nobody_asks_which_transport_it_is(file: Path) -> None:
    names = ("symmetric", "copy_engine")
    for node in nodes(file):
        if isinstance(node, ast.Compare):
            said = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            assert not [name for name in said if name in names], f"line {node.lineno} compares a transport's name"
        if isinstance(node, ast.ImportFrom) and node.level and file.name not in ("__init__.py", "_runtime.py"):
            whose = {"_copies", "_slab", "_signals", "_symmetric"} & {node.module}
            assert not whose, f"line {node.lineno}: {whose} belongs to a transport"


@pytest.mark.parametrize("file", TRANSFORMS, ids=lambda f: f.name)
def test_transforms_are_made_of_public_names(file: Path) -> None:
    """As anybody's are: from the package and from `extend`; and of a State what is public."""
    known = {"functional_fsdp": fsdp.__all__, "functional_fsdp.extend": extend.__all__}
    for node in nodes(file):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("functional_fsdp")]
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"line {node.lineno}: from outside of the folder"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("functional_fsdp"):
            assert {alias.name for alias in node.names} <= {*known.get(node.module or "", ())}, f"line {node.lineno}"
    assert not [(name, n.lineno) for name, n in attributes(file) if name in ("ledger", "executor", "_evolve")]


@pytest.mark.parametrize("module", [fsdp, transforms, extend], ids=lambda m: m.__name__)
def test_public_names_are_explicit_sorted_and_documented(module: object) -> None:
    names: list[str] = module.__all__  # type: ignore[attr-defined]
    assert list(names) == sorted(set(names))
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            # A dataclass without a docstring of its own gets its signature, an Exception gets its base's.
            own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            assert own, f"{name} is public and has no docstring"
            assert not own.startswith(f"{name}("), f"{name} is public and has no docstring"


def test_every_public_import_is_listed() -> None:
    tree = ast.parse((ROOT / "functional_fsdp" / "__init__.py").read_text())
    imported = [alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names]
    assert {name for name in imported if not name.startswith("_")} <= set(fsdp.__all__)


def test_the_transforms_have_one_import_name() -> None:
    link = ROOT / "functional_fsdp" / "transforms"
    assert link.is_symlink()
    assert link.readlink() == Path("../transforms")
    assert transforms.__name__ == "functional_fsdp.transforms"
    for file in CORE + TRANSFORMS:
        names = [n.module for n in nodes(file) if isinstance(n, ast.ImportFrom) and not n.level]
        assert "transforms" not in names


def test_importing_loads_no_compiler() -> None:
    """torch._dynamo takes half a second, and only those who compile need it."""
    code = "import sys, functional_fsdp.transforms; print({'torch._dynamo', 'torch._inductor'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
