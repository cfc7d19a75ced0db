"""`treetrain.testing` accepts what is exact and fails where it is not."""

import dataclasses

import pytest
from hypothesis import Phase, settings

import treetrain as tt
from support.models import make_model
from treetrain.testing import SFT, check_contract


@pytest.fixture
def without_shrinking(monkeypatch):
    """A failure counts as found; hypothesis need not look for a smaller one."""
    monkeypatch.setattr(
        "treetrain.check.contract.runs",
        lambda examples, **_: settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate]),
    )


@pytest.mark.slow
def test_an_exact_model_passes_and_the_worst_errors_are_told():
    worst = check_contract(make_model("llama"), [SFT], examples=2)
    assert 0 < worst["float64"] <= 1e-12 and 0 < worst["float32"] <= 1e-5 and worst["distinct forests"] >= 2


@pytest.mark.slow
def test_an_engine_that_takes_one_row_for_another_is_caught(without_shrinking):
    class Mistaken(tt.TreeEngine):
        def forward_backward(self, rows, loss, *args, **kwargs):
            longest = max(range(len(rows)), key=lambda k: len(rows[k]))
            weights = [1.0 + 0.1 * t for t in range(len(rows[longest]))]
            others = [row for k, row in enumerate(rows) if k != longest]
            return super().forward_backward([*others, rows[longest].replace(loss_weights=weights)], loss)

    with pytest.raises((AssertionError, ExceptionGroup)):  # a group where forests fail in several ways
        check_contract(make_model("llama"), [SFT], examples=2, engines=[Mistaken])


def test_a_loss_that_is_not_what_was_written_out_is_caught(without_shrinking):
    wrong = dataclasses.replace(SFT, per_token=lambda logp, entropy, facts: -1.001 * logp)
    with pytest.raises(AssertionError):
        check_contract(make_model("llama"), [wrong], examples=2)
