"""Critics, reward models and value heads on trees: values and gradients are those of every row by itself."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from torch import Tensor, nn

import treetrain as tt
from support.models import FAMILIES, build, make_config, make_model
from support.plans import planned
from treetrain.check import linear
from treetrain.check.contract import PureFloat64, as_dtype
from treetrain.check.forests import forests, runs

# Forks at several depths, a row that is the prefix of others, exact duplicates, single tokens, no tokens.
IDS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [1, 2, 3, 7], [1, 9], [1], [], [9, 8, 7], [9, 8, 7, 2, 2]]
PLANS = [
    ("1 part", "all"),
    *((shape, keep) for shape in ("chunks of 7", "chunks of 2") for keep in ("none", "all", "mixed")),
]


def critic(dtype=torch.float64, *, kind: str = "TokenClassification", labels: int = 1, family: str = "qwen3"):
    """A small critic or reward model."""
    config = make_config(family)
    config.num_labels = labels
    name = FAMILIES[family].model.replace("ForCausalLM", f"For{kind}").replace("LMHeadModel", f"For{kind}")
    return build(getattr(transformers, name), config, dtype=dtype)


def head_of(model, dtype=torch.float64, *, seed: int = 3, labels: int = 1) -> nn.Module:
    """A user's own head: two layers with a bend between."""
    torch.manual_seed(seed)
    hidden = model.config.hidden_size
    head = nn.Sequential(nn.Linear(hidden, 8), nn.Tanh(), nn.Linear(8, labels)).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
    return head


def plain_values(model, ids, head=None) -> Tensor:
    """[L] or [L, c] by the plain model."""
    row = torch.tensor([ids])
    if head is None:
        found = model(input_ids=row).logits[0]
    else:
        hidden = model.model(input_ids=row).last_hidden_state[0]
        found = head(hidden.to(next(head.parameters()).dtype))
    found = found.squeeze(-1) if found.dim() == 2 and found.shape[1] == 1 else found
    return found.to(torch.promote_types(model.dtype, torch.float32))


def dressed(ids=IDS, seed: int = 0) -> list[tt.Trajectory]:
    """Rows with everything an actor-critic reads; some tokens and rows untrained."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, row in enumerate(ids):
        length = len(row)
        weights = rng.choice([0.0, 1.0, 2.0], length) if number != 4 else np.zeros(length)
        rows.append(
            tt.Trajectory(
                row,
                loss_weights=weights,
                advantages=rng.normal(size=length),
                old_logprobs=rng.normal(size=length) * 0.2 - 3.5,
                values=rng.normal(size=length) * 0.3,
                returns=rng.normal(size=length),
            )
        )
    return rows


def gradients(*modules) -> Tensor:
    """All gradients in .grad, flattened and concatenated."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in parameters])


def clipped_square(v: Tensor, row: tt.Trajectory, clip: float) -> Tensor:
    """[L - 1] PPO's value loss, written out."""
    old, target = (torch.tensor(x[1:], dtype=v.dtype) for x in (row.values, row.returns))
    bounded = torch.maximum(torch.minimum(v, old + clip), old - clip)
    return 0.5 * torch.maximum((v - target) ** 2, (bounded - target) ** 2)


def expected_step(model, rows, *, head=None, policy: bool, reduction="token", clip=0.2, coefficient=0.5) -> float:
    """Loss of an actor-critic (or of a critic) row by row with the plain model; gradients into .grad."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        weights = torch.tensor(row.loss_weights[1:])
        if not len(weights) or float(weights.sum()) == 0:
            continue
        per_token = clipped_square(plain_values(model, row.ids.tolist(), head)[:-1], row, clip)
        if policy:
            logp, entropy = linear.score_row(model, row.ids.tolist())
            facts = linear.facts_of(row, logp)
            per_token = linear.clipped(logp, facts, 0.2, 0.2) - 0.05 * entropy + coefficient * per_token
        loss = (weights.to(per_token.dtype) * per_token).double().sum()
        total = total + (loss if reduction == "token" else loss / float(weights.sum()))
        count += float(weights.sum()) if reduction == "token" else 1.0
    (total / count).backward()
    return float(total.detach()) / count


PPO = tt.losses.ppo(entropy=0.05, value_coefficient=0.5, value_clip=0.2)


def loss_with(policy: bool, reduction="token") -> Any:
    return (
        tt.losses.ppo(entropy=0.05, value_coefficient=0.5, reduction=reduction)
        if policy
        else tt.losses.value(reduction=reduction)
    )


@pytest.mark.parametrize(("shape", "keep"), PLANS)
def test_a_critic_trains_as_every_row_by_itself_in_every_plan(shape, keep):
    model = critic()
    with PureFloat64():
        loss = expected_step(model, dressed(), policy=False)
        truth = gradients(model)
        model.zero_grad()
        result = planned(shape, keep)(model).forward_backward(dressed(), tt.losses.value())
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert linear.relative_error(gradients(model), truth) <= 1e-12
    assert result.parts > 1 or shape == "1 part"


@pytest.mark.few(3)
@pytest.mark.parametrize(("shape", "keep"), PLANS)
def test_policy_and_critic_on_one_trunk_train_as_every_row_by_itself_in_every_plan(shape, keep):
    model = make_model("qwen3", dtype=torch.float64)
    head = head_of(model)
    with PureFloat64():
        loss = expected_step(model, dressed(), head=head, policy=True)
        truth = gradients(model, head)
        model.zero_grad(), head.zero_grad()
        result = planned(shape, keep)(model, value_head=head).forward_backward(dressed(), PPO)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert linear.relative_error(gradients(model, head), truth) <= 1e-12
    assert {"policy_loss", "entropy", "value_loss", "value_clip_fraction"} <= set(result.metrics)


MORE_FAMILIES = ("qwen3_next", "mistral", "phi3", "gpt_neox", "mixtral", "deepseek_v3", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_oss", *MORE_FAMILIES])
def test_critics_and_reward_models_of_other_families_are_exact(family):
    model, reward_model = critic(family=family), critic(family=family, kind="SequenceClassification")
    reward_model.config.pad_token_id = None
    ids = [row for row in IDS if row]
    with PureFloat64():
        expected_step(model, dressed(), policy=False)
        truth = gradients(model)
        for shape in ("1 part", "chunks of 2"):
            model.zero_grad()
            planned(shape, "mixed")(model).forward_backward(dressed(), tt.losses.value())
            assert linear.relative_error(gradients(model), truth) <= 1e-12
        expected = torch.cat([reward_model(input_ids=torch.tensor([row])).logits[0] for row in ids])
        found = tt.rewards(reward_model, ids, 3)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        got, other = (linear.gradients(reward_model, (x**2).sum()) for x in (found, expected))
    assert linear.relative_error(got, other) <= 1e-12


def test_facts_made_of_a_critics_values_stand_beside_what_it_predicts():
    model = critic()
    rows = [row.replace(reward=1.0) for row in dressed() if len(row) > 1]
    with PureFloat64():
        with torch.no_grad():
            after = tt.values(model, rows)
        for k, row in enumerate(rows):
            old = np.concatenate([[0.0], after[k][:-1].numpy()])
            rows[k] = row.replace(values=old, advantages=1.0 - old, returns=np.ones(len(row)))
        metrics = tt.TreeEngine(model).forward_backward(rows, tt.losses.value(clip=1e-9)).metrics
    assert metrics["value_clip_fraction"] == 0  # nothing has moved
    error = sum((row.weights * row.advantages**2).sum() for row in rows) / sum(row.weights.sum() for row in rows)
    assert metrics["value_error"] == pytest.approx(error, rel=1e-9)  # the critic's error is the advantage


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [False, True], ids=["critic", "actor-critic"])
def test_single_precision_and_bfloat16_hold_the_numerics_contract(policy):
    low = make_model("llama", dtype=torch.bfloat16) if policy else critic(torch.bfloat16, family="llama")
    low_head = head_of(low, torch.bfloat16) if policy else None
    found: dict[torch.dtype, tuple[Tensor, list[Tensor]]] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = as_dtype(low, dtype)
        head = None if low_head is None else copy.deepcopy(low_head).to(dtype)
        both = [model] if head is None else [model, head]
        expected_step(model, dressed(), head=head, policy=policy)
        rows, trees = gradients(*both), []
        for shape, keep in (("1 part", "all"), ("chunks of 7", "mixed"), ("chunks of 2", "none")):
            for module in both:
                module.zero_grad()
            planned(shape, keep)(model, value_head=head).forward_backward(dressed(), loss_with(policy))
            trees.append(gradients(*both))
        found[dtype] = rows, trees
    truth = found[torch.float64][0]
    assert all(linear.relative_error(tree, found[torch.float32][0]) <= 1e-5 for tree in found[torch.float32][1])
    rows, trees = found[torch.bfloat16]
    own = linear.relative_error(rows, truth)
    assert 0 < linear.rms([linear.relative_error(tree, truth) for tree in trees]) <= 1.5 * own


@pytest.mark.slow
@runs(12)
@given(forests())
def test_values_of_random_forests_are_those_of_the_rows_with_their_gradients(ids):
    model = critic(labels=2)
    with PureFloat64():
        expected = [plain_values(model, row) if row else torch.zeros(0, 2) for row in ids]
        found = tt.values(model, ids, budget=5)
        if not any(ids):
            return
        for row, truth in zip(found, expected):
            if len(truth):
                torch.testing.assert_close(row, truth, rtol=1e-11, atol=1e-11)
        loss, other = (sum((row**2).sum() + row.sum().exp() for row in rows if len(row)) for rows in (found, expected))
        assert linear.relative_error(linear.gradients(model, loss), linear.gradients(model, other)) <= 1e-12


@pytest.mark.parametrize("budget", [None, 7, 2])
def test_a_users_loss_on_logprobs_and_values_of_one_pass_gives_the_gradients_of_the_rows(budget):
    def loss(logps, values, entropies):
        return sum((v.detach() - 1) @ lp + (v**2).sum() + (e * v).sum() for lp, v, e in zip(logps, values, entropies))

    model = make_model("qwen3", dtype=torch.float64)
    head = head_of(model)
    ids = [row for row in IDS if row]
    parameters = [*model.parameters(), *head.parameters()]
    with PureFloat64():
        logps, entropies = linear.score_rows(model, ids)
        values = [plain_values(model, row, head)[:-1] for row in ids]
        truth = torch.autograd.grad(loss(logps, values, entropies), parameters)
        got = tt.logprobs(model, ids, budget, return_entropy=True, return_values=True, value_head=head)
        for mine, plain in zip(got, (logps, entropies, values)):
            for row, other in zip(mine, plain):
                torch.testing.assert_close(row, other, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(loss(got[0], got[2], got[1]), parameters)
    flat = [torch.cat([g.flatten() for g in grads]) for grads in (found, truth)]
    assert linear.relative_error(*flat) <= 1e-12
    with torch.no_grad():
        again = tt.logprobs(model, ids, budget, return_values=True, value_head=head)
    assert torch.allclose(again[1][0], values[0]) and not again[1][0].requires_grad


def test_entry_t_is_the_value_after_token_t_and_the_loss_reads_the_one_before():
    model, head = make_model("qwen3", dtype=torch.float64), None
    head = head_of(model)
    ids = [[1, 2, 3, 4], [1, 2, 5]]
    states = tt.values(model, ids, head=head)
    _, before = tt.logprobs(model, ids, return_values=True, value_head=head)
    for row, other in zip(states, before):
        torch.testing.assert_close(row[:-1], other)
    seen = {}

    class Mine:
        needs = ("predicted_values",)

        def normaliser(self, rows):
            return 1.0

        def __call__(self, logprobs, entropies, row, *, values):
            seen[row.id] = values.detach()
            return (values * torch.tensor(row.returns[1:])).sum(), {}

    rows = [tt.Trajectory(row, id=str(n), returns=np.arange(len(row)) + 1.0) for n, row in enumerate(ids)]
    tt.TreeEngine(model, value_head=head).forward_backward(rows, Mine())
    for number, row in enumerate(before):
        torch.testing.assert_close(seen[str(number)], row.detach())


@pytest.mark.parametrize("pad", [None, 8])
@pytest.mark.parametrize("budget", [None, 3])
def test_rewards_are_what_a_reward_model_says_of_every_row_with_its_gradients(pad, budget):
    model = critic(kind="SequenceClassification")
    model.config.pad_token_id = pad
    ids = [row for row in IDS if row] + [[3, 8, 8], [8, 8], [8, 2, 8]]
    with PureFloat64():
        expected = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in ids])
        found = tt.rewards(model, ids, budget)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        pairs = [nn.functional.softplus(r[1::2] - r[:-1:2]).sum() for r in (found, expected)]
        got, truth = (linear.gradients(model, loss) for loss in pairs)
    assert linear.relative_error(got, truth) <= 1e-12


def test_a_reward_model_scores_every_token_as_its_head_does():
    model = critic(kind="SequenceClassification", labels=3)
    row = [5, 6, 7]
    hidden = model.model(input_ids=torch.tensor([row])).last_hidden_state[0]
    torch.testing.assert_close(tt.values(model, [row])[0], model.score(hidden))
    assert tt.rewards(model, [row, row[:2]]).shape == (2, 3)


def with_lora(model, task: str, **options):
    """Adapters that have begun to learn, so that no gradient vanishes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, **options)
    wrapped = peft.get_peft_model(model, config).double().eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


TRUNKS = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.mark.parametrize("trunk", [*TRUNKS, "frozen"])
def test_adapters_and_frozen_trunks_get_the_gradients_of_the_rows(trunk):
    if trunk in TRUNKS:
        model = with_lora(critic(torch.float32), "TOKEN_CLS", **TRUNKS[trunk])
        assert any("modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad)
        modules, head = [model], None
    else:
        model = make_model("qwen3", dtype=torch.float64).requires_grad_(False)
        head = head_of(model)
        modules = [head]
    check_step(model, head, modules, policy=False)


def check_step(model, head, modules, *, policy: bool, plain=None) -> None:
    """One step, as one part and in small parts, against every row by itself."""
    with PureFloat64():
        expected_step(plain or model, dressed(), head=head, policy=policy)
        truth = gradients(*modules)
        for shape in ("1 part", "chunks of 2"):
            for module in modules:
                module.zero_grad()
            planned(shape, "mixed")(model, value_head=head).forward_backward(dressed(), loss_with(policy))
            assert linear.relative_error(gradients(*modules), truth) <= 1e-12
    assert truth.norm() > 0


@pytest.mark.slow
def test_adapter_dropout_is_refused_where_values_are_asked_for_too():
    adapted = {
        "critic": peft_with_dropout(critic(torch.float32), "TOKEN_CLS"),
        "policy": peft_with_dropout(make_model("qwen3"), "CAUSAL_LM"),
    }
    for name, model in adapted.items():
        head = None if name == "critic" else head_of(model, torch.float32)
        with pytest.raises(tt.UnsupportedModel, match=r"lora_dropout.*dropout 0\.1"):
            tt.values(model, IDS, head=head)
        tt.values(model.eval(), IDS, head=head)


def peft_with_dropout(model, task: str):
    peft = pytest.importorskip("peft")
    model.config.classifier_dropout = 0.0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the model's own
    config = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("budget", [None, 4])
def test_verify_holds_critics_and_actor_critics_against_the_plain_model(budget):
    rows = dressed()
    report = tt.verify(critic(torch.float32), rows, loss=tt.losses.value(), budget=budget)
    assert report.passed and report.gradient_error <= 1e-5
    model = make_model("qwen3", dtype=torch.bfloat16)
    head = head_of(model, torch.float32)
    report = tt.verify(model, rows, loss=PPO, budget=budget, value_head=head)
    assert report.passed, report.verdict
    assert any(p.name.startswith("value_head.") and p.norm > 0 for p in report.parameters)
    assert all(p.grad is None for p in [*model.parameters(), *head.parameters()])


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_loss_on_values_runs_in_two_phases_and_is_exact(masked):
    class Spread:
        """Variance of the rows' last values: no sum over rows."""

        scope, needs = "batch", ("predicted_values",)

        def normaliser(self, rows):
            return 2.0

        def __call__(self, logprobs, entropies, rows, *, values):
            return torch.stack([row[-1] for row in values]).var(), {}

    model = critic()
    ids = [row for row in IDS if len(row) > 1]
    with PureFloat64():
        last = torch.stack([plain_values(model, row)[-2] for row in ids])
        truth = linear.gradients(model, last.var() / 2)
        for shape in ("1 part", "chunks of 2"):
            model.zero_grad()
            rows = [tt.Trajectory(row, sampling_mask=[[x] for x in row] if masked else None) for row in ids]
            planned(shape, "mixed")(model).forward_backward(rows, Spread())
            assert linear.relative_error(linear.gradients(model), truth) <= 1e-12


class Doubled(nn.Module):
    """Not what its name says."""

    def forward(self, hidden):
        return hidden.sum()


@pytest.mark.parametrize(
    ("make", "ask", "words"),
    [
        (
            lambda: make_model("qwen3"),
            lambda m: tt.values(m, IDS),
            "values are asked for, but the model has a language",
        ),
        (lambda: critic(torch.float32), lambda m: tt.logprobs(m, IDS), "log-probabilities are asked for.*gives values"),
        (lambda: critic(torch.float32), lambda m: tt.TreeEngine(m).logprobs(IDS), "log-probabilities are asked for"),
        (
            lambda: critic(torch.float32),
            lambda m: tt.TreeEngine(m).forward_backward(dressed(), tt.losses.sft()),
            "log-probabilities are asked for",
        ),
        (
            lambda: make_model("qwen3"),
            lambda m: tt.TreeEngine(m).forward_backward(dressed(), PPO),
            "values are asked for",
        ),
        (lambda: critic(torch.float32).train(), lambda m: tt.values(m, IDS), r"dropout \(Dropout\) has dropout 0.1"),
        (
            lambda: make_model("qwen3"),
            lambda m: tt.values(m, IDS, head=nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 1))),
            "has dropout 0.3 in training mode",
        ),
        (lambda: make_model("qwen3"), lambda m: tt.values(m, IDS, head=nn.BatchNorm1d(32)), "BatchNorm1d, which mixes"),
        (lambda: make_model("qwen3"), lambda m: tt.values(m, IDS, head=Doubled()), r"value head Doubled gives \(\)"),
        (lambda: make_model("qwen3"), lambda m: tt.values(m, IDS, head=len), "give an nn.Module"),
        (
            lambda: critic(torch.float32),
            lambda m: tt.values(m, IDS, head=nn.Linear(32, 1)),
            "has a value head of its own and was given another",
        ),
        (lambda: critic(torch.float32, kind="QuestionAnswering"), lambda m: tt.values(m, IDS), "0 heads called score"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(make, ask, words):
    with pytest.raises(tt.UnsupportedModel, match=words):
        ask(make())


def test_a_critic_of_several_labels_is_refused_by_losses_that_need_one_and_leaves_no_gradient():
    model = critic(torch.float32, labels=2)
    with pytest.raises(ValueError, match=r"values have shape \(\d+, 2\).*num_labels=1"):
        tt.TreeEngine(model).forward_backward(dressed(), tt.losses.value())
    assert all(p.grad is None for p in model.parameters())


def test_a_head_that_the_model_does_something_with_afterwards_is_refused():
    class Scaled(transformers.Qwen3ForTokenClassification):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = found.logits * 2
            return found

    config = make_config("qwen3")
    with pytest.raises(tt.UnsupportedModel, match="does not return what its head gives"):
        tt.values(build(Scaled, config), IDS)

    class Pooled(transformers.Qwen3ForSequenceClassification):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = found.logits + 1
            return found

    with pytest.raises(tt.UnsupportedModel, match="does not return what its head gives, at a row's last token"):
        tt.rewards(build(Pooled, config), [[1, 2]])


def test_the_value_head_is_not_run_for_a_loss_that_needs_no_values():
    model = make_model("qwen3")

    class Silent(nn.Module):
        def forward(self, hidden):
            raise AssertionError("nobody asked")

    tt.TreeEngine(model, value_head=Silent()).forward_backward(dressed(), tt.losses.sft())


def test_a_step_that_fails_leaves_no_gradient_in_the_value_head_either():
    model = make_model("qwen3")
    head = head_of(model, torch.float32)

    class Fails:
        needs, count = ("logprobs", "predicted_values"), 0

        def normaliser(self, rows):
            return 1.0

        def __call__(self, logprobs, entropies, row, *, values):
            self.count += 1
            if self.count > 5:
                raise RuntimeError("no more")
            return values.sum(), {}

    with pytest.raises(RuntimeError, match="no more"):
        planned("chunks of 2", "none")(model, value_head=head).forward_backward(dressed(), Fails())
    assert all(p.grad is None for p in [*model.parameters(), *head.parameters()])


def test_a_value_head_that_changed_since_the_forward_is_refused_in_backward():
    model = make_model("qwen3")
    head = head_of(model, torch.float32)
    values = tt.values(model, IDS, 3, head=head)
    with torch.no_grad():
        head[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="weights have changed"):
        values[0].sum().backward()


def test_what_a_head_says_of_untrained_tokens_never_reaches_a_loss():
    row = tt.Trajectory([1, 2, 3], loss_weights=[0, 0, 1], returns=[0, 0, 1.0])
    values = torch.tensor([float("nan"), 3.0], requires_grad=True)
    total, _ = Plain(reduction="token")(torch.zeros(2), None, row, values=values)
    assert total.item() == 2.0 and torch.autograd.grad(total, values)[0].tolist() == [0.0, 1.0]


class Plain(tt.losses.Loss):
    """A loss on this library's base: v - R."""

    needs = ("predicted_values", "returns")

    def evaluate(self, logprobs, entropies, facts, values):
        return (facts.shares(self.reduction) * (values - facts.returns)).sum(), {}


def test_bytes_bound_a_critic_too():
    model = critic(torch.float32)
    expected_step(model, dressed(), policy=False)
    truth = gradients(model)
    model.zero_grad()
    tt.TreeEngine(model, budget="64MiB").forward_backward(dressed(), tt.losses.value())
    assert linear.relative_error(gradients(model), truth) <= 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["Bert", "Ernie", "RoCBert"])
def test_a_reward_model_that_pools_the_tokens_of_a_call_is_refused_and_its_critic_is_exact(family):
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"vocab_size": 37, "is_decoder": True, "num_labels": 1, "hidden_dropout_prob": 0.0} | sizes
    config = getattr(transformers, f"{family}Config")(**settings, attention_probs_dropout_prob=0.0)
    reward_model = build(getattr(transformers, f"{family}ForSequenceClassification"), config, dtype=torch.float64)
    with pytest.raises(tt.UnsupportedModel, match=r"given a tensor \[1, 24\].*pools the tokens of a call") as error:
        tt.rewards(reward_model, IDS[:2])
    assert len(str(error.value)) <= 400 and all(p.grad is None for p in reward_model.parameters())
    own = build(getattr(transformers, f"{family}ForTokenClassification"), config, dtype=torch.float64)
    for values, row in zip(tt.values(own, IDS[:2]), IDS[:2]):
        assert torch.allclose(values, own(input_ids=torch.tensor([row])).logits[0, :, 0], atol=1e-12)
