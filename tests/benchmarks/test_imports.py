"""What a benchmark imports of the package is there; most of them run for minutes, and no test runs them."""

import ast
from pathlib import Path

import pytest

import treetrain as tt

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def source_of(module: str) -> Path:
    path = ROOT.joinpath("src", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def names_in(path: Path) -> set[str]:
    """All names that a file gives to something, read without importing it: some need a package that is not here."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_names_that_a_benchmark_imports_are_there(script):
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "treetrain":
            path = source_of(node.module)
            there = names_in(path) | (set(tt.__all__) if node.module == "treetrain" else set())
            missing = {name.name for name in node.names} - there
            assert not [name for name in missing if not source_of(f"{node.module}.{name}").exists()], ast.unparse(node)
