"""Ticks, thinning, and how numbers read."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.runs import runs
from treetrain.report.records import Column
from treetrain.report.scales import (
    Scale,
    averaged,
    envelope,
    linear_ticks,
    rolling_mean,
    step_ticks,
    thinned,
    value_range,
)
from treetrain.report.words import byte_count, duration, number, percent, short, tick, times

LOWS = st.floats(-1e6, 1e6)
SPANS = st.floats(1e-6, 1e7)


@runs(200)
@given(low=LOWS, span=SPANS, count=st.integers(3, 11))
def test_ticks_are_round_inside_and_neither_few_nor_many(low, span, count) -> None:
    ticks = linear_ticks(low, low + span, count)
    assert 1 <= len(ticks) <= count and len(ticks) >= min(count // 2.5, 3) - 1
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)
    if len(ticks) > 1:
        step = ticks[1] - ticks[0]
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(mantissa - round_one) for round_one in (1, 2, 5, 10)) < 1e-3 * mantissa + 1e-9 * abs(low) / step


@runs(100)
@given(low=LOWS, span=SPANS)
def test_labels_of_neighbouring_ticks_differ(low, span) -> None:
    if abs(low) > 1e3 * span:
        return  # an axis far from 0 needs more digits than fit beside it
    labels = [tick(value) for value in linear_ticks(low, low + span, 6)]
    assert len(set(labels)) == len(labels)


def test_step_ticks_are_whole_numbers() -> None:
    assert step_ticks(1, 3, 6) == [1, 2, 3] and step_ticks(7, 7, 6) == [7]
    assert step_ticks(1, 10_000, 6) == [2000, 4000, 6000, 8000, 10_000]


@pytest.mark.parametrize("log", [False, True])
def test_an_axis_holds_all_its_values_even_one_that_never_changes(log) -> None:
    for values in (np.array([3.0]), np.array([2.0, 2.0]), np.array([1e-9, 5.0]), np.array([1e8, 1.1e8])):
        low, high = value_range(values, log=log, zero=False)
        scale = Scale(low, high, 100.0, 0.0, log)
        assert low < high and ((scale(values) > 0) & (scale(values) < 100)).all()
        assert len(scale.ticks(6)) >= 1
    assert value_range(np.array([0.0]), log=False, zero=True) == (0.0, 1.0)


@runs(100)
@given(count=st.integers(1, 2000), gaps=st.sampled_from([0.0, 0.1, 0.9, 1.0]), drawn=st.integers(0, 2**31))
def test_thinning_keeps_ends_of_the_range_and_gaps(count, gaps, drawn) -> None:
    random = np.random.default_rng(drawn)
    values = np.where(random.random(count) < gaps, math.nan, random.standard_cauchy(count))
    column = Column(np.arange(count), values)
    few = thinned(column, 20)
    assert len(few) <= max(40, 0 if len(values) > 40 else len(values))
    if np.isfinite(column.values).any():
        assert np.nanmax(few.values) == np.nanmax(column.values)
        assert np.nanmin(few.values) == np.nanmin(column.values)
        steps, lows, highs = envelope(column, 20)
        assert lows.min() == np.nanmin(column.values) and highs.max() == np.nanmax(column.values)
        assert (lows <= highs).all() and (np.diff(steps) > 0).all()
    assert (np.diff(few.steps) > 0).all()
    assert len(averaged(column, 20)) <= max(20, min(len(values), 20))


def test_a_rolling_mean_leaves_out_what_is_no_number() -> None:
    values = np.array([1.0, math.nan, 3.0, 5.0, math.nan, math.nan, math.nan])
    assert rolling_mean(values, 3)[:4].tolist() == [1.0, 2.0, 4.0, 4.0]
    assert math.isnan(rolling_mean(values, 3)[5])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (number(1234.5678), "1,235"),
        (number(0.000012345), "1.23e−5"),
        (number(-0.5), "−0.5"),
        (number(math.nan), "–"),
        (number(0.0), "0"),
        (short(19080.9), "19.1k"),
        (short(1.93e9), "1.93G"),
        (short(999.0), "999"),
        (tick(1.005), "1.005"),
        (byte_count(882_900_000), "883 MB"),
        (byte_count(0), "0 B"),
        (duration(0.0123), "12.3 ms"),
        (duration(59.99), "60 s"),
        (duration(250), "4 min 10 s"),
        (duration(7500), "2 h 05 min"),
        (duration(273_600), "3 d 4 h"),
        (times(4.3744), "4.37×"),
        (percent(0.7855), "78.5 %"),
    ],
)
def test_numbers_read_as_people_write_them(said, expected) -> None:
    assert said == expected
