"""`treetrain.testing` accepts what is exact and fails where it is not."""

import dataclasses

import pytest

import treetrain as tt
from support.models import make_model
from treetrain.testing import SFT, check_contract


def test_an_exact_model_passes_and_the_worst_errors_are_told():
    worst = check_contract(make_model("llama"), [SFT], examples=3)
    assert 0 < worst["float64"] <= 1e-12 and 0 < worst["float32"] <= 1e-5 and worst["distinct forests"] >= 2


def test_an_engine_that_forgets_a_row_is_caught():
    class Forgetful(tt.TreeEngine):
        def forward_backward(self, rows, loss, *args, **kwargs):
            longest = max(range(len(rows)), key=lambda k: len(rows[k]))
            return super().forward_backward([r for k, r in enumerate(rows) if k != longest], loss, *args, **kwargs)

    with pytest.raises((AssertionError, ExceptionGroup)):  # a group where forests fail in several ways
        check_contract(make_model("llama"), [SFT], examples=3, engines=[Forgetful])


def test_a_loss_that_is_not_what_was_written_out_is_caught():
    wrong = dataclasses.replace(SFT, per_token=lambda logp, entropy, facts: -1.001 * logp)
    with pytest.raises(AssertionError):
        check_contract(make_model("llama"), [wrong], examples=3)
