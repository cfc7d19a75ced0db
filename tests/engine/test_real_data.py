"""Gradients on samples of all the real data at hand: float32, against the rows computed by themselves."""

import functools

import numpy as np
import pytest

import treetrain as tt
from support.models import make_model
from support.plans import KEEPS, SHAPES, planned
from support.real_rows import SETS, renumbered
from treetrain.check import linear


@pytest.fixture(scope="module")
def tokenizer(shared_data):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(shared_data / "tokenizer-qwen3")


VOCABULARY = 1500


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3", vocab_size=VOCABULARY, hidden_size=32, tie_word_embeddings=True)


ENTROPY = 0.01
LOSSES = {
    "sft": (tt.losses.sft(), lambda logp, h, facts: -logp),
    "ppo": (
        tt.losses.ppo(clip=0.2, entropy=ENTROPY),
        lambda logp, h, facts: linear.clipped(logp, facts, 0.2, 0.2) - ENTROPY * h,
    ),
}


class Truth:
    """Rows of real data with facts, and what the linear reference makes of them."""

    def __init__(self, model, rows: list[tt.Trajectory]):
        scores = linear.score_rows(model, [row.ids.tolist() for row in rows])
        rng = np.random.default_rng(0)
        self.rows = [
            row.replace(
                advantages=float(rng.normal()),
                # Ratios around 1, some beyond the bounds.
                old_logprobs=np.append(0.0, np.minimum(logp.detach().numpy() + rng.normal(0, 0.15, len(logp)), 0)),
            )
            for row, logp in zip(rows, scores[0])
        ]
        self.loss, self.gradient = {}, {}
        for case, (_, per_token) in LOSSES.items():
            loss = linear.batch_loss(scores, self.rows, per_token)
            self.loss[case], self.gradient[case] = (
                float(loss.detach()),
                linear.gradients(model, loss, retain_graph=True),
            )

    def check(self, model, case: str, engine=tt.TreeEngine):
        """(error, result) of a step, which must be within the contract."""
        model.zero_grad()
        result = engine(model).forward_backward(self.rows, LOSSES[case][0])
        error = linear.relative_error(linear.gradients(model), self.gradient[case])
        assert error <= 1e-5
        assert result.loss == pytest.approx(self.loss[case], rel=1e-5, abs=1e-6)
        return error, result


@pytest.fixture(scope="module")
def truths(shared_data, tokenizer, model):
    """The truth of each set, made when it is first asked for."""
    return functools.cache(lambda name: Truth(model, renumbered(SETS[name](shared_data, tokenizer), VOCABULARY)))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SETS)
def test_gradients_on_real_trajectories_are_those_of_the_rows(name, truths, model, record_property):
    truth = truths(name)
    tree = tt.build_tree(truth.rows)
    assert tree.num_tokens < 0.7 * tree.num_flat_tokens, "this sample shares nothing"
    assert sum(row.weights.sum() for row in truth.rows) > 50
    assert tt.stats(tree).forks >= 2 and tree.num_tokens > 250
    for case in LOSSES:
        error, result = truth.check(model, case)
        record_property(case, error)
        assert result.computed_tokens <= tree.num_tokens


QUICK = [("N/4", "mixed", "ppo"), ("N/16", "none", "sft"), ("one segment per part", "all", "ppo")]
HEAVY = [
    (shape, keep, case)
    for shape in SHAPES
    for keep in KEEPS
    for case in LOSSES
    if shape not in ("1 part", "chunks of 2", "shared prefill") and (shape, keep, case) not in QUICK
]


@pytest.mark.parametrize(
    ("shape", "keep", "case"), QUICK + [pytest.param(*combination, marks=pytest.mark.slow) for combination in HEAVY]
)
@pytest.mark.parametrize("name", SETS)
def test_every_plan_of_real_trajectories_gives_the_gradients_of_the_rows(
    name, shape, keep, case, truths, model, record_property
):
    engine = planned(shape, keep)
    error, result = truths(name).check(model, case, engine)
    record_property(case, error)
    plan = engine.plans[-1]
    assert result.parts == plan.num_parts >= (2 if shape == "N/2" else 4)
    assert result.recomputed_tokens == plan.recomputed_tokens and (keep == "all") <= (plan.recomputed_tokens == 0)


@pytest.mark.parametrize(("name", "case"), [("tau_airline", "sft"), ("tot_game24_bfs", "ppo")])
def test_a_budget_of_a_quarter_of_real_trajectories_gives_the_gradients_of_the_rows(name, case, truths, model):
    tokens = tt.TreeEngine(model).plan(truths(name).rows).layout.num_tokens
    engine = functools.partial(tt.TreeEngine, budget=tokens // 4)
    _, result = truths(name).check(model, case, engine)
    assert result.parts > 3 and engine(model).plan(truths(name).rows).peak_tokens <= tokens // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_the_tokenizers_own_vocabulary_changes_nothing(name, shared_data, tokenizer):
    model = make_model("qwen3", vocab_size=len(tokenizer), hidden_size=32, tie_word_embeddings=True)
    truth = Truth(model, SETS[name](shared_data, tokenizer))
    for case in LOSSES:
        for engine in (tt.TreeEngine, planned("N/4", "mixed")):
            truth.check(model, case, engine)
