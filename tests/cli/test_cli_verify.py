"""`treetrain verify` and `treetrain bench` on a small model."""

import pytest

from treetrain.engine import TreeEngine


def test_an_exact_model_passes_with_a_table_of_its_worst_parameters(treetrain, token_file, model_folder) -> None:
    answer = treetrain("verify", token_file, "--model", model_folder)
    assert answer.code == 0 and "worst 5 of" in answer.out and "exact" in answer.out and "NOT" not in answer.out
    assert "12: 180 flat" in answer.out


def test_verify_says_how_far_it_is(treetrain, token_file, model_folder, monkeypatch) -> None:
    assert "rows" not in treetrain("verify", token_file, "--model", model_folder, "--json").err
    monkeypatch.setattr("treetrain.check.verify.EVERY", -1)
    said = treetrain("verify", token_file, "--model", model_folder, "--json").err
    for dtype in ("float32", "float64"):
        assert f"5 of 12 rows are computed by themselves, in {dtype}\n" in said


def test_verify_as_json_says_what_was_compared(treetrain, token_file, model_folder) -> None:
    answer = treetrain("verify", token_file, "--model", model_folder, "--json")
    report = answer.json
    assert answer.code == 0 and report["passed"] is True and report["dtype"] == "float32"
    assert report["trajectories"] == 12 and report["flat_tokens"] == 180
    assert report["loss_tree"] == pytest.approx(report["loss_linear"], rel=1e-5)
    assert report["gradient_error"] <= report["tolerance"] and len(report["parameters"]) > 10


def test_all_compares_element_by_element(treetrain, token_file, model_folder) -> None:
    argv = ("verify", token_file, "--model", model_folder, "--json")
    sums, whole = (treetrain(*argv, *flags).json for flags in ((), ("--all",)))
    assert (sums["all_gradients"], whole["all_gradients"]) == (False, True)
    assert sums["gradient_error"] == pytest.approx(whole["gradient_error"], rel=0.2) and whole["passed"]


def test_a_wrong_gradient_fails_with_exit_code_1(treetrain, token_file, model_folder, monkeypatch) -> None:
    original = TreeEngine.forward_backward

    def spoiled(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad.mul_(1.001)
        return result

    monkeypatch.setattr(TreeEngine, "forward_backward", spoiled)
    answer = treetrain("verify", token_file, "--model", model_folder)
    assert answer.code == 1 and "NOT EXACT" in answer.out


def test_the_sample_is_whole_groups_and_it_is_said(treetrain, token_file, model_folder) -> None:
    answer = treetrain("verify", token_file, "--model", model_folder, "--json", "--sample", "7")
    assert answer.json["trajectories"] == 6
    assert "a sample of 6 of 12 rows, in whole groups" in answer.err
    cut = treetrain("verify", token_file, "--model", model_folder, "--json", "--sample", "2")
    assert cut.json["trajectories"] == 2 and "of the first group" in cut.err
    assert (
        treetrain("verify", token_file, "--model", model_folder, "--json", "--sample", "0").json["trajectories"] == 12
    )


@pytest.mark.slow
def test_conversations_are_verified_in_the_calls_view(treetrain, chat_file, model_folder) -> None:
    argv = ("verify", chat_file, "--model", model_folder, "--view", "calls", "--dtype", "float64", "--json")
    report = treetrain(*argv).json
    assert report["passed"] and report["trajectories"] == 8 and report["gradient_error"] < 1e-6
    assert report["unique_tokens"] < report["flat_tokens"]


def test_a_sample_with_nothing_to_train_is_refused(treetrain, tmp_path, model_folder) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}\n')
    assert "nothing to train" in treetrain("verify", str(path), "--model", model_folder).error


def test_bench_measures_tree_and_baselines(treetrain, token_file, model_folder) -> None:
    argv = ("bench", token_file, "--model", model_folder, "--repeats", "2")
    answer = treetrain(*argv, "--json")
    report = answer.json
    assert answer.code == 0 and len(report["seconds"]["tree"]) == 2 and report["trajectories"] == 12
    assert report["efficiency"] == pytest.approx(report["speedup"] / report["ideal"]) and report["ideal"] > 1
    assert report["baseline"] in report["baselines"]
    table = treetrain(*argv)
    expected = ("speed-up", "FLOP-ideal", "efficiency", "packed 4096", "overlap 0.")
    assert table.code == 0 and all(word in table.out for word in expected)


@pytest.mark.slow
def test_verify_runs_the_tree_under_the_budget(treetrain, token_file, model_folder) -> None:
    argv = ("verify", token_file, "--model", model_folder)
    whole, report = (treetrain(*argv, *more, "--json").json for more in ((), ("--budget", "12")))
    assert whole["parts"] == 1 and whole["recomputed_tokens"] == 0
    assert report["passed"] and report["parts"] > 4 and report["recomputed_tokens"] > 0
    table = treetrain(*argv, "--budget", "12").out
    assert f"{report['parts']}, {report['recomputed_tokens']} tokens run forward twice" in table


@pytest.mark.slow
def test_bench_runs_the_tree_under_the_budget_and_counts_what_it_must_recompute(
    treetrain, token_file, model_folder
) -> None:
    argv = ("bench", token_file, "--model", model_folder, "--repeats", "1", "--json")
    whole, report = (treetrain(*argv, *more).json for more in ((), ("--budget", "12")))
    assert whole["parts"] == 1 and report["parts"] > 4 and report["recomputed_tokens"] > 0
    assert 1 < report["ideal"] < whole["ideal"]


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_budget_that_is_none_or_too_small_is_refused_with_the_cure(
    command, treetrain, token_file, model_folder
) -> None:
    argv = (command, token_file, "--model", model_folder)
    assert "budget='0'" in (error := treetrain(*argv, "--budget", "0").error) and "from 1" in error
    assert "give at least that" in treetrain(*argv, "--budget", "10kB").error
