"""Two runs beside each other: what is measured, what would be ideal, and when neither can be said."""

import math

import pytest
from reading import Page

from treetrain.report.compare import Comparison
from treetrain.report.page import comparison_page
from treetrain.report.records import read_run


@pytest.fixture
def pair(make_run) -> Comparison:
    """A tree run, and a linear one that takes three times as long (the first step apart) and four times the FLOPs."""

    def slow(step: int) -> dict[str, float]:
        return {"forward_backward_seconds": 9.9 if step == 1 else 1.2, "unique_tokens": 1000, "computed_tokens": 1000}

    tree = make_run("tree", stop={"kind": "end"})
    linear = make_run("linear", config={"execution": "linear"}, change=slow, stop={"kind": "end"})
    return Comparison(read_run(tree), read_run(linear))


def test_speed_up_is_the_median_of_the_steps_after_the_first_and_efficiency_its_share_of_the_ideal(pair) -> None:
    assert pair.names == ("tree", "linear") and pair.same_work and pair.common_steps == 12
    assert pair.speedup == pytest.approx(3.0) and pair.ideal == pytest.approx(4.0)
    assert pair.efficiency == pytest.approx(0.75)
    assert pair.largest_difference == 0.0


def test_the_page_shows_both_runs_the_figures_and_what_differs(pair) -> None:
    page = Page(comparison_page(pair))
    assert {"loss", "difference", "speedup", "forward_backward_seconds", "memory", "grad_norm"} <= page.charts
    assert "3.00×" in page.text and "4.00×" in page.text and "0.75" in page.text
    assert "Settings that differ setting tree linear execution tree linear" in page.text
    assert page.loaded == []


def test_an_evaluation_that_differs_counts_as_a_distance(make_run) -> None:
    one = read_run(make_run("one"))
    other = read_run(make_run("other", evaluations={0: 3.0, 12: 2.6}))
    assert Comparison(one, other).largest_difference == pytest.approx(0.5)
    lost = read_run(make_run("lost", change=lambda step: {"loss": None} if step == 4 else {}))
    assert math.isnan(Comparison(one, lost).largest_difference)


def test_runs_over_other_rows_have_no_speed_up_and_the_page_says_so(make_run) -> None:
    one = read_run(make_run("one"))
    other = read_run(make_run("other", change=lambda step: {"flat_tokens": 1000 + step}))
    pair = Comparison(one, other)
    assert not pair.same_work and pair.speedup is pair.ideal is pair.efficiency is None
    page = Page(comparison_page(pair))
    assert "not of the same rows" in page.text and "measured speed-up" not in page.text
    assert "speedup" not in page.charts and pair.names == ("one", "other")


def test_a_run_that_goes_on_is_compared_over_the_steps_that_both_have_done(make_run) -> None:
    pair = Comparison(read_run(make_run("one", steps=4)), read_run(make_run("other")))
    assert pair.common_steps == 4 and pair.same_work and len(pair.speedups) == 4
    assert "Running" in Page(comparison_page(pair)).text
