"""The entry point: help at once, errors in one line."""

import importlib
import subprocess
import sys

import pytest

import treetrain as package
from treetrain.cli import COMMANDS, main

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "matplotlib")
OWN = [command for command in COMMANDS if command != "train"]
"""Commands whose options are ours alone; train has the arguments of transformers too."""
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
def test_the_help_of_a_command_has_a_sentence_for_every_option(treetrain, command) -> None:
    assert treetrain(command, "--help").code == 0
    actions = importlib.import_module(f"treetrain.cli.{command}").make_parser()._actions
    assert len(actions) >= 3 and all(action.help and action.help[0].isalpha() for action in actions)


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
    expected = f"unrecognized arguments: --frobnicate 3; treetrain {command} --help lists all options"
    assert error == f"treetrain: error: {expected}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect"], "required: FILE"),
        (
            ["inspect", "a", "--batch-size", "many"],
            "argument --batch_size/--batch-size: invalid whole_number value: 'many'; treetrain inspect --help lists",
        ),
        (["inspect", "a", "--batch-size", "0"], "argument --batch_size/--batch-size: 0 is too small; give at least 1"),
        (["inspect", "a", "--view", "turns"], "--view"),
        (["inspect", "a", "--shape", "gpt-9"], "no model shape is named 'gpt-9'"),
        (["verify", "a"], "--model"),
        (["verify", "a", "--model", "tiny", "--sample", "-1"], "--sample: -1"),
        (["bench", "a", "--model", "tiny", "--repeats", "0"], "--repeats: 0"),
        (["inspect", "a", "--map", "reward"], "--map: reward: expected KEY=PATH"),
        (["train", "--model", "tiny"], "arguments are required: FILE"),
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
