"""Examples are what users copy: they take from the package what is public, and nothing else."""

import ast
from pathlib import Path

import pytest

import treetrain as tt

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_imports_the_package_and_uses_its_public_names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module == "treetrain" or not str(node.module).startswith("treetrain."), ast.unparse(node)
        if isinstance(node, ast.Import):
            assert all(name.name == "treetrain" or not name.name.startswith("treetrain.") for name in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tt":
            assert node.attr in tt.__all__, f"tt.{node.attr}"
