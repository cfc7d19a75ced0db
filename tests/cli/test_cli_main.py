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


@pytest.mark.few(4)
@pytest.mark.parametrize("argv", [["--help"], ["--version"], *[[command, "--help"] for command in OWN]])
def test_help_imports_neither_torch_nor_transformers_nor_numpy(argv) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_HEAVY, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr and done.stdout


@pytest.mark.parametrize("command", OWN)
def test_the_help_of_a_command_has_a_sentence_for_every_option(treetrain, command) -> None:
    assert treetrain(command, "--help").code == 0
    actions = importlib.import_module(f"treetrain.cli.{command}").make_parser()._actions
    assert len(actions) >= 2 and all(action.help and action.help[0].isalpha() for action in actions)


def test_the_overview_names_every_command(treetrain) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        answer = treetrain(*argv)
        assert answer.code == 0 and all(f"  {command}" in answer.out for command in COMMANDS)


def test_the_version_is_printed(treetrain) -> None:
    assert treetrain("--version").out == f"treetrain {package.__version__}\n"


def test_python_m_treetrain_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "treetrain", "inspekt"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "treetrain: error: unknown command 'inspekt'; did you mean inspect?\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_named_before_what_is_missing_with_the_nearest_one(treetrain, command) -> None:
    near = {"train": ("--learning-rat", "--learning_rate"), "page": ("--htm", "--html"), "demo": ("--stps", "--steps")}
    flag, meant = near.get(command, ("--jsn", "--json"))
    help_all = "--help-all" if command == "train" else "--help"
    expected = f"unknown option {flag}; did you mean {meant}? treetrain {command} {help_all} lists all options"
    assert treetrain(command, flag).error == f"treetrain: error: {expected}"


def test_ctrl_c_says_what_was_done_and_exits_with_130(monkeypatch, capsys) -> None:
    def stop(argv):
        raise KeyboardInterrupt("interrupted after step 3 of 9")

    monkeypatch.setattr("treetrain.cli.inspect.run", stop)
    assert main(["inspect"]) == 130
    assert capsys.readouterr().err == "treetrain: interrupted after step 3 of 9\n"


@pytest.mark.parametrize(("module", "extra"), [("torch", "train"), ("peft", "peft"), ("treetrain.nothing", None)])
def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch, capsys, module, extra) -> None:
    def missing(argv):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("treetrain.cli.train.run", missing)
    code, error = main(["train"]), capsys.readouterr().err
    if extra is None:
        assert code == 70 and "Traceback" in error
    else:
        assert code == 2 and error.count("\n") == 1 and f"pip install 'treetrain[{extra}]'" in error


def test_a_traceback_can_be_had(monkeypatch) -> None:
    monkeypatch.setenv("TREETRAIN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown command"):
        main(["nothing"])


def test_our_own_faults_keep_their_traceback_and_say_what_to_report(monkeypatch, capsys) -> None:
    def wrong(argv):
        raise AssertionError("ours")

    monkeypatch.setattr("treetrain.cli.inspect.run", wrong)
    assert main(["inspect"]) == 70
    *trace, last = capsys.readouterr().err.splitlines()
    assert "Traceback" in trace[0] and trace[-1] == "AssertionError: ours"
    assert last.startswith("treetrain: this is a fault of treetrain") and "report" in last


def test_what_a_library_says_of_the_user_s_settings_is_no_fault_of_ours(monkeypatch, capsys) -> None:
    def refuses(argv):
        exec(compile("raise NotImplementedError('bias some')", "peft.py", "exec"), {"__name__": "peft.tuners"})

    monkeypatch.setattr("treetrain.cli.train.run", refuses)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "treetrain: error: bias some (NotImplementedError of peft)\n"


def test_out_of_memory_says_which_flag_bounds_it(monkeypatch, capsys) -> None:
    def full(argv):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr("treetrain.cli.train.run", full)
    assert main(["train"]) == 2
    assert "CUDA out of memory. A smaller --budget" in capsys.readouterr().err


def test_a_message_has_at_most_400_characters_and_keeps_its_end(monkeypatch, capsys) -> None:
    def long(argv):
        raise ValueError("x" * 1000 + " do this")

    monkeypatch.setattr("treetrain.cli.train.run", long)
    assert main(["train"]) == 2
    error = capsys.readouterr().err
    assert len(error) <= 401 and error.endswith("x do this\n")
