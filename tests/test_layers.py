"""The shape of the package: which layer may import which, and how large its files and functions may be."""

import ast
import copy
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "treetrain"
LAYERS = (
    "cli",
    "simulation",
    "integrations",
    "trainers",
    "testing",
    "verification",
    "losses",
    "engine",
    "models",
    "linear_attention",
    "softmax_attention",
    "kernel_checks",
    "device_arrays",
    "inspection",
    "planning",
    "tree",
    "data",
    "errors",
)
"""From the top down; a layer may import itself and what stands after it."""
WITHOUT_TORCH = ("simulation", "inspection", "planning", "tree", "data", "errors")
FILES = sorted(path for path in SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    """treetrain.core.engine.score for .../engine/score.py, treetrain.engine for .../engine/__init__.py."""
    parts = ["treetrain", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def layer(module: str) -> str | None:
    """The layer of a module of ours; None for the top package, which only points at layers lazily."""
    parts = module.split(".")
    return parts[1] if parts[0] == "treetrain" and len(parts) > 1 else None


def is_type_checking(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, whose body never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path, *, typing_too: bool = True, deferred_too: bool = True) -> set[str]:
    """Full names of the modules that a file imports, those inside functions included unless told otherwise."""
    found: set[str] = set()
    pending: list[ast.AST] = [TREES[path]]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative imports are not used here"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                # From the front page only the version may be taken: its other names point up.
                named = inner in MODULES or (node.module == "treetrain" and alias.name != "__version__")
                found.add(inner if named else str(node.module))
        skipped = (is_type_checking(node) and not typing_too) or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not deferred_too
        )
        pending += (
            node.orelse if skipped and isinstance(node, ast.If) else [] if skipped else ast.iter_child_nodes(node)
        )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_its_own_layer_and_those_below(path):
    own = layer(module_name(path))
    if own in (None, "__main__"):
        return  # the package's front and `python -m treetrain` belong to no layer
    assert own in LAYERS, f"{own} is no layer of DESIGN; add it to the list in its place"
    for name in imports(path):
        other = layer(name)
        allowed = LAYERS[LAYERS.index(own) :]
        assert other is None or other in allowed, f"{path.name} ({own}) imports {name}, which is above it"


PROTOCOL = {"treetrain.core.losses", "treetrain.core.engine.facts"}


def test_the_engine_knows_no_losses_and_losses_only_its_protocol():
    for path in FILES:
        own, named = layer(module_name(path)), imports(path)
        assert not (own == "engine" and "losses" in map(layer, named))
        if own == "losses":
            assert {layer(name) for name in named - PROTOCOL} <= {
                None, "losses", "device_arrays", "data", "errors"
            }, path  # fmt: skip


CORE = ("executor", "score", "loss_gradients", "model_passes", "own_model", "extension", "lm_head", "memory")
OPTIONS = re.compile(
    r"router|recurren|state_?cache|context.?parallel|tensor.?parallel|expert.?parallel|fsdp|shard|mixture|image"
)


@pytest.mark.parametrize("name", CORE)
def test_the_core_neither_imports_nor_names_its_options(name):
    path = SOURCE / "engine" / f"{name}.py"
    assert not {found for found in imports(path) if found.startswith("treetrain.engine.extensions")}
    code = ast.unparse(without_texts(TREES[path])).lower()
    assert not OPTIONS.search(code), f"{name} names {OPTIONS.search(code)}"


def without_texts(tree: ast.AST) -> ast.AST:
    """A copy of a module without its docstrings and messages, which may explain what an option needs."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return tree


@pytest.mark.parametrize("path", [p for p in FILES if layer(module_name(p)) in WITHOUT_TORCH], ids=lambda p: p.name)
def test_inspection_planning_trees_and_data_never_import_torch(path):
    names = {name.split(".")[0] for name in imports(path)}
    assert not names & {"torch", "transformers", "peft"}


def test_the_simulator_builds_on_planning_and_nothing_runs_through_it_but_the_command():
    for path in FILES:
        own, named = layer(module_name(path)), {layer(name) for name in imports(path)}
        if own == "simulation":
            assert named <= {None, "simulation", "planning", "tree", "data", "errors"}, path
        elif "simulation" in named:
            assert path.relative_to(SOURCE).as_posix() == "cli/simulate.py", path


def test_attention_knows_no_plans():
    for path in FILES:
        if layer(module_name(path)) in ("linear_attention", "softmax_attention"):
            assert "planning" not in map(layer, imports(path)), path


def test_the_fast_paths_never_import_the_specification():
    for path in FILES:
        if path.name not in ("reference.py", "self_check.py"):  # a backend's check runs once, beside the fast path
            assert not {"treetrain.core.attention.reference", "treetrain.layers.recurrence.reference"} & imports(
                path
            ), path


def test_there_are_no_import_cycles_for_types_and_inside_functions_neither():
    # Packages' __init__ run before their modules, so they are nodes like any other; but for the front page, which
    # names everything lazily.
    graph = {name: imports(path) & set(MODULES) - {"treetrain", name} for name, path in MODULES.items()}
    done: set[str] = set()
    for start in graph:
        trail: list[str] = []
        pending = [(start, False)]
        while pending:
            name, leaving = pending.pop()
            if leaving:
                done.add(trail.pop())
                continue
            assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
            if name in done:
                continue
            trail.append(name)
            pending.append((name, True))
            pending += [(other, False) for other in sorted(graph[name])]


def test_no_module_imports_its_own_package():
    for path in FILES:
        name = module_name(path)
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        if path.name != "__init__.py" and package != "treetrain":
            assert package not in imports(path, typing_too=False), f"{path} imports its own __init__"
