"""Scores at given ids, sampling masks and a teacher's ids, against formulas over each row's whole logits."""

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor

import treetrain as tt
from support.models import make_model
from support.plans import calls_answer, keeping_graphs, planned
from support.scored_rows import ROWS, every_plan, every_way
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.check.forests import VOCAB

TEMPERATURE = 1.3
Sets = list[list[int] | None]


@pytest.fixture(autouse=True)
def pure_float64():
    """Norms of transformers that compute in float32 do not."""
    with PureFloat64():
        yield


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])  # gemma2 caps its logits
def model(request):
    return make_model(request.param, dtype=torch.float64)


def random_sets(row: list[int], rng: np.random.Generator, *, own: bool) -> Sets:
    """Sets of 1 to 12 ids, with the row's own token if `own`; a quarter of the tokens have none, nor has the first."""
    sets: Sets = []
    for at, token in enumerate(row):
        ids = rng.choice(VOCAB, rng.integers(1, 13), replace=False).tolist()
        ids = [token] if own and rng.random() < 0.2 else ids  # top-k of 1
        ids = [*(x for x in ids if x != token), token] if own else ids
        sets.append(None if at == 0 or rng.random() < 0.25 else ids)
    return sets


def dressed(seed: int = 0) -> list[tt.Trajectory]:
    """The rows with sampling masks, teachers and facts; the last three but one without sets."""
    rng, rows = np.random.default_rng(seed), []
    for number, row in enumerate(ROWS):
        n = len(row)
        topk = random_sets(row, rng, own=False)
        topk = [None if at == 0 else ids or [3] for at, ids in enumerate(topk)]
        recorded = [None if x is None else np.log(rng.dirichlet(np.ones(len(x) + 1))[1:]) for x in topk]
        rows.append(
            tt.Trajectory(
                row,
                loss_weights=rng.uniform(0.3, 2, n) * (rng.random(n) > 0.2),
                advantages=rng.normal(size=n),
                old_logprobs=rng.uniform(-4, -0.5, n),
                ref_logprobs=rng.uniform(-4, -0.5, n),
                sampling_mask=None if number in (3, 6) else random_sets(row, rng, own=True),
                teacher_topk=(topk, recorded),
                pair=number // 2,
                chosen=number % 2 == 0,
            )
        )
    return rows


def log_p_of(model, row) -> Tensor:
    """Log-probabilities [L - 1, V] over the vocabulary, by the plain model on the row alone."""
    if len(row) < 2:
        return torch.zeros(0, VOCAB, dtype=torch.float64)
    ids = torch.tensor([[int(x) for x in row]])
    return (model(input_ids=ids).logits[0, :-1].double() / TEMPERATURE).log_softmax(-1)


def sets_of(row: tt.Trajectory, field: str) -> Sets:
    sets = getattr(row, field)
    return [sets.ids[a:b].tolist() or None for a, b in zip(sets.starts[1:-1], sets.starts[2:])] if len(row) else []


def expected_logprobs(log_p: Tensor, row: tt.Trajectory) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, token by token, over the kept ids where there are some."""
    logprobs, entropies = [], []
    masks = [None] * len(log_p) if row.sampling_mask is None else sets_of(row, "sampling_mask")
    for every, token, kept in zip(log_p, row.ids[1:].tolist(), masks):
        own = every if kept is None else every[sorted(kept)].log_softmax(-1)
        logprobs.append(own[token] if kept is None else own[sorted(kept).index(token)])
        entropies.append(-(own.exp() * own).sum())
    if not logprobs:
        return log_p.new_zeros(0), log_p.new_zeros(0)
    return torch.stack(logprobs), torch.stack(entropies)


def engine_with(model, shape, keep, graphs):
    engine = planned(shape, keep)(model, temperature=TEMPERATURE)
    calls_answer(engine, plan_keeping_graphs=keeping_graphs(graphs))
    return engine


def some_loss(logprobs, entropies, of_ids) -> Tensor:
    """Not linear, with other weights for every row and number."""
    total = torch.zeros((), dtype=torch.float64)
    for number, numbers in enumerate(zip(logprobs, entropies, of_ids)):
        for factor, x in zip((1.0, 0.5, 0.7), numbers):
            weights = torch.linspace(0.3, 1.7, len(x), dtype=x.dtype) * (number + factor)
            total = total + (weights * (x.exp() + 0.2 * x.square())).sum() + factor * x.sum() ** 2 / 9
    return total


@pytest.mark.few(1)
@every_way
@every_plan
def test_scores_at_ids_and_over_kept_ids_have_the_gradients_of_rows_alone(model, shape, keep, graphs, record_property):
    rows, rng = dressed(), np.random.default_rng(1)
    asked: list[Sets] = [random_sets(row[1:], rng, own=False) for row in ROWS]
    asked[1][-1] = [24, 5]  # type: ignore[index] # the token itself too
    log_p = [log_p_of(model, row) for row in ROWS]
    logprobs, entropies = zip(*(expected_logprobs(own, row) for own, row in zip(log_p, rows)))
    of_ids = [
        torch.cat([own.new_zeros(0), *(every[ids] for every, ids in zip(own, sets) if ids is not None)])
        for own, sets in zip(log_p, asked)
    ]
    loss = some_loss(logprobs, entropies, of_ids)
    truth = linear.gradients(model, loss)
    model.zero_grad()
    scored = engine_with(model, shape, keep, graphs).score(rows, entropies=True, ids=asked)
    for kind, pairs in (
        ("logprobs", zip(scored.logprobs, logprobs, strict=True)),
        ("entropies", zip(scored.entropies, entropies, strict=True)),
        ("ids", zip(scored.id_logprobs, of_ids, strict=True)),
    ):
        for own, right in pairs:
            assert own.shape == right.shape and torch.allclose(own, right, rtol=1e-12, atol=1e-12), kind
    found = some_loss(scored.logprobs, scored.entropies, scored.id_logprobs)
    found.backward()
    scored.backward()
    assert abs(float(found - loss)) <= 1e-12 * abs(float(loss))
    error = linear.relative_error(linear.gradients(model), truth)
    record_property("errors", {"float64": error})
    assert error <= 1e-12
    assert scored.plan.scores_first == graphs.replace("partly", "kept")


def weighted_sum(per_token, model, rows) -> Tensor:
    """The mean over weighted tokens, row by row."""
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        log_p = log_p_of(model, row.ids)
        own = torch.tensor(row.weights[1:])
        if len(log_p) and own.any():
            total = total + (own * per_token(log_p, row)).sum()
            weights += float(own.sum())
    return total / weights


def clipped_with_kl(log_p: Tensor, row: tt.Trajectory) -> Tensor:
    """PPO's surrogate, KL by k3 and entropy, over the kept ids."""
    logprobs, entropies = expected_logprobs(log_p, row)
    old, ref, advantages = (torch.tensor(x[1:]) for x in (row.old_logprobs, row.ref_logprobs, row.advantages))
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -surrogate + 0.1 * ((ref - logprobs).exp() - 1 - (ref - logprobs)) - 0.05 * entropies


def divergence(kind: str):
    """KL(p || q), KL(q || p) or Jensen-Shannon over the teacher's ids and the rest, written out."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum()

    def per_token(log_p: Tensor, row: tt.Trajectory) -> Tensor:
        losses, sets = [], row.teacher_topk
        assert sets is not None and sets.logprobs is not None
        for at, every in enumerate(log_p, start=1):
            some = slice(sets.starts[at], sets.starts[at + 1])
            p, q = torch.tensor(sets.logprobs[some]).exp(), every[sets.ids[some].tolist()].exp()
            p, q = (torch.cat([x, 1 - x.sum()[None]]) for x in (p, q))
            m = (p + q) / 2
            losses.append({"forward": kl(p, q), "reverse": kl(q, p), "jensen_shannon": (kl(p, m) + kl(q, m)) / 2}[kind])
        return torch.stack(losses)

    return per_token


LOSSES = {
    "ppo": (tt.losses.ppo(kl=0.1, entropy=0.05), clipped_with_kl),
    "reinforce": (
        tt.losses.reinforce(),  # linear in the log-probabilities, which is no longer so over kept ids
        lambda log_p, row: -torch.tensor(row.advantages[1:]) * expected_logprobs(log_p, row)[0],
    ),
    **{
        kind: (tt.losses.distill_topk(divergence=kind), divergence(kind))  # type: ignore[arg-type]
        for kind in ("forward", "reverse", "jensen_shannon")
    },
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LOSSES)
@every_plan
def test_a_step_over_given_ids_has_the_gradients_of_rows_alone(model, shape, keep, name, record_property):
    loss, per_token = LOSSES[name]
    rows = dressed()
    expected = weighted_sum(per_token, model, rows)
    truth = linear.gradients(model, expected)
    model.zero_grad()
    result = planned(shape, keep)(model, temperature=TEMPERATURE).forward_backward(rows, loss)
    assert abs(result.loss - float(expected)) <= 1e-12 * max(1, abs(float(expected)))
    error = linear.relative_error(linear.gradients(model), truth)
    record_property("errors", {"float64": error})
    assert error <= 1e-12


def test_ids_outside_the_vocabulary_and_wrong_lists_are_refused_by_row_and_position(model):
    engine = tt.TreeEngine(model)
    rows = [[1, 2, 3], [1, 2, 4, 5]]
    for ids, message in (
        ([None], r"ids has 1 rows, the batch 2"),
        ([None, [[1], None]], r"ids\[1\] has 2 entries for 3 tokens"),
        ([None, [[1], [2, 2], None]], r"ids\[1\]\[1\] has the id 2 twice"),
        ([None, [[1], [VOCAB], None]], rf"trajectory number 1 \(from 0\): id {VOCAB}, asked at position 2, is outside"),
    ):
        with pytest.raises(tt.DataError, match=message):
            engine.score(rows, ids=ids)
    outside = tt.Trajectory([1, 2, 3], id="last", sampling_mask=[None, None, [3, VOCAB + 3]])
    with pytest.raises(tt.DataError, match=f"trajectory 'last': id {VOCAB + 3}, kept at position 2, is outside"):
        engine.forward_backward([tt.Trajectory([1, 2]), outside], tt.losses.sft())
    masked = tt.Trajectory([1, 2, 3], sampling_mask=[None, None, [3, 4]])
    with pytest.raises(tt.DataError, match=rf"trajectory number 0 \(from 0\): id {VOCAB}, asked at position 1"):
        engine.score([masked], ids=[[[VOCAB], None]])  # the kept ids are inside
    with pytest.raises(tt.DataError, match="the rows have sampling masks, which"):
        tt.pack([tt.Trajectory([1, 2, 3], sampling_mask=[None, [2], None])])


def test_a_teacher_without_ids_at_a_trained_token_or_with_too_much_mass_is_refused(model):
    engine, loss = tt.TreeEngine(model), tt.losses.distill_topk()
    row = tt.Trajectory([1, 2, 3], id="a", teacher_topk=([None, [4], None], [None, [-1], None]))
    with pytest.raises(
        tt.DataError, match=r"trajectory 'a': teacher_topk\[2\] has no ids, but token 3 there is trained"
    ):
        engine.forward_backward([row], loss)
    engine.forward_backward([row.replace(loss_weights=[0, 1, 0])], loss)
    row = tt.Trajectory([1, 2], id="b", teacher_topk=([None, [4, 5]], [None, [-0.1, -0.2]]))
    with pytest.raises(tt.DataError, match=r"trajectory 'b': the probabilities of teacher_topk\[1\] sum to 1.72357"):
        engine.forward_backward([row], loss)
    for mass, refused in ((1.009, False), (1.011, True)):  # rounding to a few digits, and more than that
        row = tt.Trajectory([1, 2], teacher_topk=([None, [4, 5]], [None, np.log([0.5 * mass] * 2).tolist()]))
        with pytest.raises(tt.DataError, match=r"sum to 1\.011") if refused else contextlib.nullcontext():
            engine.forward_backward([row], loss)
    model.zero_grad()
    with pytest.raises(tt.DataError, match="has no teacher_topk, which the loss needs"):
        engine.forward_backward([tt.Trajectory([1, 2])], loss)


class Asking:
    """A loss of a user's own that cannot be given scores at ids."""

    needs = ("logprobs", "id_logprobs")

    def __call__(self, logprobs, entropies, row):
        return logprobs.sum(), {}


def test_a_loss_of_ones_own_is_told_where_scores_at_ids_are(model):
    with pytest.raises(TypeError, match=r"Asking needs id_logprobs: take TreeEngine.score\(rows, ids=...\)"):
        tt.TreeEngine(model).forward_backward([[1, 2]], Asking(), 1.0)


def test_a_token_that_is_all_but_certain_keeps_its_digits():
    model = make_model("qwen3", dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)
        logits = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1]
    sure = int(logits.argmax())
    others = [x for x in range(VOCAB) if x not in (sure, int(logits.topk(2).indices[1]))]
    row = tt.Trajectory([1, 2, sure], sampling_mask=[None, None, [sure, *others]])
    expected = -float((logits[others] - logits[sure]).exp().sum().log1p())
    (found,) = tt.TreeEngine(model).logprobs([row])
    assert -1e-5 < expected < 0 and abs(float(found[1]) - expected) <= 1e-13 * abs(expected)


def test_predictions_that_a_mask_leaves_out_have_zeros_at_their_ids(model):
    rows, ids = [[1, 2, 3, 4], [1, 2, 5]], [[[7, 8], None, [9]], np.array([[3, 4], [-1, 6]])]
    whole = tt.TreeEngine(model).score(rows, ids=ids).id_logprobs
    some = tt.TreeEngine(model).score(rows, ids=ids, mask=[[1, 1, 0], [0, 1]])
    assert [len(row) for row in whole] == [3, 3]
    assert torch.allclose(some.id_logprobs[0], whole[0] * torch.tensor([1, 1, 0]))
    assert torch.allclose(some.id_logprobs[1], whole[1] * torch.tensor([0, 0, 1]))
    some.id_logprobs[0].sum().backward()
    some.backward()
