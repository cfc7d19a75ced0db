"""Wheel and sdist: the same bytes from the same sources, nothing but what belongs in them, and a wheel that works."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import treetrain as tt

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".jinja", ".json", ".css", ".typed", ".gz"}
TOP_OF_SDIST = {
    "src", "tests", "docs", "examples", "benchmarks", "mkdocs.yml", "Makefile", "hatch_build.py", "README.md",
    "BENCHMARKS.md",
    "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CITATION.cff", "LICENSE", "pyproject.toml",
    "PKG-INFO", ".gitignore",
}  # fmt: skip
STRAYS = ("src/treetrain/__pycache__/x.cpython-311.pyc", "runs/secret.jsonl", "notes.txt", ".venv/bin/python")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("build") is None or importlib.util.find_spec("hatchling") is None,
        reason="the packages build and hatchling are not installed (extra dev)",
    ),
]


def copy_of_the_sources(folder: Path, *, modified: int, mask: int) -> Path:
    """A copy whose files have another age and other permissions, with strays that a working folder collects."""
    ignore = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".pytest_cache", ".ruff_cache", "dist", "site")
    shutil.copytree(ROOT, folder, ignore=ignore, symlinks=True)
    for name in STRAYS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("stray")
    for path in folder.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (modified, modified))
            path.chmod(path.stat().st_mode & ~mask)
    return folder


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> list[tuple[Path, Path]]:
    """Two builds of copies that differ in all that a build must not depend on."""
    folder = tmp_path_factory.mktemp("builds")
    copies = (("a", 1_600_000_000, 0), ("b", 1_690_000_000, 0o077))
    return [build(copy_of_the_sources(folder / name, modified=age, mask=mask)) for name, age, mask in copies]


def test_two_builds_of_the_same_sources_are_equal_bit_for_bit(builds):
    for one, other in zip(*builds):
        assert one.name == other.name and one.read_bytes() == other.read_bytes()


def test_the_wheel_holds_the_package_and_its_metadata_alone(builds):
    _, wheel = builds[0]
    info = f"treetrain-{tt.__version__}.dist-info"
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/treetrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == expected
        of_package = {Path(name).suffix for name in archive.namelist() if name.startswith("treetrain/")}
        metadata = archive.read(f"{info}/METADATA").decode()
    assert of_package - {""} <= SUFFIXES
    assert wheel.name == f"treetrain-{tt.__version__}-py3-none-any.whl" and wheel.stat().st_size < 2**20
    assert "Description-Content-Type: text/markdown" in metadata and "arxiv.org/abs/2511.00413" in metadata
    assert not re.search(r"\]\((?!https?:)", metadata), "the package index has no files beside the text"
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata


def test_the_sdist_holds_the_sources_tests_and_docs_and_no_strays(builds):
    sdist, _ = builds[0]
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    assert {name.split("/")[0] for name in names} == TOP_OF_SDIST
    assert not set(STRAYS) & set(names)
    assert "docs/design.md" in names and "tests/release/test_packages.py" in names
    assert sdist.stat().st_size < 4 * 2**20


def test_the_wheel_alone_runs_the_commands_in_an_empty_environment(builds, tmp_path):
    """The environment has treetrain from the wheel only; packages it depends on are read from this environment."""
    pytest.importorskip("torch")
    _, wheel = builds[0]
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    (own,) = (tmp_path / "env/lib").glob("python3*/site-packages")
    # A folder named in a .pth file is searched, but its own .pth files (an editable treetrain) are not read.
    (own / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        given = [str(tmp_path / "env/bin" / command[0]), *command[1:]]
        done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(own) in run("python", "-c", "import treetrain; print(treetrain.__file__)")
    data = str(tmp_path / "treetrain-demo/games.jsonl.gz")
    assert "they lie on each other" in run("treetrain", "demo", "--steps", "3")
    assert "unique" in run("treetrain", "inspect", data, "--model", "tiny")
    assert "exact" in run("treetrain", "verify", data, "--model", "tiny", "--sample", "4")
    assert tt.__version__ in run("treetrain", "doctor")
