"""Gradients and rows that could go astray between the calls, tries and walks of a step over several ranks."""

import pytest

from support import rank_traps

EXACT = 1e-12


@pytest.mark.parametrize(("parallel", "reduce"), [("ddp", "part"), ("fsdp", "part"), ("fsdp", "step")])
def test_the_last_call_of_a_step_reduces_what_earlier_ones_left_also_without_rows(run_on_ranks, parallel, reduce):
    for error in run_on_ranks(rank_traps.last_call_without_rows, parallel, reduce):
        assert error <= EXACT


def test_gradients_of_a_call_that_failed_before_they_were_reduced_do_not_enter_the_next_step(run_on_ranks) -> None:
    for calls in (0, 1):
        for told, error in run_on_ranks(rank_traps.failing_before_gradients_are_reduced, calls):
            assert "Oops: in row 2" in told and error <= EXACT
            assert ("gradients of earlier calls waited to be reduced" in told) == (calls == 1)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_that_cannot_score_its_rows_for_a_comparison_stops_all(run_on_ranks, parallel) -> None:
    (first, after), (second, again) = run_on_ranks(rank_traps.comparing_rows_while_one_fails, parallel)
    what = "comparing rows" if parallel == "ddp" else "the passes"
    assert first.startswith(f"RanksDisagree: {what} stopped on all ranks, because of rank 1 of 2: Oops")
    assert second.startswith("Oops: while scoring")
    assert max(after, again) <= EXACT


def test_a_rank_may_start_over_after_rows_were_compared(run_on_ranks) -> None:
    for error in run_on_ranks(rank_traps.comparing_rows_while_one_starts_over):
        assert error <= EXACT


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_mixture_that_was_told_of_its_step_needs_no_normaliser(run_on_ranks, parallel) -> None:
    for loss, gradients in run_on_ranks(rank_traps.mixture_that_knows_its_step, parallel):
        assert loss <= EXACT and gradients <= EXACT


def test_losses_of_ones_own_must_be_the_same_on_all_ranks(run_on_ranks) -> None:
    for function, needs in run_on_ranks(rank_traps.different_losses_of_ones_own):
        assert "the ranks differ in loss" in function and "_one" in function and "_two" in function
        assert "the ranks differ in what the loss needs" in needs and "'entropies'" in needs


def test_a_function_among_the_options_of_a_loss_is_no_disagreement(run_on_ranks) -> None:
    first, second = run_on_ranks(rank_traps.told_of_a_loss_with_a_function)
    assert first == second and "<lambda>" in first


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "shards"])
def test_a_value_head_may_be_wrapped_as_the_model_is(run_on_ranks, kind) -> None:
    for error in run_on_ranks(rank_traps.value_head_in_other_hands, kind):
        assert error <= EXACT


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_fsdp_may_cast_the_outputs_of_the_model(run_on_ranks, family) -> None:
    for left, cast in run_on_ranks(rank_traps.outputs_cast_by_fsdp, family):
        assert left == cast < 0.05


def test_a_negative_weight_in_a_tree_of_nodes_is_refused_on_all_ranks(run_on_ranks) -> None:
    first, second = run_on_ranks(rank_traps.negative_weights_of_nodes)
    assert first.startswith("DataError: node 1: loss_weights[1] = -0.5, but a mean needs weights of 0 or more")
    assert "because of rank 0 of 2: DataError: node 1" in second


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_calls_that_differ_in_what_is_known_late_stop_on_all_ranks(run_on_ranks, parallel) -> None:
    for told in run_on_ranks(rank_traps.calls_that_differ, parallel):
        assert "the ranks differ in sync: rank 0 has True, rank 1 False" in told["sync"]
        assert "the normaliser that the loss gives: rank 0 has 1.0, rank 1 2.0" in told["normaliser"]
        assert "the ranks differ in the balance of the routers" in told["balance"]


def test_hooks_that_update_weights_see_the_gradients_of_all_ranks_or_are_refused(run_on_ranks) -> None:
    for told in run_on_ranks(rank_traps.optimiser_in_backward, "ddp"):
        assert told.startswith("UnsupportedModel: weights that every rank holds as a whole have hooks")
    assert run_on_ranks(rank_traps.optimiser_in_backward, "fsdp") == ["no error"] * 2


def test_engines_on_one_group_talk_over_one_group(run_on_ranks) -> None:
    assert run_on_ranks(rank_traps.groups_made) == [1, 1]
