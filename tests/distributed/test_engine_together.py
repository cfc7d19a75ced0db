"""Behaviour of several ranks when one of them cannot go on, and uses that are refused by name."""

import pytest

from support import rank_errors
from support.processes import RankFailed


@pytest.mark.parametrize("case", rank_errors.DISAGREEMENTS)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_disagree_are_told_so_on_every_rank(run_on_ranks, parallel, case) -> None:
    told = run_on_ranks(rank_errors.disagreeing, parallel, case)
    mine, others = rank_errors.DISAGREEMENTS[case]
    assert mine in told[1] and others in told[0], told


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "context", "tensor", "mesh"])
def test_a_loss_that_raises_in_the_middle_of_a_step_stops_all_ranks_and_leaves_them_usable(
    run_on_ranks, parallel
) -> None:
    size = 4 if parallel == "mesh" else 2
    for scope, what in (("trajectory", "the step" if parallel == "ddp" else "the passes"), ("batch", "the loss")):
        first, second, *others = run_on_ranks(rank_errors.raising_in_the_middle, parallel, scope, size=size)
        why = f"RanksDisagree: {what} stopped on all ranks, because of rank 1 of {size}: Oops: in row 2"
        assert {first, *others} == {(why, True)}
        assert second == ("Oops: in row 2", True)


def test_a_pass_that_breaks_off_is_said_to_need_a_new_start(run_on_ranks) -> None:
    for first, again in run_on_ranks(rank_errors.broken_pass):
        assert "Oops: in the second layer" in first
        assert "in the middle of a pass: the other ranks wait there until this process ends" in first
        assert "start all processes again" in again


@pytest.mark.parametrize(
    ("parallel", "killed"),
    [
        ("context", False),
        pytest.param("fsdp", False, marks=pytest.mark.slow),
        pytest.param("tensor", False, marks=pytest.mark.slow),
        pytest.param("fsdp", True, marks=pytest.mark.slow),
    ],
)
def test_ranks_in_a_pass_that_another_has_left_are_told_its_error_when_its_process_ends(
    run_on_ranks, parallel, killed
) -> None:
    with pytest.raises(RankFailed, match="rank 1: the process ended") as failed:
        run_on_ranks(rank_errors.left_alone, parallel, killed)
    assert "rank 0: RanksDisagree: another rank has left this pass" in str(failed.value)
    assert ("see what it said" if killed else "rank 1 of 2: Oops: in the second layer") in str(failed.value)


def test_uses_that_cannot_be_exact_on_shards_are_refused(run_on_ranks) -> None:
    for told in run_on_ranks(rank_errors.refused):
        for use, words in {
            "live logprobs": "the model is sharded (fully_shard), whose passes must come in one order",
            "another group": "the group given is not that of the model's shards",
            "two meshes": "lie on 2 device meshes",
            "tensor parallel": "DTensors that neither fully_shard",
            "divided gradients": "set_gradient_divide_factor was called",
        }.items():
            assert told[use].startswith("UnsupportedModel: ") and words in told[use]


def test_scores_of_a_sharded_model_without_gradients(run_on_ranks) -> None:
    for told in run_on_ranks(rank_errors.scores_without_gradients):
        assert told <= 1e-12


@pytest.mark.parametrize("kind", rank_errors.WRAPPED)
def test_a_step_on_a_model_that_is_wrapped_otherwise(run_on_ranks, kind) -> None:
    size = 4 if kind == "replicas of shards" else 2
    for told in run_on_ranks(rank_errors.wrapped, kind, size=size):
        assert told <= rank_errors.WRAPPED[kind], told
