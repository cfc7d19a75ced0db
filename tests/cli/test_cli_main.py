"""The entry point: help at once, errors in one line."""

import os
import subprocess
import sys

import pytest

import treetrain as package
from treetrain.cli import COMMANDS, main

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "matplotlib")
OWN = [command for command in COMMANDS if command != "train"]
"""Commands whose options are dataclasses of ours; train has the arguments of transformers."""
WITHOUT_HEAVY = f"""
import sys
from treetrain.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code or 0
print("HEAVY", [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], *[[command, "--help"] for command in OWN]])
def test_help_imports_neither_torch_nor_transformers_nor_numpy(argv) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HEAVY, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr and done.stdout


@pytest.mark.parametrize("command", OWN)
def test_the_help_of_a_command_has_examples_and_a_sentence_for_every_option(treetrain, command) -> None:
    answer = treetrain(command, "--help")
    assert answer.code == 0 and f"treetrain {command} " in answer.out.split("examples:")[1]
    lines = [line.strip("│ ").strip() for line in answer.out.splitlines()]
    flags = [line for line in lines if line.startswith("--") and line.strip("-")]
    assert len(flags) >= 3
    for at, line in enumerate(lines):
        if line in flags:
            described = (line.split("  ")[-1] if "  " in line else lines[at + 1]).strip()
            assert described and described[0].isalpha(), line


def test_the_overview_names_every_command(treetrain) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        answer = treetrain(*argv)
        assert answer.code == 0 and all(f"  {command}" in answer.out for command in COMMANDS)


def test_the_version_is_printed(treetrain) -> None:
    assert treetrain("--version").out == f"treetrain {package.__version__}\n"


def test_python_m_treetrain_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "treetrain", "inspekt"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr
        == "treetrain: error: unknown command 'inspekt'; there are inspect, verify, bench, train, simulate, models\n"
    )


@pytest.mark.parametrize("command", OWN)
def test_an_unknown_flag_is_an_error_of_one_line(treetrain, command) -> None:
    files = [] if command == "models" else ["rows.jsonl"]
    error = treetrain(command, *files, "--model", "tiny", "--frobnicate", "3").error
    expected = f"Unrecognized options: --frobnicate, 3; treetrain {command} --help lists what there is"
    assert error == f"treetrain: error: {expected}"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_the_line_is_the_same_whatever_the_terminal_can_draw(encoding) -> None:
    argv = [sys.executable, "-m", "treetrain", "inspect", "a", "--groups", "x"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "treetrain: error: Error parsing --groups: invalid literal for int() with base 10: 'x'; "
        "treetrain inspect --help lists what there is\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect"], "no file given"),
        (["inspect", "a", "--groups", "many"], "--groups"),
        (["inspect", "a", "--groups", "-1"], "--groups is -1"),
        (["inspect", "a", "--view", "turns"], "--view"),
        (["inspect", "a", "--shape", "gpt-9"], "no model shape is named 'gpt-9'"),
        (["verify", "a"], "--model"),
        (["verify", "a", "--model", "tiny", "--sample", "-1"], "--sample is -1"),
        (["bench", "a", "--model", "tiny", "--repeats", "0"], "--repeats is 0"),
        (["bench", "a", "--model", "tiny", "--threads", "0"], "--threads is 0"),
        (["train", "--model", "tiny"], "no data file given"),
    ],
)
def test_a_bad_value_is_an_error_of_one_line_that_names_it(treetrain, argv, message) -> None:
    assert message in treetrain(*argv).error


def test_ctrl_c_says_what_was_done_and_exits_with_130(monkeypatch, capsys) -> None:
    def stop(argv):
        raise KeyboardInterrupt("interrupted after step 3 of 9")

    monkeypatch.setattr("treetrain.cli.inspect.run", stop)
    assert main(["inspect"]) == 130
    assert capsys.readouterr().err == "treetrain: interrupted after step 3 of 9\n"


def test_a_missing_package_is_named_with_the_cure(monkeypatch, capsys) -> None:
    def missing(argv):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("treetrain.cli.train.run", missing)
    assert main(["train"]) == 2
    assert "No module named 'torch'" in (error := capsys.readouterr().err) and "treetrain[train]" in error


def test_a_traceback_can_be_had(monkeypatch) -> None:
    monkeypatch.setenv("TREETRAIN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown command"):
        main(["nothing"])


def test_our_own_mistakes_are_not_dressed_up_as_the_user_s(monkeypatch) -> None:
    def wrong(argv):
        raise AssertionError("ours")

    monkeypatch.setattr("treetrain.cli.inspect.run", wrong)
    with pytest.raises(AssertionError):
        main(["inspect"])
