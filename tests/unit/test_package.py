"""Rules for the source itself: no hooks, no `.grad`, arrows that point one way, and documented public names."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from support.source import ALL, CORE, ROOT, TRANSFORMS, found_in, nodes, place

import functional_fsdp as fsdp
from functional_fsdp import _seams, extend, transforms
from functional_fsdp._common.calls import _FUNCTIONS
from functional_fsdp._state.state import FIELDS

FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"}
FACTORIES |= {"randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


def tree(file: Path) -> ast.Module:
    return cast(ast.Module, nodes(file)[0])


def attributes(file: Path) -> Iterator[tuple[str, ast.Attribute]]:
    return ((node.attr, node) for node in nodes(file) if isinstance(node, ast.Attribute))


def test_no_file_registers_hooks() -> None:
    def hooks(file: Path) -> list[str]:
        return [name for name, _ in attributes(file) if name.startswith("register_") and name.endswith("hook")]

    assert not found_in(ALL, hooks)


def test_no_file_calls_backward() -> None:
    """`def backward` of an autograd Function is fine, `loss.backward()` is not."""

    def lines(file: Path) -> list[int]:
        calls = [node.func for node in nodes(file) if isinstance(node, ast.Call)]
        return [f.lineno for f in calls if isinstance(f, ast.Attribute) and f.attr == "backward"]

    assert not found_in(ALL, lines)


def test_no_file_assigns_grad() -> None:
    def lines(file: Path) -> list[int]:
        return [n.lineno for name, n in attributes(file) if name == "grad" and not isinstance(n.ctx, ast.Load)]

    assert not found_in(ALL, lines)


def test_every_file_says_where_its_tensors_are_made() -> None:
    """Whoever shards under `with torch.device("cuda"):` has moved torch's default, also for what is the host's."""

    def lines(file: Path) -> list[int]:
        calls = [n for n in nodes(file) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        made = [n for n in calls if n.func.attr in FACTORIES and ast.unparse(n.func.value) == "torch"]  # type: ignore[attr-defined]
        return [n.lineno for n in made if not any(word.arg == "device" for word in n.keywords)]

    assert not found_in(ALL, lines)


def test_every_file_says_what_it_is_for() -> None:
    assert not [place(file) for file in ALL if not ast.get_docstring(tree(file))]


def test_no_two_modules_of_tests_that_run_together_have_one_name() -> None:
    names = [path.name for path in ROOT.glob("tests/*/test_*.py") if path.parent.name != "gpu"]
    assert sorted(names) == sorted(set(names))  # workers import them by it


def test_states_are_given_fields_that_they_have() -> None:
    """`_evolve` is on the way of every verb, and does not look."""

    def lines(file: Path) -> list[int]:
        calls = [n for n in nodes(file) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        evolve = [node for node in calls if node.func.attr == "_evolve"]  # type: ignore[attr-defined]
        return [node.lineno for node in evolve if {word.arg for word in node.keywords if word.arg} - {*FIELDS}]

    assert not found_in(ALL, lines)


def test_a_field_that_a_state_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match=r"evolve: a State has no field 'token'. Its fields are main, weights, "):
        extend.evolve(None, token=None)  # type: ignore[arg-type]


def private(dotted: str) -> bool:
    """Whether a name of torch's is one that is not public."""
    first, *rest = dotted.split(".")
    return first in ("torch", "dist") and any(part.startswith("_") and not part.startswith("__") for part in rest)


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_names_of_torch_that_are_not_public_are_in_a_file_of_the_core_and_one_of_the_satellites() -> None:
    def names(file: Path) -> Iterator[str]:
        for node in nodes(file):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                yield dotted(node)

    others = [file for file in ALL if file.name != "torch_names.py"]
    said = "take them from _common.torch_names, or _shared.torch_names if the core does not need them"
    assert not found_in(others, lambda file: filter(private, names(file))), said


def test_a_private_name_is_seen() -> None:
    assert all(map(private, ["torch._C", "torch.utils._pytree", "dist._world", "torch.nn.utils.stateless._x"]))
    assert not any(map(private, ["torch.nn", "torch.__version__", "self._C", "functional_fsdp._common.torch_names"]))


def test_the_core_imports_no_transform_and_nothing_above_it() -> None:
    def lines(file: Path) -> Iterator[int]:
        for node in nodes(file):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                extends = "extend" in names and place(file) != "__init__.py"
                if extends or any("transforms" in name.split(".") for name in names):
                    yield node.lineno

    assert not found_in(CORE, lines)


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
    "_extend": {"_graph", "_metrics"},  # the same changes in a graph; sums over shards
    "_metrics": {"_graph"},  # the same numbers in a graph
    "_as_module": {"_export", "_nn"},
    "_nn": {"_axes", "_float8"},  # what a module's DTensors mean; linears that take float8
    "_export": {"_axes", "_nn"},  # leaves that are cut, joined; what a module adds to its state dict
    "_init": {"_axes", "_io", "_nn"},  # values that files have
    "_graph": set(),
    "_exact_sums": set(),
    "_one_source": set(),
    "_shared": set(),  # each other one may import it
    "_capture": {"_exact_sums", "_host_memory"},  # of which each piece updates its weights; cuts of buckets
    "_host_memory": set(),
    "_float8": set(),
    "_axes": set(),
    "_transports": set(),
    "_optim_extra": {"codecs"},  # one kernel that unpacks moments, changes and packs them
    "_redistribute": {"_axes", "_export"},  # what of a leaf a rank has; whole leaves
    "_io": {"_axes", "_export", "_optim_extra", "_redistribute"},  # what checkpoints say of an optimizer, and of leaves
    "_simulate": {"_io"},  # a save that goes on beside the training
    "_launch": {"_io", "_simulate"},
    "codecs": {"_nn"},  # what is no module is refused
    "look": {"_extend", "_host_memory"},  # shards, and gradients by unit; what a step moves
    "_predict": {"look", "_graph", "_nn"},  # what draws; states of shapes; modules
    "convert": {"_init", "_io", "_launch"},
}


def test_satellites_import_each_other_only_where_the_table_says_so() -> None:
    there = {module_of(file) for file in CORE} - {()}
    found: dict[str, set[str]] = {room: set() for room in SATELLITES}
    for file in CORE:
        room = module_of(file)[:1]
        if room and room[0] in SATELLITES:
            found[room[0]] |= {other[0] for other in imports_of(file, there)} & {*SATELLITES} - {room[0], "_shared"}
    assert found == SATELLITES


def test_what_the_core_calls_by_name_a_satellite_has_and_nothing_else() -> None:
    called = {name for file in CORE for name in re.findall(r'provided\("([\w.]+)"\)', file.read_text())}
    assert called == {*_FUNCTIONS}
    assert {place(file).split("/")[0] for file in CORE if "provided(" in file.read_text()} & {*SATELLITES} == set()


def test_a_folder_says_its_purpose_in_a_line() -> None:
    lines = {
        place(file): (ast.get_docstring(tree(file)) or "").split("\n")[0] for file in ALL if file.name == "__init__.py"
    }
    assert not {folder: line for folder, line in lines.items() if not line.endswith((".", ","))}


OF_TRANSPORTS = {"copy_engine", "peer_memory", "signals", "symmetric"}


def of_a_transport(file: Path) -> bool:
    return file in CORE and place(file).startswith("_transports/")


def test_nobody_asks_which_transport_it_is() -> None:
    """Nobody compares a transport's name, or imports what belongs to one."""

    def lines(file: Path) -> Iterator[int]:
        for node in nodes(file):
            if isinstance(node, ast.Compare):
                said = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                if any(name in ("symmetric", "copy_engine") for name in said):
                    yield node.lineno
            elif isinstance(node, ast.ImportFrom) and node.level and OF_TRANSPORTS & {*(node.module or "").split(".")}:
                yield node.lineno

    assert not found_in([file for file in ALL if not of_a_transport(file)], lines)


#: each of these is about CUDA: lanes that are streams, the device, memory that GPUs share, processes that are given a
#: GPU, and graphs
CUDA = {
    "_runtime/stream_lanes.py", "_host_memory.py", "_common/device.py", "_shared/device.py",
    "_transports/auto.py", "_transports/peer_memory.py", "_launch/launch.py",
    "_launch/workers.py",
    "_cuda_graph/graphed.py", "_cuda_graph/capturing.py", "_cuda_graph/host_traffic.py",
}  # fmt: skip


def questions_about_cuda(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines that ask whether there is CUDA, or do something with it: `.is_cuda`, `.cuda`, `torch.cuda`, "cuda"
    and "cpu" compared or looked up, and "cuda" passed on."""
    found = []
    for node in nodes:
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


def test_nobody_asks_whether_there_is_cuda() -> None:
    """But those that are listed, each of which does: else it comes off the list."""
    assert {*found_in(ALL, lambda file: questions_about_cuda(nodes(file)))} == CUDA, (
        "ask run.lanes, _common.device or _shared.device what you want to know"
    )


def test_a_question_about_cuda_is_seen() -> None:
    asked = ["x.is_cuda", "run.cuda", "torch.cuda.synchronize()", "device.type == 'cuda'", "device.type != 'cpu'",
             "x in ('cuda', 'meta')", "import torch.cuda", "from torch import cuda", "x.is_cpu", "x.cuda()",
             "{'cuda': 1}.get(kind)", "torch.device('cuda')"]  # fmt: skip
    assert all(questions_about_cuda(ast.walk(ast.parse(line))) for line in asked)
    others = ["x = 'cuda_graph'", "from .cuda_graph import cuda_graph", "local_mesh('cpu')", "device.type == 'meta'"]
    assert not [line for line in others if questions_about_cuda(ast.walk(ast.parse(line)))]


#: who may ask whether a graph is being made: the places that choose, and those that ask it of code without a State
ASK = {
    "_common/calls.py",  # says so, and chooses: `traced_as`, `verb` and `alone`
    "_nn/module.py",  # a call of a bound module, which Dynamo follows by torch.func's way only
    "_drive/driver.py",  # which of torch's own tools traces a driven step, that is refused
    "_compile/compile_units.py",  # compiled code, which asks whether it is compiled, or runs as Python
}
QUESTIONS = {"tracing", "LOWERING", "is_compiling", "is_dynamo_compiling"}


def test_nobody_asks_whether_a_graph_is_made() -> None:
    """What is done in another way in a graph is a function of its own, which `verb`, `alone` or `traced_as` chooses."""

    def names(file: Path) -> set[str]:
        named = [getattr(node, "id", None) or getattr(node, "attr", "") for node in nodes(file)]
        return QUESTIONS & {*named}

    assert not found_in([file for file in ALL if place(file) not in ASK], names), "see _common.calls.traced_as"


def test_transforms_are_made_of_public_names() -> None:
    """As anybody's are: from the package and from `extend`; and of a State what is public. What is bound to torch's
    compilers and graphs has a list of its own."""
    known = {"functional_fsdp": fsdp.__all__, "functional_fsdp.extend": extend.__all__}
    known["functional_fsdp._seams"] = _seams.__all__

    def lines(file: Path) -> Iterator[int]:
        for node in nodes(file):
            if isinstance(node, ast.Import):
                bad = any(alias.name.startswith("functional_fsdp") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level:
                bad = node.level > len(Path(place(file)).parts)  # from outside of the folder
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("functional_fsdp"):
                bad = not {alias.name for alias in node.names} <= {*known.get(node.module or "", ())}
            else:
                bad = isinstance(node, ast.Attribute) and node.attr in ("lineage", "executor", "_evolve")
            if bad:
                yield node.lineno  # type: ignore[attr-defined]

    assert not found_in(TRANSFORMS, lines)


def names_used_of(module: str, files: list[Path]) -> set[str]:
    """Names that files import from a module, or take from it as `extend.change`."""
    short, found = module.rpartition(".")[2], set()
    for node in (node for file in files for node in nodes(file)):
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
    for file in ALL:
        names = [n.module for n in nodes(file) if isinstance(n, ast.ImportFrom) and not n.level]
        assert "transforms" not in names


def layout_hash() -> str:
    tree = {"a": {"w": torch.empty(3, 5), "b": torch.empty(7)}, "c": torch.empty(9)}
    return fsdp.make_layout(tree, fsdp.Spec({"data": 4}, labels={"a.b": "bias"})).hash


def test_imports_and_steps_that_compile_nothing_load_no_compiler_and_hashes_are_those_of_any_process() -> None:
    """Its import takes longer than all others, and than a small model's first step."""
    code = """
import sys, torch, functional_fsdp as fsdp, functional_fsdp.transforms as T
print({"torch._dynamo", "torch._inductor"} & {*sys.modules})
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
    code += inspect.getsource(layout_hash) + "print(layout_hash())"
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=env)
    assert done.stdout.split() == ["set()", "set()", layout_hash()]


def test_every_test_that_is_run_by_hand_has_its_fixtures() -> None:
    """Of tests/gpu, some of whose files are called as others here."""
    settings = ["-q", "-n0", "-p", "no:cacheprovider", "--import-mode=importlib", "--setup-plan"]
    assert pytest.main([*settings, str(ROOT / "tests" / "gpu")]) == 0
