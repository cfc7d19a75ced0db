"""The shape of the package: which layer may import which, and how large its files and functions may be."""

import ast
import copy
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "treetrain"
LAYERS = (
    "cli",
    "integrations",
    "trainers",
    "testing",
    "check",
    "simulation",
    "own_model",
    "autograd",
    "engine",
    "adapters",
    "distill",
    "registry",
    "check.first_use",
    "check.kept_activations",
    "check.stock",
    "check.row_scores",
    "losses",
    "logs",
    "models",
    "layers",
    "parallel",
    "shapes",
    "explain",
    "kernels",
    "core.engine",
    "core.losses",
    "core.head",
    "core.hf",
    "core.attention",
    "core.planning",
    "core.tree",
    "core.device_arrays",
    "core.errors",
    "core",
)
"""From the top down; a layer may import itself and what stands after it. A file belongs to the longest name."""
WITHOUT_TORCH = ("simulation", "logs", "core.planning", "core.tree", "core.errors")
FILES = sorted(path for path in SOURCE.rglob("*.py"))
TESTS = sorted(Path(__file__).parent.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def module_name(path: Path) -> str:
    """treetrain.core.engine.score for .../engine/score.py, treetrain.engine for .../engine/__init__.py."""
    parts = ["treetrain", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def layer(module: str) -> str | None:
    """The layer of a module of ours; None for the top package, which only points at layers lazily."""
    first, *parts = module.split(".")
    if first != "treetrain" or not parts:
        return None
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in LAYERS), parts[0])


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


CORE = [path for path in FILES if module_name(path).startswith("treetrain.core")]
MOST_LINES, MOST_FILES = 11_000, 50
"""A stranger should read the core in a day."""


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_core_imports_nothing_outside_itself_deferred_or_for_types_neither(path):
    outside = {name for name in imports(path) if layer(name) and not name.startswith("treetrain.core")}
    assert not outside, f"{path.name} reaches over the wall of the core: {', '.join(sorted(outside))}"


def test_the_core_can_be_read_in_a_day():
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in CORE)
    assert lines <= MOST_LINES and len(CORE) <= MOST_FILES, f"{lines} lines in {len(CORE)} files"


def test_losses_know_of_the_core_the_protocol_and_the_rows_alone():
    allowed = {"losses", "core.losses", "core.device_arrays", "core.tree", "core.errors", None}
    for path in FILES:
        if layer(module_name(path)) == "losses":
            assert {layer(name) for name in imports(path) - {"treetrain.core.losses.facts"}} <= allowed, path


READ_FIRST = ("executor", "score", "loss_gradients", "model_passes", "extension", "memory")
OPTIONS = re.compile(
    r"router|recurren|state_?cache|context.?parallel|tensor.?parallel|expert.?parallel|fsdp|shard|mixture|image"
)


@pytest.mark.parametrize("name", READ_FIRST)
def test_the_engine_does_not_name_its_options(name):
    code = ast.unparse(without_texts(TREES[SOURCE / "core" / "engine" / f"{name}.py"])).lower()
    assert not OPTIONS.search(code), f"{name} names {OPTIONS.search(code)}"


def without_texts(tree: ast.AST) -> ast.AST:
    """A copy of a module without its docstrings and messages, which may explain what an option needs."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return tree


@pytest.mark.parametrize("path", [p for p in FILES if layer(module_name(p)) in WITHOUT_TORCH], ids=lambda p: p.name)
def test_logs_planning_and_trees_never_import_torch(path):
    names = {name.split(".")[0] for name in imports(path)}
    assert not names & {"torch", "transformers", "peft"}


def test_the_simulator_builds_on_planning_and_nothing_runs_through_it_but_the_command():
    for path in FILES:
        own, named = layer(module_name(path)), {layer(name) for name in imports(path)}
        if own == "simulation":
            assert named <= {None, "simulation", "parallel", "core.planning", "core.tree", "core.errors"}, path
        elif "simulation" in named:
            assert path.relative_to(SOURCE).as_posix() == "cli/simulate.py", path


def test_attention_knows_no_plans():
    for path in FILES:
        if layer(module_name(path)) in ("core.attention", "kernels"):
            runs_plans = module_name(path) == "treetrain.kernels.compiled"
            assert runs_plans or "core.planning" not in map(layer, imports(path)), path


def test_the_fast_paths_never_import_the_specification():
    for path in FILES:
        if path.name not in (
            "reference.py",
            "self_check.py",
            "attention_check.py",
        ):  # a backend's check runs once, beside the fast path
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


DOCS = SOURCE.parents[1] / "docs"


@pytest.mark.parametrize("page", ["design.md", "core.md", "contributing.md"])
def test_files_that_a_page_names_exist(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py|[a-z_]+\.py)`", text)}
    missing = [name for name in named if not any(path.as_posix().endswith(f"/{name}") for path in (*FILES, *TESTS))]
    assert named and not missing, f"docs/{page} names {', '.join(missing)}"


def test_the_page_on_the_core_names_every_file_and_the_design_every_room():
    core, design = ((DOCS / page).read_text(encoding="utf-8") for page in ("core.md", "design.md"))
    for path in CORE:
        name = path.relative_to(SOURCE).as_posix()
        assert path.name == "__init__.py" or f"`{name}`" in core, f"docs/core.md lacks {name}"
    for room in sorted(path for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert f"| `{room.name}/` |" in design, f"docs/design.md lacks the room {room.name}"
