"""torch.amp.GradScaler in a loop of one's own: scaled losses, clipping, and skipped steps are those of plain rows."""

import contextlib
import copy

import pytest
import torch

import treetrain as tt
from support.models import make_model
from treetrain.check import linear

ROWS = [[1, 2, 3, 4, 5, 9], [1, 2, 6, 7], [1, 2, 3, 7, 7], [8, 9, 10]]
OVERFLOWS = 1


def train(model, how, budget, autocast):
    """Four steps, the second of which overflows; returns the weights and the scales."""
    model, scales = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    engine = tt.TreeEngine(model, budget=budget)
    for step in range(4):
        optimizer.zero_grad()
        scored = None
        with torch.autocast("cpu", dtype=torch.float16) if autocast else contextlib.nullcontext():
            if how == "plain":
                logprobs = linear.score_rows(model, ROWS)[0]
            elif how == "live":
                logprobs = tt.logprobs(model, ROWS, budget=budget)
            else:
                scored = engine.score(ROWS)
                logprobs = scored.logprobs
        loss = -sum(row.sum() for row in logprobs) / 15 * (1e38 if step == OVERFLOWS else 1.0)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        scaler.scale(loss).backward()
        if scored is not None:
            scored.backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(before, after) == (step == OVERFLOWS)
    return after, scales


@pytest.mark.few(1)
@pytest.mark.parametrize(("autocast", "limit"), [(False, 1e-5), (True, 1e-2)], ids=["float32", "float16"])
@pytest.mark.parametrize("budget", [None, 3])
def test_a_loop_with_a_loss_scaler_moves_the_weights_as_plain_rows_do(budget, autocast, limit):
    model = make_model("qwen3")
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected, scales = train(model, "plain", budget, autocast)
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    for how in ("score", "live"):
        found, own = train(model, how, budget, autocast)
        assert own == scales
        assert (found - expected).norm() <= limit * (expected - start).norm()
