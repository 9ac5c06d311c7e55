"""Rules for the source itself: no hooks, no `.grad`, arrows that point one way, and documented public names."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import functional_fsdp as fsdp
from functional_fsdp import _seams, extend, transforms
from functional_fsdp._common.calls import _FUNCTIONS
from functional_fsdp._state.state import FIELDS

ROOT = Path(__file__).parents[2]
CORE = sorted(f for f in (ROOT / "functional_fsdp").rglob("*.py") if "transforms" not in f.parts)
TRANSFORMS = sorted((ROOT / "transforms").rglob("*.py"))
FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"}
FACTORIES |= {"randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


def place(file: Path) -> str:
    """Where a file of the packages lies, as `_plan/layout.py`."""
    return file.relative_to(ROOT / ("transforms" if file in TRANSFORMS else "functional_fsdp")).as_posix()


@cache
def nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text(), str(file)))]


def attributes(file: Path) -> Iterator[tuple[str, ast.Attribute]]:
    return ((node.attr, node) for node in nodes(file) if isinstance(node, ast.Attribute))


@pytest.mark.parametrize("file", CORE + TRANSFORMS, ids=place)
class TestEveryFile:
    def test_registers_no_hooks(self, file: Path) -> None:
        assert not [name for name, _ in attributes(file) if name.startswith("register_") and name.endswith("hook")]

    def test_calls_no_backward(self, file: Path) -> None:
        """`def backward` of an autograd Function is fine, `loss.backward()` is not."""
        calls = (node.func for node in nodes(file) if isinstance(node, ast.Call))
        assert not [f.lineno for f in calls if isinstance(f, ast.Attribute) and f.attr == "backward"]

    def test_assigns_no_grad(self, file: Path) -> None:
        assert not [n.lineno for name, n in attributes(file) if name == "grad" and not isinstance(n.ctx, ast.Load)]

    def test_says_where_its_tensors_are_made(self, file: Path) -> None:
        """Whoever shards under `with torch.device("cuda"):` has moved torch's default, also for what is the host's."""
        calls = [n for n in nodes(file) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        made = [n for n in calls if n.func.attr in FACTORIES and ast.unparse(n.func.value) == "torch"]  # type: ignore[attr-defined]
        assert not [n.lineno for n in made if not any(word.arg == "device" for word in n.keywords)]

    def test_says_what_it_is_for(self, file: Path) -> None:
        assert ast.get_docstring(ast.parse(file.read_text())), f"{file.name} has no docstring"


def test_no_two_modules_of_tests_that_run_together_have_one_name() -> None:
    names = [path.name for path in ROOT.glob("tests/*/test_*.py") if path.parent.name != "gpu"]
    assert sorted(names) == sorted(set(names))  # workers import them by it


@pytest.mark.parametrize("file", CORE + TRANSFORMS, ids=place)
def test_states_are_given_fields_that_they_have(file: Path) -> None:
    """`_evolve` is on the way of every verb, and does not look."""
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_evolve":
            assert {word.arg for word in node.keywords if word.arg} <= {*FIELDS}, f"line {node.lineno}"


def test_a_field_that_a_state_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match=r"evolve: a State has no field 'token'. Its fields are main, weights, "):
        extend.evolve(None, token=None)  # type: ignore[arg-type]


def private(dotted: str) -> bool:
    """Whether a name of torch's is one that is not public."""
    first, *rest = dotted.split(".")
    return first in ("torch", "dist") and any(part.startswith("_") and not part.startswith("__") for part in rest)


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("file", [f for f in CORE + TRANSFORMS if place(f) != "_common/torch_names.py"], ids=place)
def test_names_of_torch_that_are_not_public_are_in_one_file(file: Path) -> None:
    found = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(dotted(node))
    assert not [name for name in found if private(name)], "take them from functional_fsdp._common.torch_names"


def test_a_private_name_is_seen() -> None:
    assert all(map(private, ["torch._C", "torch.utils._pytree", "dist._world", "torch.nn.utils.stateless._x"]))
    assert not any(map(private, ["torch.nn", "torch.__version__", "self._C", "functional_fsdp._common.torch_names"]))


@pytest.mark.parametrize("file", CORE, ids=place)
def test_the_core_imports_no_transform(file: Path) -> None:
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        assert not [name for name in names if "transforms" in name.split(".")], f"line {node.lineno}"
        assert place(file) == "__init__.py" or "extend" not in names, f"line {node.lineno}: what is above the core"


def module_of(file: Path) -> tuple[str, ...]:
    """A file's module, from its package on: ("_plan", "layout")."""
    parts = Path(place(file)).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(file: Path, there: set[tuple[str, ...]], types: bool = True) -> set[tuple[str, ...]]:
    """The modules of its package that a file imports; with `types` also those that only annotations name."""
    package = Path(place(file)).parts[:-1]
    found = set()
    guarded = [n for n in nodes(file) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    left_out = set() if types else {id(child) for node in guarded for child in ast.walk(node)}
    for node in nodes(file):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            base = tuple(part for part in base if part)
            found |= {(*base, alias.name) if (*base, alias.name) in there else base for alias in node.names}
    return found & there - {module_of(file)}


def in_a_circle(imports: dict[str, set[str]]) -> set[str]:
    """Those that import each other, or what does."""
    left = {name: found & imports.keys() for name, found in imports.items()}
    while free := [name for name, found in left.items() if not found]:
        left = {name: found.difference(free) for name, found in left.items() if name not in free}
    return {*left}


@pytest.mark.parametrize("files", [CORE, TRANSFORMS], ids=["core", "transforms"])
def test_imports_go_in_no_circle(files: list[Path]) -> None:
    """Neither those of files, unless for types, nor those of folders."""
    there = {module_of(file) for file in files} - {()}
    runs = {module_of(file): imports_of(file, there, types=False) for file in files if module_of(file)}
    assert not in_a_circle({".".join(name): {*map(".".join, others)} for name, others in runs.items()})
    found = {module_of(file): imports_of(file, there) for file in files if module_of(file)}
    rooms: dict[str, set[str]] = {}
    for (room, *_), others in found.items():
        rooms.setdefault(room, set()).update(other[0] for other in others if other[0] != room)
    assert not (circle := in_a_circle(rooms)), {name: rooms[name] & circle for name in circle}
    assert len({*rooms} - {*SATELLITES}) <= 20, "a newcomer looks at no more than twenty rooms, beside satellites"


#: beside the core, which imports none of them (a contract in pyproject.toml), and what each may import of the others
SATELLITES: dict[str, set[str]] = {
    "_graph": set(),
    "_capture": set(),
    "_host_memory": set(),
    "_float8": set(),
    "_transports": set(),
    "_optim_extra": set(),
    "_redistribute": set(),
    "_io": {"_optim_extra", "_redistribute"},  # what checkpoints say of an optimizer, and of leaves
    "_simulate": {"_io"},  # a save that goes on beside the training
    "_launch": {"_io", "_simulate"},
    "codecs": set(),
    "look": set(),
    "_predict": {"look", "_graph"},  # what draws; states of shapes
}


def test_satellites_import_each_other_only_where_the_table_says_so() -> None:
    there = {module_of(file) for file in CORE} - {()}
    found: dict[str, set[str]] = {room: set() for room in SATELLITES}
    for file in CORE:
        room = module_of(file)[:1]
        if room and room[0] in SATELLITES:
            found[room[0]] |= {other[0] for other in imports_of(file, there)} & {*SATELLITES} - {room[0]}
    assert found == SATELLITES


def test_what_the_core_calls_by_name_a_satellite_has_and_nothing_else() -> None:
    called = {name for file in CORE for name in re.findall(r'provided\("([\w.]+)"\)', file.read_text())}
    assert called == {*_FUNCTIONS}
    assert {place(file).split("/")[0] for file in CORE if "provided(" in file.read_text()} & {*SATELLITES} == set()


@pytest.mark.parametrize("folder", [f for f in CORE + TRANSFORMS if f.name == "__init__.py"], ids=place)
def test_a_folder_says_its_purpose_in_a_line(folder: Path) -> None:
    text = ast.get_docstring(ast.parse(folder.read_text())) or ""
    assert text.split("\n")[0].endswith((".", "out.", ","))


def of_a_transport(file: Path) -> bool:
    return file in CORE and place(file).startswith("_transports/")


@pytest.mark.parametrize("file", [f for f in CORE + TRANSFORMS if not of_a_transport(f)], ids=place)
def test_nobody_asks_which_transport_it_is(file: Path) -> None:
    names = ("symmetric", "copy_engine")
    for node in nodes(file):
        if isinstance(node, ast.Compare):
            said = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            assert not [name for name in said if name in names], f"line {node.lineno} compares a transport's name"
        if isinstance(node, ast.ImportFrom) and node.level:
            whose = {"copy_engine", "peer_memory", "signals", "symmetric"} & {*(node.module or "").split(".")}
            assert not whose, f"line {node.lineno}: {whose} belongs to a transport"


#: each of these is about CUDA: lanes that are streams, the device, memory that GPUs share, processes that are given a
#: GPU, and graphs
CUDA = {
    "_runtime/lanes.py", "_host_memory/copy_lane.py", "_common/device.py", "_transports/auto.py",
    "_transports/peer_memory.py", "_transports/symmetric.py", "_launch/launch.py",
    "_launch/workers.py",
    "_cuda_graph/graphed.py", "_cuda_graph/capturing.py", "_cuda_graph/guarding.py",
    "_cuda_graph/host_traffic.py",
}  # fmt: skip


def questions_about_cuda(tree: ast.AST) -> list[int]:
    """The lines that ask whether there is CUDA, or do something with it: `.is_cuda`, `.cuda`, `torch.cuda`, "cuda"
    and "cpu" compared or looked up, and "cuda" passed on."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            asks = node.attr in ("cuda", "is_cuda", "is_cpu")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            asks = any("cuda" in name.split(".") for name in names)
        elif isinstance(node, ast.Compare | ast.Dict | ast.Subscript | ast.MatchValue):
            asks = any(isinstance(n, ast.Constant) and n.value in ("cuda", "cpu") for n in ast.walk(node))
        else:
            said = node.args if isinstance(node, ast.Call) else []
            asks = any(isinstance(one, ast.Constant) and one.value == "cuda" for one in said)
        if asks:
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("file", [f for f in CORE + TRANSFORMS if place(f) not in CUDA], ids=place)
def test_nobody_asks_whether_there_is_cuda(file: Path) -> None:
    found = questions_about_cuda(ast.parse(file.read_text()))
    assert not found, f"lines {found}: ask run.lanes or _common.device what you want to know"


def test_a_question_about_cuda_is_seen() -> None:
    asked = ["x.is_cuda", "run.cuda", "torch.cuda.synchronize()", "device.type == 'cuda'", "device.type != 'cpu'",
             "x in ('cuda', 'meta')", "import torch.cuda", "from torch import cuda", "x.is_cpu", "x.cuda()",
             "{'cuda': 1}.get(kind)", "torch.device('cuda')"]  # fmt: skip
    assert all(questions_about_cuda(ast.parse(line)) for line in asked)
    others = ["x = 'cuda_graph'", "from .cuda_graph import cuda_graph", "local_mesh('cpu')", "device.type == 'meta'"]
    assert not [line for line in others if questions_about_cuda(ast.parse(line))]


def test_who_may_ask_about_cuda_does() -> None:
    """Else it comes off the list."""
    files = [file for file in CORE + TRANSFORMS if place(file) in CUDA]
    assert {place(file) for file in files if questions_about_cuda(ast.parse(file.read_text()))} == CUDA


#: who may ask whether a graph is being made: the places that choose, and two that ask it of code without a State
ASK = {
    "_common/tracing.py",  # says so, and chooses: `traced_as`
    "_common/calls.py",  # chooses: `verb` and `alone`
    "_nn/module.py",  # a call of a bound module, which Dynamo follows by torch.func's way only
    "_compile/compile_units.py",  # compiled code, which asks whether it is compiled, or runs as Python
}
QUESTIONS = {"tracing", "LOWERING", "is_compiling", "is_dynamo_compiling"}


@pytest.mark.parametrize("file", [f for f in CORE + TRANSFORMS if place(f) not in ASK], ids=place)
def test_nobody_asks_whether_a_graph_is_made(file: Path) -> None:
    """What is done in another way in a graph is a function of its own, which `verb`, `alone` or `traced_as` chooses."""
    for node in nodes(file):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        assert name not in QUESTIONS, f"line {node.lineno} asks for {name}; see _common.tracing.traced_as"  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", TRANSFORMS, ids=place)
def test_transforms_are_made_of_public_names(file: Path) -> None:
    """As anybody's are: from the package and from `extend`; and of a State what is public. What is bound to torch's
    compilers and graphs has a list of its own."""
    known = {"functional_fsdp": fsdp.__all__, "functional_fsdp.extend": extend.__all__}
    known["functional_fsdp._seams"] = _seams.__all__
    for node in nodes(file):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("functional_fsdp")]
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= len(Path(place(file)).parts), f"line {node.lineno}: from outside of the folder"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("functional_fsdp"):
            assert {alias.name for alias in node.names} <= {*known.get(node.module or "", ())}, f"line {node.lineno}"
    assert not [(name, n.lineno) for name, n in attributes(file) if name in ("lineage", "executor", "_evolve")]


def names_used_of(module: str, files: list[Path]) -> set[str]:
    """Names that files import from a module, or take from it as `extend.change`."""
    short, found = module.rpartition(".")[2], set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and dotted(node.value) in (short, f"fsdp.{short}"):
            found.add(node.attr)
    return found


def test_what_transforms_are_made_of_is_used_and_is_no_more_than_one_can_hold() -> None:
    """Each name by a transform or an example here, those of the documents included."""
    code = [*re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)]
    in_docs = {name for block in code for name in re.findall(r"\bextend\.(\w+)", block)}
    used = names_used_of("functional_fsdp.extend", [*TRANSFORMS, *(ROOT / "examples").rglob("*.py")])
    assert not {*extend.__all__} - used - in_docs
    assert len(extend.__all__) <= 45
    assert "torch_private" not in extend.__all__
    assert not {*_seams.__all__} - names_used_of("functional_fsdp._seams", TRANSFORMS)
    assert not {*_seams.__all__} & {*extend.__all__}


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


def test_no_two_public_names_differ_in_case_only() -> None:
    names = [name for module in (fsdp, transforms, extend) for name in module.__all__]
    cases: dict[str, set[str]] = {}
    for name in names:
        cases.setdefault(name.lower(), set()).add(name)
    alike = {key: found for key, found in cases.items() if len(found) > 1}
    assert not alike


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


def test_steps_that_compile_nothing_load_no_compiler() -> None:
    """Its import is most of the time of a small model's first step."""
    code = """
import sys, torch, functional_fsdp as fsdp, functional_fsdp.transforms as T
blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout()) for _ in range(2)]
params, model = fsdp.functionalize(torch.nn.Sequential(*blocks))
buffers = fsdp.buffers(model)
state = fsdp.shard(params, fsdp.Spec(fsdp.local_mesh()), fsdp.adamw(lr=1e-3), buffers=buffers)
forward_backward = T.forward_backward(model, lambda model, x: model(x).square().mean())
for _ in range(2):
    state, loss = forward_backward(state, torch.ones(3, 4))
    state = fsdp.step(state)
assert loss > 0
print({"torch._dynamo", "torch._inductor", "sympy", "torch.onnx"} & {*sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
