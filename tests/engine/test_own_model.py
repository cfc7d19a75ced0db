"""Tree training of a model of the user's own: packed rows, attention and log-probabilities as public functions."""

import pytest
import torch
from examples.own_model import Decoder
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import treetrain as tt
from support.shapes import unchecked
from treetrain.check.forests import VOCAB, forests, runs, seeded
from treetrain.check.linear import gradients, relative_error
from treetrain.core.attention.reference import reference_attention

SPECS: dict[str, dict] = {
    "full": {},
    "window": {"window": 4},
    "chunks": {"chunk": 5},
    "soft-cap": {"softcap": 1.5, "scale": 0.7},
    "window, soft-cap and sinks": {"window": 6, "softcap": 0.8, "sinks": True},
}
TREE = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 9, 9, 9], [4, 4]]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SPECS)
def test_attention_on_a_tree_is_that_of_one_row_at_a_time(name):
    @seeded(name)
    @runs(12, derandomize=False)
    @given(forests(max_rows=8, max_length=20), st.integers(0, 99), st.sampled_from([(4, 2, 8), (4, 4, 3), (3, 1, 12)]))
    def every_forest(rows, seed, heads_and_value):
        heads, groups, value_size = heads_and_value
        packed, given_ = tt.pack(rows), dict(SPECS[name])
        torch.manual_seed(seed)
        sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True) if given_.pop("sinks", False) else None
        per_id = [
            torch.randn(VOCAB, count, size, dtype=torch.float64, requires_grad=True)
            for count, size in ((heads, 8), (groups, 8), (groups, value_size))
        ]
        leaves = per_id + ([] if sinks is None else [sinks])
        grad_of_id = torch.randn(VOCAB, heads, value_size, dtype=torch.float64)

        def loss(out: Tensor, ids: Tensor) -> Tensor:
            return (out * grad_of_id[ids]).sum()

        ids = packed.input_ids
        out = tt.attention(*(x[ids] for x in per_id), packed.tree, sinks=sinks, **given_)
        got = torch.autograd.grad(loss(out, ids), leaves)
        total = torch.zeros((), dtype=torch.float64)
        seen = set()
        for row in rows:
            for stop in range(1, len(row)):  # a token counts once, however many rows it is in; last tokens are not run
                if tuple(row[:stop]) in seen:
                    continue
                seen.add(tuple(row[:stop]))
                ids = torch.tensor(row[:stop])
                options = {"scale": 8**-0.5} | given_
                end, depth = torch.full((stop,), stop), torch.arange(stop)
                alone = reference_attention(*(x[ids] for x in per_id), end, depth=depth, sinks=sinks, **options)
                total = total + loss(alone[-1:], ids[-1:])
        assert len(seen) == packed.num_tokens
        if seen:
            for a, b in zip(got, torch.autograd.grad(total, leaves)):
                assert (a - b).norm() <= 1e-12 * (b.norm() or 1.0)  # of a row alone they may be 0

    every_forest()


def scores(model: Decoder, packed, head=None, **options):
    hidden = model(packed.input_ids, packed.positions, packed.tree)
    return tt.prediction_logprobs(hidden, head or model.head, packed, **options)


def alone(model: Decoder, row, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one row, by the model's plain attention."""
    ids = torch.as_tensor(row, dtype=torch.int64)
    logits = model.head(model(ids, torch.arange(len(ids))))[:-1] / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(VOCAB, width=16, windows=(None, 4, None)).double()


@pytest.mark.few(1)
@pytest.mark.parametrize("head", ["linear", "function"])
def test_a_model_of_ones_own_has_the_gradients_of_its_rows_by_themselves_whole_and_in_parts(model, head):
    given_head = None if head == "linear" else lambda x: model.head(x)

    @runs(15)
    @given(forests(max_rows=8, max_length=14), st.integers(1, 30), st.integers(0, 99))
    def every_forest(rows, budget, seed):
        predictions = sum(max(len(row) - 1, 0) for row in rows)
        if not predictions:
            return
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(predictions, dtype=torch.float64, generator=generator)

        def loss_of(part):
            logprobs, entropies = scores(model, part, given_head, temperature=0.8, return_entropy=True)
            return (weight[part.predictions] * (logprobs.exp() + 0.1 * entropies)).sum()

        pieces = [alone(model, row, 0.8) for row in rows if len(row) > 1]
        flat, entropies = (torch.cat(x) for x in zip(*pieces))
        loss = (weight * (flat.exp() + 0.1 * entropies)).sum()
        expected = gradients(model, loss)
        packed = tt.pack(rows)
        assert relative_error(gradients(model, loss_of(packed)), expected) <= 1e-12
        model.zero_grad()
        for times in (1, 2):  # two calls add up
            total = packed.forward_backward(loss_of, budget)
            assert abs(float(total - loss.detach())) <= 1e-12 * max(1, abs(float(loss.detach())))
            assert relative_error(gradients(model), times * expected) <= 1e-12

    every_forest()


def test_parts_take_little_memory_and_run_no_more_than_the_budget_at_once(model):
    rows = [[*range(30), 30 + k] for k in range(4)] + [[*range(15), 34, *range(20)]]
    packed, most = tt.pack(rows), []

    def loss_of(part):
        most.append((part.num_tokens, len(part.predictions), torch.is_grad_enabled()))
        return scores(model, part).sum()

    total = packed.forward_backward(loss_of, 8)
    assert max(tokens for tokens, _, graph in most if graph) <= 8
    assert sum(predictions for _, predictions, _ in most) == sum(len(row) - 1 for row in rows)
    assert all(not predictions for _, predictions, graph in most if not graph) and len(most) > 8
    with torch.no_grad():
        expected = sum(float(alone(model, row)[0].sum()) for row in rows)
    assert float(total) == pytest.approx(expected, rel=1e-12)
    most.clear()
    packed.forward_backward(loss_of)
    assert len(most) == 1, "without a budget, so small a tree is one part"


def test_layers_may_be_checkpointed(model):
    packed = tt.pack([[*range(20), 1, 2], [*range(20), 3, 4], [*range(9), 5, 6, 7]])
    packed.forward_backward(lambda part: scores(model, part).sum(), 6)
    expected = gradients(model)
    model.zero_grad()
    for layer in model.layers:
        plain = layer.forward
        layer.forward = lambda *given, plain=plain: checkpoint(plain, *given, use_reentrant=False)
    packed.forward_backward(lambda part: scores(model, part).sum(), 6)
    assert relative_error(gradients(model), expected) <= 1e-12


def test_losses_of_the_library_and_masks_work_on_the_rows_of_the_result(model):
    weights = [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0, 0], [0, 1]]
    rows = [
        tt.Trajectory(ids, loss_weights=own, advantages=k - 1.5, old_logprobs=[-3.5] * len(ids))
        for k, (ids, own) in enumerate(zip(TREE, weights))
    ]
    loss = tt.losses.grpo()

    def total(per_row) -> Tensor:
        return sum(loss(logprobs, None, row)[0] for logprobs, row in zip(per_row, rows)) / loss.normaliser(rows)

    packed = tt.pack(rows, mask=[own[1:] for own in weights])
    assert packed.num_tokens < tt.pack(rows).num_tokens, "what only left-out predictions need is not computed"
    per_row = packed.split(scores(model, packed))
    assert [len(x) for x in per_row] == [5, 4, 6, 1] and not per_row[2][4:].any()
    expected = gradients(model, total([alone(model, row.ids)[0] for row in rows]))
    assert relative_error(gradients(model, total(per_row)), expected) <= 1e-12


def test_sixteen_bits_under_autocast_stay_close_to_float32(model):
    model.float()
    packed = tt.pack(TREE)
    exact = scores(model, packed).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = scores(model, packed).detach()
        total = packed.forward_backward(lambda part: scores(model, part).sum(), 4)
    assert rounded.dtype == torch.float32 and 0 < float((rounded - exact).abs().max()) < 0.1
    assert float(total) == pytest.approx(float(exact.sum()), rel=0.02)


def test_nothing_to_predict_is_no_error(model):
    for rows in ([], [[]], [[3]]):
        packed = tt.pack(rows)
        assert packed.num_tokens == 0 and len(scores(model, packed)) == 0
        assert float(packed.forward_backward(lambda part: scores(model, part).sum(), 4)) == 0


def wrong_call(**changes):
    packed = tt.pack(TREE)
    n = packed.num_tokens
    given_ = {"query": torch.zeros(n, 4, 8), "key": torch.zeros(n, 2, 8), "value": torch.zeros(n, 2, 6)} | changes
    return tt.attention(*(given_.pop(name) for name in ("query", "key", "value")), packed.tree, **given_)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query": torch.zeros(1, 4, 9, 8)}, r"query has shape \[1, 4, 9, 8\]; expected \[9, heads, head size\]"),
        ({"value": torch.zeros(8, 2, 6)}, r"value has shape \[8, 2, 6\]; expected \[9,"),
        ({"key": torch.zeros(9, 3, 8)}, "4 heads of queries, 3 of keys, 2 of values"),
        ({"query": torch.zeros(9, 5, 8)}, "5 heads of queries, 2 of keys"),
        ({"key": torch.zeros(9, 2, 6)}, "queries have 8 entries, those of keys 6"),
        ({"key": torch.zeros(9, 2, 8).double()}, "key torch.float64 on cpu.*one floating dtype"),
        ({"value": torch.zeros(9, 2, 6, device="meta")}, "value torch.float32 on meta"),
        ({"sinks": torch.zeros(2)}, r"sinks have shape \[2\]; expected \[4\]"),
        ({"window": 3, "chunk": 3}, "give one size"),
        ({"window": 0}, "at least 1"),
        ({"softcap": 0.0}, r"softcap=0\.0: give a number above 0"),
        ({"backend": "flash"}, "no tree attention is named 'flash'"),
        ({"backend": "varlen"}, "'varlen' cannot run on 'cpu': it needs a CUDA device"),
    ],
)
def test_attention_refuses_what_does_not_fit_and_says_what_would(changes, says):
    with unchecked(), pytest.raises(ValueError, match=says):
        wrong_call(**changes)
    assert wrong_call(backend="rectangles").shape == (9, 4, 6)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda m, p: tt.prediction_logprobs(torch.zeros(3, 16), m.head, p), ValueError, r"\[3, 16\]; expected \[9,"),
        (lambda m, p: scores(m, p, temperature=0.0), ValueError, r"temperature=0\.0"),
        (lambda m, p: scores(m, p, lambda x: x[:, :8]), tt.DataError, "token id 9 is predicted, but the head gives 8"),
        (lambda m, p: p.forward_backward(lambda part: scores(m, part), 4), ValueError, "give a scalar tensor"),
        (lambda m, p: p.forward_backward(lambda part: 0.0, 4), ValueError, "the loss of a part is 0.0"),
        (lambda m, p: p.forward_backward(lambda part: scores(m, part).sum(), 0), ValueError, "budget of 0 tokens"),
        (lambda m, p: tt.pack(TREE, mask=[[1]]), tt.DataError, "mask has 1 rows, the batch 4"),
        (lambda m, p: tt.pack([[1, -2]]), tt.DataError, "-2"),
    ],
)
def test_scores_and_parts_refuse_by_name(model, call, error, says):
    with pytest.raises(error, match=says):
        call(model, tt.pack(TREE))


def test_a_part_needs_the_number_of_each_layer_once(model):
    def with_numbers(*numbers):
        for layer, number in zip(model.layers, numbers):
            layer.number = number
        return tt.pack(TREE).forward_backward(lambda part: scores(model, part).sum(), 4)

    with pytest.raises(ValueError, match="layer=1 was given by several calls"):
        with_numbers(0, 1, 1)
    with pytest.raises(ValueError, match="give layer="):
        with_numbers(None, None, None)
    assert float(with_numbers("a", "b", "c")) < 0
