"""A teacher on the same tree: its most likely ids, and divergences over the whole vocabulary, against rows alone."""

import functools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import treetrain as tt
from support.models import VOCAB, make_model
from support.shortage import IDS, Shortage, freed_at_once, named_budget
from treetrain import distill
from treetrain.check import linear
from treetrain.check.contract import PureFloat64
from treetrain.core.errors import UnsupportedModel

ROWS = [
    tt.Trajectory([3, 5, 7, 9, 1], loss_weights=[0, 1, 0.5, 0, 2]),
    tt.Trajectory([3, 5, 7, 8], loss_weights=[0, 0, 1.5, 1]),
    [3, 5, 2],
    [3, 5, 7, 8],
    [4],
    [],
    [6, 1, 1, 2],
]
TEMPERATURE, TEACHERS = 0.7, 1.2


@pytest.fixture(autouse=True)
def pure_float64():
    """Norms of transformers that compute in float32 do not."""
    with PureFloat64():
        yield


@pytest.fixture(scope="module")
def teacher() -> Any:
    torch.manual_seed(5)
    model = make_model("llama", dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2).add_(0.3 * torch.randn_like(p))
    return model


@functools.cache
def student(name: str = "qwen3") -> Any:
    """A model by its family; or one whose head has a bias, an adapter, a hook before it or another forward."""
    model = make_model(name if name == "gemma2" else "qwen3", dtype=torch.float64)
    if name == "bias":
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, VOCAB, dtype=torch.float64))
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(model, config).double()
    if name == "forward":
        head = model.lm_head
        head.forward = lambda states: nn.functional.linear(states.tanh(), head.weight)
    if name == "hook":
        model.lm_head.register_forward_pre_hook(lambda _head, given: (given[0].tanh(),))
    return model


def rows_alone():
    return [row if isinstance(row, tt.Trajectory) else tt.Trajectory(row) for row in ROWS]


def log_p_of(model: nn.Module, row: tt.Trajectory, temperature: float) -> Tensor:
    ids = torch.tensor([row.ids.tolist()])
    return (model(input_ids=ids).logits[0, :-1].double() / temperature).log_softmax(-1)


def expected(kind: str, model: nn.Module, teacher: nn.Module) -> Tensor:
    """The weighted mean over predictions, row by row and id by id."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows_alone():
        if len(row) < 2:
            continue
        with torch.no_grad():
            p = log_p_of(teacher, row, TEACHERS).exp()
        q = log_p_of(model, row, TEMPERATURE).exp()
        m = (p + q) / 2
        each = {"forward": kl(p, q), "reverse": kl(q, p), "jensen_shannon": (kl(p, m) + kl(q, m)) / 2}[kind]
        total = total + (torch.tensor(row.weights[1:]) * each).sum()
        weights += float(row.weights.sum())
    return total / weights


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen_shannon"])
@pytest.mark.parametrize(
    ("name", "budget", "states"),  # gemma2 caps its logits
    [
        *(("qwen3", None, 99), ("qwen3", 2, 99), ("gemma2", None, 2)),
        *((changed, None, 2) for changed in ("bias", "lora", "hook", "forward")),
    ],
)
def test_a_divergence_over_the_vocabulary_has_the_gradients_of_rows_alone(
    monkeypatch, teacher, kind, name, budget, states, record_property
):
    monkeypatch.setattr(distill, "head_chunk_rows", lambda _vocabulary, _device: states)
    model = student(name)
    truth_loss = expected(kind, model, teacher)
    truth = linear.gradients(model, truth_loss)
    model.zero_grad()
    engine = tt.TreeEngine(model, budget=budget, temperature=TEMPERATURE)
    result = engine.distill(ROWS, tt.TreeEngine(teacher, temperature=TEACHERS), kind)
    assert abs(result.loss - float(truth_loss)) <= 1e-12 * float(truth_loss)
    assert result.metrics["divergence"] == pytest.approx(result.loss, rel=1e-12)
    error = linear.relative_error(linear.gradients(model), truth)
    record_property("errors", {"float64": error})
    assert error <= 1e-12
    assert result.computed_tokens < sum(len(row) for row in ROWS) - 4
    assert all(p.grad is None for p in teacher.parameters())
    model.zero_grad()


def test_gradients_add_up_and_a_normaliser_divides(teacher):
    model, taught = student(), tt.TreeEngine(teacher)
    engine = tt.TreeEngine(model)
    model.zero_grad()
    engine.distill(ROWS, taught, normaliser=2.0)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    engine.distill(ROWS, taught, normaliser=1.0)
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, 3 * once[name], rtol=1e-12, atol=1e-15), name
    model.zero_grad()


def test_a_tied_head_and_a_frozen_one_get_what_they_should(teacher):
    for tied in (True, False):
        model = make_model("qwen3", dtype=torch.float64, tie_word_embeddings=tied)
        model.lm_head.requires_grad_(tied)
        loss = expected("forward", model, teacher)
        truth = linear.gradients(model, loss)
        model.zero_grad()
        tt.TreeEngine(model, temperature=TEMPERATURE).distill(ROWS, tt.TreeEngine(teacher, temperature=TEACHERS))
        assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
        assert tied or model.lm_head.weight.grad is None


def test_a_teacher_gives_its_most_likely_ids_at_trained_predictions(monkeypatch, teacher):
    monkeypatch.setattr(distill, "head_chunk_rows", lambda _vocabulary, _device: 3)
    made = tt.TreeEngine(teacher, temperature=TEMPERATURE).teach(ROWS, 4)
    for row, given in zip(rows_alone(), made, strict=True):
        sets = given.teacher_topk
        assert sets is not None and given.ids.tolist() == row.ids.tolist()
        assert sets.counts.tolist() == (4 * (row.weights != 0)).tolist()
        if len(row) < 2:
            continue
        right = log_p_of(teacher, row, TEMPERATURE).detach().topk(4)
        for at in np.flatnonzero(row.weights):
            own = slice(sets.starts[at], sets.starts[at + 1])
            assert sets.ids[own].tolist() == right.indices[at - 1].tolist()
            assert np.allclose(sets.logprobs[own], right.values[at - 1], rtol=1e-12)


def test_what_a_teacher_gives_trains_a_student(teacher):
    model = student()
    made = tt.TreeEngine(teacher).teach(ROWS, VOCAB - 1)  # all but one id: the rest is that id
    part = tt.TreeEngine(model).forward_backward(made, tt.losses.distill_topk())
    of_part = linear.gradients(model)
    model.zero_grad()
    whole = tt.TreeEngine(model).distill(ROWS, tt.TreeEngine(teacher))
    assert part.loss == pytest.approx(whole.loss, rel=1e-12)
    assert linear.relative_error(linear.gradients(model), of_part) <= 1e-12
    model.zero_grad()


def test_a_teacher_routes_by_itself_where_rows_have_the_experts_of_the_student():
    student, teacher = (make_model("qwen3_moe", dtype=torch.float64, seed=seed) for seed in (1, 2))
    layers = student.config.num_hidden_layers
    chosen = np.random.default_rng(0).permuted(np.tile(np.arange(4), (len(ROWS), 9, layers, 1)), axis=-1)[..., :2]
    rows = [row.replace(experts=of_row[: len(row)]) for row, of_row in zip(rows_alone(), chosen) if len(row) > 1]
    engine = tt.TreeEngine(student)
    every = [[range(VOCAB)] * (len(row) - 1) for row in rows]
    scored = engine.score(rows, ids=every)  # of the student with the recorded experts
    assert scored.id_logprobs is not None
    loss, weights = torch.zeros((), dtype=torch.float64), 0.0
    for row, q in zip(rows, scored.id_logprobs):
        p = log_p_of(teacher, row, TEACHERS).detach()
        each = (p.exp() * (p - q.view(-1, VOCAB))).sum(-1)
        loss, weights = loss + (torch.tensor(row.weights[1:]) * each).sum(), weights + row.weights[1:].sum()
    (loss / weights).backward()
    scored.backward()
    truth = linear.gradients(student)
    for taught in (teacher, make_model("llama", dtype=torch.float64)):  # which has no experts
        student.zero_grad()
        result = engine.distill(rows, tt.TreeEngine(taught, temperature=TEACHERS))
        assert taught is not teacher or result.loss == pytest.approx(float(loss / weights), rel=1e-12)
        assert taught is not teacher or linear.relative_error(linear.gradients(student), truth) <= 1e-12
        own, plain = (tt.TreeEngine(taught).teach(given, 3) for given in (rows, [row.ids for row in rows]))
        for row, other in zip(own, plain):
            assert row.teacher_topk is not None and other.teacher_topk is not None
            trained = np.repeat(row.weights[1:] != 0, 3)
            assert row.teacher_topk.ids.tolist() == other.teacher_topk.ids[trained].tolist()


def test_distillation_starts_over_where_memory_runs_out_in_backward(teacher):
    model, taught = make_model("qwen3", dtype=torch.float64), tt.TreeEngine(teacher)
    tt.TreeEngine(model).distill(IDS, taught)
    truth = linear.gradients(model)
    model.zero_grad()
    with freed_at_once(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = tt.TreeEngine(model, check=False)
        with Shortage(model, backward=2) as shortage:
            engine.distill(IDS, taught)
        assert shortage.failures and named_budget(caught)
        assert linear.relative_error(linear.gradients(model), truth) <= 1e-12
        with (
            Shortage(model, backward=2),
            pytest.raises(RuntimeError, match=r"gradients of earlier calls lay in \.grad"),
        ):
            engine.distill(IDS, taught)


@pytest.mark.parametrize("tokens", [("a", "b"), ("b", "a"), ("a", "b", "c")])
def test_a_teacher_with_another_tokenizer_of_the_same_size_is_refused(teacher, tmp_path, monkeypatch, tokens):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    model = student()
    for name, own, known in (("student", model, ("a", "b")), ("teacher", teacher, tokens)):
        (tmp_path / name).mkdir()
        Tokenizer(WordLevel(dict(zip(known, range(3))), unk_token="a")).save(str(tmp_path / name / "tokenizer.json"))
        monkeypatch.setattr(own.config, "_name_or_path", str(tmp_path / name))
    if tokens[:2] == ("a", "b"):  # no id that both have is another token
        tt.TreeEngine(model).distill(ROWS, tt.TreeEngine(teacher))
        return model.zero_grad()
    with pytest.raises(UnsupportedModel, match=r"student\) has 'a' at id 0, the teacher's \(.*teacher\) 'b'"):
        tt.TreeEngine(model).distill(ROWS, tt.TreeEngine(teacher))


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "rows"), [(151_936, 9_999, 16), (8_192, 9_999, 256), (8_192, 100, 100), (151_936, 1, 4)]
)
def test_few_logits_are_in_memory_at_a_time(vocabulary, tokens, rows):
    inputs: Any = SimpleNamespace(
        _capabilities=SimpleNamespace(vocab_size=vocabulary),
        states=torch.zeros(300, 1),
        scored=SimpleNamespace(plan=SimpleNamespace(peak_tokens=tokens)),
    )
    chunks = [range(300)[some] for some in distill.HeadInputs.chunks(inputs)]
    assert len(chunks[0]) == rows and [k for chunk in chunks for k in chunk] == list(range(300))


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_the_head_are_refused(teacher, hook):
    model = make_model("qwen3", dtype=torch.float64)
    getattr(model.lm_head, hook)(lambda *_: None)
    with pytest.raises(UnsupportedModel, match="runs the LM head backward itself"):
        tt.TreeEngine(model).distill(ROWS, tt.TreeEngine(teacher))


def test_what_cannot_be_distilled_is_refused_by_name(teacher):
    engine, taught = tt.TreeEngine(student()), tt.TreeEngine(teacher)
    other = make_model("llama", dtype=torch.float64, vocab_size=VOCAB + 3)
    with pytest.raises(
        tt.UnsupportedModel, match=rf"vocabulary of {VOCAB}, the teacher LlamaForCausalLM one of {VOCAB + 3}"
    ):
        engine.distill(ROWS, tt.TreeEngine(other))
    with pytest.raises(ValueError, match="divergence is 'kl'; give 'forward', 'reverse', 'jensen_shannon'"):
        engine.distill(ROWS, taught, "kl")  # type: ignore[arg-type]
    with pytest.raises(tt.DataError, match="the normaliser is 0"):
        engine.distill([[1], [2]], taught)
    with pytest.raises(tt.DataError, match="rows have sampling masks"):
        engine.distill([tt.Trajectory([1, 2], sampling_mask=[None, [2]])], taught)
    with pytest.raises(ValueError, match="k is 0; give a number of ids, from 1"):
        taught.teach(ROWS, 0)
    with torch.no_grad(), pytest.raises(ValueError, match="gradients are switched off"):
        engine.distill(ROWS, taught)
    seen = student().lm_head.weight.register_hook(lambda grad: grad)
    with pytest.raises(tt.UnsupportedModel, match="its hooks would not see"):
        engine.distill(ROWS, taught)
    seen.remove()
