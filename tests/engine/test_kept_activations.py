"""A penalty on activations that a forward hook keeps has no gradient on a tree: an error, in every plan."""

from collections.abc import Callable

import pytest
import torch

import treetrain as tt
from support.models import make_model
from support.plans import keeping_graphs
from treetrain.check.linear import gradients, relative_error
from treetrain.core.engine.engine_model import Call
from treetrain.core.engine.score import Scored

ROWS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9], [1, 9]]
every_graphs = pytest.mark.parametrize("graphs", ["kept", "partly", "recomputed"])
SAYS = "forward hook.*(part of the loss|keeps activations for a penalty)"


def scored(monkeypatch, model, graphs: str, budget: int | None = 3) -> Scored:
    monkeypatch.setattr(Call, "plan_keeping_graphs", lambda _self, plan: keeping_graphs(graphs)(plan))
    return tt.TreeEngine(model, budget=budget, check=False).score(ROWS)


def output(taken: list) -> Callable:
    return lambda _module, _given, out: taken.append(out)


def penalty(taken: list) -> Callable:
    return lambda _module, _given, out: taken.append(out.square().mean())


def given(taken: list) -> Callable:
    return lambda _module, given, _out: taken.append(given[0])


@every_graphs
@pytest.mark.parametrize("keep", [output, penalty, given])
def test_a_penalty_on_what_a_hook_keeps_is_an_error_by_name(monkeypatch, graphs, keep):
    model, taken = make_model("qwen3"), []
    model.model.layers[0].mlp.register_forward_hook(keep(taken))
    scores = scored(monkeypatch, model, graphs)
    assert all(x.requires_grad for x in taken)
    loss = -torch.cat(scores.logprobs).mean() + 0.1 * sum(x.square().mean() for x in taken)
    with pytest.raises((RuntimeError, tt.UnsupportedModel), match=SAYS):
        loss.backward()
        scores.backward()


@every_graphs
def test_a_penalty_on_what_a_pre_hook_keeps_is_an_error_by_name(monkeypatch, graphs):
    model, taken = make_model("qwen3"), []

    def keep(_module, args, kwargs):
        taken.extend(args)

    model.model.layers[0].mlp.register_forward_pre_hook(keep, with_kwargs=True)
    scores = scored(monkeypatch, model, graphs)
    with pytest.raises((RuntimeError, tt.UnsupportedModel), match=SAYS):
        (-torch.cat(scores.logprobs).mean() + sum(x.square().mean() for x in taken)).backward()
        scores.backward()


def detached(module, _given, out):
    module.kept = out.detach().norm()


def probe(module, _given, out):
    weight = torch.ones(out.shape[-1], dtype=out.dtype, requires_grad=True)
    (out.detach() @ weight).square().mean().backward()
    module.kept = weight.grad


def steering(_module, _given, out):
    return 1.5 * out


def in_place(_module, _given, out):
    out.mul_(1.5)


@every_graphs
@pytest.mark.parametrize("hook", [detached, probe, steering, in_place])
def test_other_hooks_change_what_they_change_on_rows(monkeypatch, graphs, hook):
    model = make_model("qwen3", dtype=torch.float64)
    model.model.layers[0].mlp.register_forward_hook(hook)
    total = torch.zeros(())
    for row in ROWS:
        logprobs = model(torch.tensor([row]), use_cache=False).logits[0, :-1].log_softmax(-1)
        total = total - logprobs.gather(1, torch.tensor(row)[1:, None]).sum()
    expected = gradients(model, total)
    model.zero_grad()
    scores = scored(monkeypatch, model, graphs)
    (-torch.cat(scores.logprobs).sum()).backward()
    scores.backward()
    assert relative_error(gradients(model), expected) <= 1e-6


def test_hooks_see_no_graph_where_nothing_has_gradients(monkeypatch):
    model, taken = make_model("qwen3"), []
    model.model.layers[0].mlp.register_forward_hook(output(taken))
    with torch.no_grad():
        scored(monkeypatch, model, "recomputed")
    assert taken and not any(x.requires_grad for x in taken)


def test_a_hook_that_removes_itself_runs_once(monkeypatch):
    model, runs = make_model("qwen3"), []

    def once(*_):
        runs.append(1)
        handle.remove()

    handle = model.model.layers[0].mlp.register_forward_hook(once)
    scored(monkeypatch, model, "recomputed")
    assert runs == [1] and not model.model.layers[0].mlp._forward_hooks
