"""The README and the docs are right: their code runs, their commands parse, their links and names exist."""

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")]
COMMANDS_SHOWN = {"demo", "inspect", "verify", "bench", "train", "page", "simulate", "doctor"}
TORCHRUN = re.compile(r"torchrun (?:--[a-z-]+ \d+ )*-m ")
"""The prefix that starts a command on several processes."""


def blocks(page: Path, language: str, mark: str = "") -> list[str]:
    """The fenced blocks of a language, those right after a mark if one is given."""
    return re.findall(rf"{mark}^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def runnable(page: Path) -> list[str]:
    """Blocks that say `<!-- runnable -->` on the line before."""
    return blocks(page, "python", "^<!-- runnable -->\n")


@pytest.fixture
def names(monkeypatch):
    """Names that the pages take for granted: a model, its tokenizer and optimiser, a few rows, a padded batch."""
    torch = pytest.importorskip("torch")
    import treetrain as tt
    from treetrain.models.loading import load_model, load_tokenizer

    monkeypatch.chdir(ROOT)
    model = load_model("tiny")
    attention_mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    return {
        "torch": torch,
        "tt": tt,
        "model": model,
        "tokenizer": load_tokenizer("tiny"),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "sequences": [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 11, 12, 13, 14]],
        "advantages": [1.0, -0.5, 0.25],
        "input_ids": torch.tensor([[5, 6, 7, 8, 0], [5, 6, 9, 10, 11]]),
        "attention_mask": attention_mask,
        "response_mask": attention_mask * torch.tensor([0, 0, 1, 1, 1]),
    }


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if runnable(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, names):
    for number, code in enumerate(runnable(page)):
        exec(compile(code, f"{page.name}, block {number}", "exec"), names)


def test_the_readme_runs_as_it_stands_and_prints_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = runnable(ROOT / "README.md")
    exec(compile(code, "README.md", "exec"), {})
    assert [f"# {line}" for line in capsys.readouterr().out.splitlines()] == re.findall(r"^# .*$", code, re.MULTILINE)


@pytest.mark.slow
def test_the_trainer_of_the_readme_runs_as_it_stands_and_shares(tmp_path):
    for needed in ("trl", "datasets"):
        pytest.importorskip(needed)
    code, _ = blocks(ROOT / "README.md", "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "share_prefixes: in the first 3 steps" in done.stdout


def test_the_readme_fits_on_three_screens():
    assert (
        len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    )  # what headline.py writes is thirteen of them


def test_the_readme_gives_the_gradients_of_row_by_row(names):
    setup, _, after = runnable(ROOT / "README.md")[0].rpartition("\n\n")
    before = runnable(ROOT / "docs" / "loops.md")[0]
    exec(setup, names)
    gradients = []
    for code in (before, after):
        names["model"].zero_grad()
        exec(code, names)
        gradients.append([parameter.grad.clone() for parameter in names["model"].parameters()])
    error = sum(float((a - b).square().sum()) for a, b in zip(*gradients)) ** 0.5
    assert sum(float(a.square().sum()) for a in gradients[0]) > 0
    assert error <= 1e-5 * sum(float(a.square().sum()) for a in gradients[0]) ** 0.5


COMMANDS = [
    (page.name, TORCHRUN.sub("", line.split("#")[0].strip()))
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if TORCHRUN.sub("", line).startswith("treetrain ")
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_a_command_line_of_a_page_is_accepted(page, line, monkeypatch):
    command, *arguments = shlex.split(line)[1:]
    module = importlib.import_module(f"treetrain.cli.{command}")
    if command == "train":
        monkeypatch.chdir(ROOT)
        module.parse_arguments(arguments)
    else:
        module.make_parser().parse_args(arguments)


def test_every_command_is_shown_in_the_readme_and_in_the_docs():
    for name in ("README.md", "cli.md"):
        assert {shlex.split(line)[1] for page, line in COMMANDS if page == name} == COMMANDS_SHOWN


def test_every_flag_that_a_page_names_exists():
    fields = {"help", "version", "output"}  # the last is that of the examples
    fields |= {"shutdown-timeout", "config_file", "num_processes", "accelerate_config", "no-deps"}  # other tools
    fields |= {"nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "max-restarts"}  # torchrun's
    scripts = [ROOT / "benchmarks" / "quarter_hour.py", ROOT / "benchmarks" / "gpu_training.py"]
    for script in [*scripts, *(ROOT / "examples").glob("*.py")]:
        fields |= set(re.findall(r'add_argument\("--([a-z_-]+)"', script.read_text(encoding="utf-8")))
    for command in COMMANDS_SHOWN:
        for action in importlib.import_module(f"treetrain.cli.{command}").make_parser()._actions:
            fields |= {option.removeprefix("--") for option in action.option_strings}
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            own = TORCHRUN.sub("", re.sub(r"<!--.*?-->", "", line))
            named = set(re.findall(r"(?<![\w-])--([a-z][a-z_-]*)", own))
            assert named <= fields, f"{page.name}: {named - fields} in {line!r}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeats = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
        found.add(f"{name}-{repeats}" if repeats else name)
    return found


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_every_make_target_that_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z][a-z-]+)\b(?! it| of)", "\n".join(blocks(ROOT / "README.md", "bash"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_folder_of_the_readmes_tree_exists():
    (tree,) = (block for block in blocks(ROOT / "README.md", "text") if block.startswith("src/treetrain/"))
    top = Path()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            top = ROOT / name
        path = top / name if line.startswith(" ") else top
        assert path.exists(), f"{path} is in the README's tree and not in the repository"


def test_every_file_that_the_docs_name_exists():
    for page in PAGES:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|csv))`", page.read_text(encoding="utf-8")):
            assert any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "treetrain")), (
                f"{page.name}: {name}"
            )


def page_script():
    """benchmarks/page.py as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_page", ROOT / "benchmarks" / "page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_benchmarks_is_what_the_rows_say():
    script = page_script()
    for page, text in ((script.PAGE, script.generated(script.RESULTS)), (script.README, script.readme(script.RESULTS))):
        assert page.read_text(encoding="utf-8") == text, "run python benchmarks/page.py"


def test_the_headlines_table_stands_in_the_readme_with_its_machine_and_commit(tmp_path):
    script = page_script()
    row = {
        "work": "search trees",
        "machine": "a machine",
        "date": "2026-01-01",
        "commit": "0123abc",
        "rows": "5",
        "merged_rows": "4",
        "flat_tokens": "3000",
        "merged_tokens": "2500",
        "unique_tokens": "1000",
        "baseline": "packed",
        "linear_seconds": "2.4",
        "seconds": "1.0",
        "rounds": "5",
        "speedup": "2.4",
        "speedup_min": "2.3",
        "speedup_max": "2.45",
        "ideal": "2.5",
        "efficiency": "0.96",
        "each_row_speedup": "2.9",
    }
    (tmp_path / "headline.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n", encoding="utf-8")
    before, rest = script.readme(tmp_path).split("<!-- headline.py -->")
    inside, after = rest.split("<!-- end of headline.py -->")
    line = "| search trees | 3,000, 2,500, 1,000 | 2.40 (2.30 to 2.45) | 2.50 | 2.90 | 5 |"
    assert line in inside and "a machine; 2026-01-01; commit 0123abc" in inside
    said = " ".join(inside.split())
    assert "(3,000 tokens in rows, 1,000 in the tree)" in said and "is **2.4 times** as fast" in said
    assert "0.96 of what the FLOPs allow" in said
    assert before.startswith("# treetrain") and "## Install" in after


FAMILIES = (
    "date,machine,commit,model,rows,merged_rows,flat_tokens,merged_tokens,unique_tokens,ideal,linear_seconds,seconds,"
    "rounds,speedup,speedup_min,speedup_max,efficiency,each_row_speedup\n"
)


def test_a_page_shows_the_last_row_of_a_case_and_leaves_out_what_has_no_rows(tmp_path):
    script = page_script()
    (tmp_path / "families.csv").write_text(
        f"{FAMILIES}"
        "2026-01-01,a,0123abc,one,9,8,30000,28000,9000,3.3,9,9,5,1.0,1.0,1.0,0.30,1.1\n"
        "2026-01-03,b,0123abd,one,9,8,30000,28000,9000,3.3,9.6,3,5,3.2,3.1,3.3,0.97,3.4\n"
        "2026-01-02,b,0123abe,two,9,8,30000,,,,,,,2.5,,,0,\n",
        encoding="utf-8",
    )
    page = script.generated(tmp_path)
    assert "**0.97**" in page and "0.30" not in page
    assert "| two | 9, 8 | 30,000, –, – | – → – | 2.50 | – | **0** | – | – |" in page
    assert "b; 2026-01-02 to 2026-01-03; commits 0123abd, 0123abe" in page
    assert page.count("## ") == 2, "and the section on GPUs"
    assert "An efficiency above 1 comes from" not in page


def test_an_efficiency_above_one_is_explained_below_its_table(tmp_path):
    script = page_script()
    (tmp_path / "families.csv").write_text(
        f"{FAMILIES}2026-01-01,a,0123abc,one,9,8,30000,28000,9000,3.3,9,9,5,3.5,3.4,3.6,1.06,3.9\n", encoding="utf-8"
    )
    assert "An efficiency above 1 comes from passes" in script.generated(tmp_path)
