"""A score on several ranks has the gradients of the mean over ranks, as DistributedDataParallel gives them."""

import pytest

from support.score_work import an_error_on_one_rank, live_is_refused, scored_step

QWEN3 = ("qwen3", ())
PLANS = (("one segment per part", "mixed"), ("chunks of 2", "none"))


def check(run_on_ranks, how, *, keeps=(True,), calls=1, split="round", changes=QWEN3, shapes=PLANS, size=2):
    found = run_on_ranks(scored_step, how, shapes, keeps, calls, split, changes, size=size)
    for told in found:
        assert told["error"] <= 1e-12, found
    return [told["scores_first"] for told in found]


def alternating(cases):
    """Each case under one way, the next under the other; the rest are slow."""
    return [
        pytest.param(how, case, marks=() if number % 2 == (how == "fsdp") else pytest.mark.slow)
        for number, case in enumerate(cases)
        for how in ("ddp", "fsdp")
    ]


@pytest.mark.parametrize(("how", "split"), alternating(["round", "halves", "first has all", "last has all"]))
def test_ranks_have_rows_of_their_own_or_none(run_on_ranks, how, split):
    for keeps in ((True,), (False,)):
        check(run_on_ranks, how, keeps=keeps, split=split)


def test_ranks_of_a_sharded_model_all_keep_their_graphs_or_none_does(run_on_ranks):
    assert check(run_on_ranks, "fsdp", keeps=(True, False)) == [["recomputed"]] * 2
    assert check(run_on_ranks, "fsdp", keeps=(True, True)) == [["kept"]] * 2
    assert check(run_on_ranks, "ddp", keeps=(True, False)) == [["kept"], ["recomputed"]]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_step_may_be_accumulated(run_on_ranks, how):
    for keeps in ((True,), (False,)):
        check(run_on_ranks, how, keeps=keeps, calls=3)


@pytest.mark.parametrize(("how", "family"), alternating(["qwen3_5_text", "qwen3_moe", "gemma3_text"]))
def test_kinds_of_models(run_on_ranks, how, family):
    for keeps in ((True,), (False,)):
        check(run_on_ranks, how, keeps=keeps, changes=(family, ()), split="halves")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_four_ranks(run_on_ranks, how):
    for keeps in ((True,), (False,)):
        check(run_on_ranks, how, keeps=keeps, calls=2, size=4)


def test_live_log_probabilities_are_refused_where_nobody_would_synchronise_them(run_on_ranks):
    for said in run_on_ranks(live_is_refused):
        assert len(said) == 4
        for told in said:
            assert "in a group of" in told and "scored.backward(), which averages gradients over the ranks" in told


@pytest.mark.parametrize("how", ["ddp", "fsdp", "context", "tensor"])
def test_an_error_on_one_rank_ends_all_of_them(run_on_ranks, how):
    told = run_on_ranks(an_error_on_one_rank, how)
    assert "a second backward through TreeEngine.score" in told[1]
    assert told[0].startswith("RanksDisagree") and "a second backward" in told[0]
