"""`TreeTrainer`: runs on trees are those of every row by itself, and those of a plain loop of PyTorch."""

import shutil

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback

from support.models import VOCAB, make_model
from support.tree_runs import (
    VOCABULARY,
    apart,
    branching_rows,
    error,
    make_arguments,
    preference_rows,
    pure,
    run,
    small_model,
    steps,
    weights,
)
from treetrain import DataError, Trajectory, losses
from treetrain.trainers.groups import StepSampler
from treetrain.trainers.tree_trainer import TreeTrainer


def rows_with_sets():
    """Rows with advantages whose sampled tokens have a teacher's ids, and three in four a sampling mask."""
    rng, rows = np.random.default_rng(0), []
    for row in branching_rows():
        trained = row.weights > 0
        drawn = [rng.choice(VOCABULARY, rng.integers(1, 6), replace=False).tolist() for _ in row.ids]
        teacher = [ids if on else None for ids, on in zip(drawn, trained)]
        recorded = [ids and np.log(rng.dirichlet(np.ones(len(ids) + 1))[1:]).tolist() for ids in teacher]
        kept = [[token, *{*ids} - {token}] for token, ids in zip(row.ids.tolist(), drawn)]
        masks = [ids if on and rng.random() < 0.75 else None for ids, on in zip(kept, trained)]
        facts = {"advantages": float(rng.normal()), "teacher_topk": (teacher, recorded), "sampling_mask": masks}
        rows.append(row.replace(**facts, loss_weights=row.weights * rng.uniform(0.3, 2, len(row))))
    return rows


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
RUNS = {
    "sft": (branching_rows, {}),
    "sft in three calls": (branching_rows, {"gradient_accumulation_steps": 3}),
    "sft within a budget": (branching_rows, {"budget": 24}),
    "grpo": (
        branching_rows,
        {"loss": "grpo", "loss_kwargs": {"kl": 0.05}, "updates_per_batch": 2, "minibatches": 2, "tokens_per_step": 240},
    ),
    "grpo in two calls": (
        branching_rows,
        {"loss": "grpo", "loss_kwargs": {"entropy": 0.01}, "updates_per_batch": 2, "gradient_accumulation_steps": 2},
    ),
    "dpo": (preference_rows, {"loss": "dpo"}),
    "sampling masks": (
        rows_with_sets,
        {"loss": "grpo", "loss_kwargs": {"kl": 0.05}, "updates_per_batch": 2, "minibatches": 2, "tokens_per_step": 240},
    ),
    "a teacher's ids": (rows_with_sets, {"loss": "distill_topk", "loss_kwargs": {"divergence": "reverse"}}),
    "lora": (branching_rows, {"lora": True}),
    "lora, dpo": (preference_rows, {"loss": "dpo", "lora": True, "gradient_accumulation_steps": 2}),
}


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def trained(name: str, dtype: torch.dtype, **more):
    make, settings = RUNS[name]
    rows, settings = make(), dict(settings)
    options = {"peft_config": lora()} if settings.pop("lora", False) else {}
    if settings.get("loss") == "dpo":  # of its own, or all scores of the first step would be rounding errors
        options["ref_model"] = small_model(dtype, seed=5)
    evaluation = {"eval_rows": rows[:6], "eval_strategy": "steps", "eval_steps": 10}
    return run(small_model(dtype), rows, options=options, max_steps=20, **evaluation, **settings, **more)


@pytest.mark.parametrize(
    "name",
    [name if name in ("sft", "a teacher's ids") else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_a_tree_run_is_the_linear_run_in_float64(name) -> None:
    tree, linear = (trained(name, torch.float64, execution=execution) for execution in ("tree", "linear"))
    found = apart(tree, linear)
    assert len(steps(tree)) == 20 and "eval_loss" in found
    assert max(found.values()) < TOLERANCE[torch.float64], found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_tree_run_is_the_linear_run_in_float32(name) -> None:
    sgd = {"optim": "sgd", "learning_rate": 0.05}
    tree, linear = (trained(name, torch.float32, execution=execution, **sgd) for execution in ("tree", "linear"))
    found = apart(tree, linear)
    assert max(found.values()) < TOLERANCE[torch.float32], found


def row_logprobs(model, row):
    ids = torch.as_tensor(row.ids.astype(np.int64))[None]
    found = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return found.gather(1, ids[0, 1:, None])[:, 0]


def plain_loop(rows, loss_of_step, *, total: int, lr: float = 1e-2, limit: float = 1.0, **sampling):
    """A loop of nothing but PyTorch over the steps of a sampler, every row by itself."""
    model = small_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    sampler, found, epoch = StepSampler(rows, seed=3, **sampling), [], 0
    with pure(torch.float64):
        while len(found) < total:
            sampler.set_epoch(epoch)
            epoch += 1
            for (call,) in sampler:
                if len(found) == total:
                    break
                loss = loss_of_step(model, [rows[n] for n in call.rows.tolist()], call)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
                optimizer.param_groups[0]["lr"] = lr * (1 - len(found) / total)
                optimizer.step()
                optimizer.zero_grad()
                found.append((float(loss), float(norm)))
    return model, np.array(found)


def check_against_plain(trainer, model, found) -> None:
    assert error([[step["loss"], step["grad_norm"]] for step in steps(trainer)], found) < 1e-10
    mine, theirs = weights(trainer.model), weights(model)
    assert max(error(mine[name], theirs[name]) for name in mine) < 1e-10


@pytest.mark.slow
def test_sft_is_that_of_a_plain_loop_over_rows() -> None:
    rows = branching_rows()

    def loss(model, members, call):
        total = sum((row_logprobs(model, row) * torch.as_tensor(row.weights[1:])).sum() for row in members)
        return -total / sum(row.weights[1:].sum() for row in members)

    model, found = plain_loop(rows, loss, total=7, tokens_per_step=120)
    check_against_plain(run(small_model(torch.float64), rows, max_steps=7), model, found)


@pytest.mark.slow
def test_grpo_with_a_reference_is_that_of_a_plain_loop_over_rows() -> None:
    rows, first = branching_rows(), small_model(torch.float64)
    old, batch = {}, [-1]

    def loss(model, members, call):
        if call.batch != batch[0]:
            batch[0] = call.batch
            with torch.no_grad():
                old.update({n: row_logprobs(model, rows[n]) for n in call.batch_rows.tolist()})
        total = 0.0
        for number, row in zip(call.rows.tolist(), members, strict=True):
            rewards = np.array([other.reward for other in rows if other.group == row.group])
            advantage = (row.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            mask, now = torch.as_tensor(row.weights[1:]), row_logprobs(model, row)
            with torch.no_grad():
                reference = row_logprobs(first, row)
            ratio = (now - old[number]).exp()
            term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = (reference - now).exp() - (reference - now) - 1
            total = total + ((term + 0.05 * kl) * mask).sum() / mask.sum()
        return total / len(members)

    sampling = {"tokens_per_step": 240, "updates_per_batch": 2, "minibatches": 2}
    model, found = plain_loop(rows, loss, total=9, **sampling)
    settings = {"loss": "grpo", "loss_kwargs": {"kl": 0.05}}
    trainer = run(small_model(torch.float64), rows, max_steps=9, **settings, **sampling)
    check_against_plain(trainer, model, found)
    assert {step["clip_fraction"] for step in steps(trainer)} != {0.0}


@pytest.mark.slow
def test_dpo_is_that_of_a_plain_loop_over_rows() -> None:
    rows, first = preference_rows(), small_model(torch.float64)

    def loss(model, members, call):
        scores = {}
        for row in members:
            mask = torch.as_tensor(row.weights[1:])
            with torch.no_grad():
                reference = row_logprobs(first, row)
            scores[row.pair, row.chosen] = ((row_logprobs(model, row) - reference) * mask).sum()
        pairs = sorted({pair for pair, _ in scores})
        margins = torch.stack([scores[pair, True] - scores[pair, False] for pair in pairs])
        return -torch.nn.functional.logsigmoid(0.1 * margins).mean()

    model, found = plain_loop(rows, loss, total=7, tokens_per_step=80)
    trainer = run(small_model(torch.float64), rows, max_steps=7, loss="dpo", tokens_per_step=80)
    check_against_plain(trainer, model, found)


def test_the_reference_of_an_adapter_is_the_model_without_it() -> None:
    options = {"peft_config": lora()}
    trainer = run(small_model(), preference_rows(), max_steps=4, loss="dpo", tokens_per_step=400, options=options)
    found = [step["chosen_reward"] for step in steps(trainer)]
    assert abs(found[0]) < 1e-6 < abs(found[3])


@pytest.mark.slow
def test_calls_of_a_step_add_up_to_the_step() -> None:
    whole, split = (
        run(
            small_model(torch.float64),
            branching_rows(),
            max_steps=6,
            gradient_accumulation_steps=calls,
            tokens_per_step=180,
        )
        for calls in (1, 4)
    )
    assert max(apart(whole, split).values()) < 1e-12


def test_recorded_log_probabilities_are_used_as_they_are() -> None:
    recorded = branching_rows(old_logprobs=lambda random, length: random.normal(-3, 0.1, length))
    trainer = run(small_model(), recorded, max_steps=2, loss="ppo", updates_per_batch=2)
    assert abs(steps(trainer)[0]["ratio"] - 1) > 0.01
    assert "tree/scoring_seconds" not in steps(trainer)[0]
    computed = run(small_model(), branching_rows(), max_steps=2, loss="ppo", updates_per_batch=2)
    assert abs(steps(computed)[0]["ratio"] - 1) < 1e-5 < abs(steps(computed)[1]["ratio"] - 1)


def test_log_probabilities_are_computed_in_an_order_that_is_the_same_on_every_rank(monkeypatch) -> None:
    class Reversed(frozenset):
        """A set whose order is the worst one; that of strings differs from process to process."""

        def __sub__(self, other):
            return sorted(frozenset(self).difference(other), reverse=True)

    scored: list[str] = []
    scoring = TreeTrainer._scoring
    monkeypatch.setattr(TreeTrainer, "_scoring", lambda self, fact: scored.append(fact) or scoring(self, fact))
    arguments = make_arguments(loss="grpo", loss_kwargs={"kl": 0.1}, updates_per_batch=2, max_steps=2)
    trainer = TreeTrainer(small_model(), arguments, branching_rows())
    trainer._compute = Reversed(trainer._compute)
    trainer.train()
    assert scored == ["old_logprobs", "ref_logprobs"]


def test_updates_of_a_batch_stop_when_the_policy_is_too_far_from_the_old_one() -> None:
    settings = {"loss": "ppo", "updates_per_batch": 3, "num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.5}
    free = run(small_model(), branching_rows(), **settings)
    held = run(small_model(), branching_rows(), target_kl=1e-9, **settings)
    assert [record["step"] for record in steps(free)] == list(range(1, 10))
    # The first update of a batch has a KL of 0; the second one is made, and found to be too far.
    assert [record["step"] for record in steps(held)] == [1, 2, 4, 5, 7, 8]
    assert held.state.global_step == 9
    assert sum(record.get("steps_left_out", 0) for record in held.state.log_history) == 3
    assert error(*(next(iter(weights(t.model).values())) for t in (held, free))) > 1e-6


def test_evaluation_measures_likelihood_and_loss_of_held_out_rows() -> None:
    rows = branching_rows()
    trainer = run(
        small_model(torch.float64), rows[:12], eval_rows=rows[12:], max_steps=4, eval_strategy="steps", eval_steps=2
    )
    with torch.no_grad(), pure(torch.float64):
        pairs = [(row_logprobs(trainer.model, row).numpy(), row.weights[1:]) for row in rows[12:]]
    nll = -sum(float(scores @ w) for scores, w in pairs) / sum(w.sum() for _, w in pairs)
    found = [record for record in trainer.state.log_history if "eval_nll" in record]
    assert [record["step"] for record in found] == [2, 4]
    assert abs(found[-1]["eval_nll"] - nll) < 1e-12
    assert found[-1]["eval_loss"] == pytest.approx(nll, abs=1e-12)
    assert found[-1]["eval_trained_tokens"] == 48


def of_teacher(model, row):
    """KL(teacher || student) of each sampled token over the teacher's ids and the rest."""
    now, sets = model(torch.as_tensor(row.ids.astype(np.int64))[None]).logits[0].log_softmax(-1), row.teacher_topk
    for at in np.flatnonzero(row.weights):
        own = slice(sets.starts[at], sets.starts[at + 1])
        p, q = torch.tensor(sets.logprobs[own]).exp(), now[at - 1, sets.ids[own].tolist()].exp()
        p, q = (torch.cat([x, 1 - x.sum()[None]]) for x in (p, q))
        yield row.weights[at], (p * (p.log() - q.log())).sum()


def over_kept_ids(model, row):
    """The loss of grpo on policy with a reference, of each sampled token, over the ids that the sampler kept."""
    now, before = (
        each(torch.as_tensor(row.ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        for each in (model, small_model(torch.float64, seed=5))
    )
    kept = row.sampling_mask
    for at in np.flatnonzero(row.weights):
        ids = kept.ids[kept.starts[at] : kept.starts[at + 1]].tolist() or list(range(VOCABULARY))
        place = ids.index(row.ids[at])
        gap = before[at - 1, ids].log_softmax(-1)[place] - now[at - 1, ids].log_softmax(-1)[place]
        yield row.weights[at], -row.advantages[at] + 0.3 * (gap.exp() - 1 - gap)


@pytest.mark.parametrize("execution", ["tree", "linear"])
@pytest.mark.parametrize(
    ("terms", "settings"),
    [
        (of_teacher, {"loss": "distill_topk"}),
        (over_kept_ids, {"loss": "grpo", "loss_kwargs": {"kl": 0.3, "reduction": "token"}}),
    ],
)
def test_sets_of_ids_are_read_in_training_and_evaluation(terms, settings, execution) -> None:
    rows = rows_with_sets()
    rows, held_out = rows[:12], [rows[12].replace(loss_weights=0.0, teacher_topk=None), *rows[13:]]
    options = {"ref_model": small_model(torch.float64, seed=5)} if settings["loss"] == "grpo" else {}
    settings = settings | {
        "options": options,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "learning_rate": 0.0,
    }
    settings |= {"max_steps": 1, "tokens_per_step": 9999, "execution": execution}
    model = small_model(torch.float64)
    trainer = run(model, rows, eval_rows=held_out, **settings)
    found = {name: value for record in trainer.state.log_history for name, value in record.items()}
    for name, given in (("loss", rows), ("eval_loss", held_out)):
        with torch.no_grad(), pure(torch.float64):
            pairs = [pair for row in given for pair in terms(model, row)]
        assert found[name] == pytest.approx(float(sum(w * x for w, x in pairs) / sum(w for w, _ in pairs)), rel=1e-12)


def test_held_out_rows_without_a_teachers_ids_are_evaluated_by_their_likelihood(caplog) -> None:
    rows = rows_with_sets()
    held_out = [row.replace(teacher_topk=None) if n == 1 else row for n, row in enumerate(rows[:6])]
    with pytest.raises(DataError, match=r"trajectory number 1 \(from 0\) has no teacher_topk"):
        run(small_model(), held_out, loss="distill_topk")
    evaluated = {"eval_rows": held_out, "eval_strategy": "steps", "eval_steps": 1}
    trainer = run(small_model(), rows[6:], max_steps=1, loss="distill_topk", **evaluated)
    assert not any("eval_loss" in record for record in trainer.state.log_history)
    assert "by their log-likelihood alone: trajectory number 1 (from 0) has no teacher_topk" in caplog.text


def test_early_stopping_is_that_of_transformers() -> None:
    rows = branching_rows()
    trainer = run(
        small_model(),
        rows[:12],
        eval_rows=rows[12:],
        max_steps=30,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="nll",
        greater_is_better=False,
        options={"callbacks": [EarlyStoppingCallback(2)]},
    )
    assert trainer.state.global_step == 3


def test_an_optimiser_of_torch_that_optim_does_not_name_is_given_as_to_any_trainer() -> None:
    found = []
    for execution in ("tree", "linear"):
        model = small_model().requires_grad_(False)
        # Matrices of full rank: Muon blows up the rounding of gradients that vanish in some direction.
        trained = [layer.self_attn.k_proj.weight.requires_grad_() for layer in model.model.layers]
        options = {"optimizers": (torch.optim.Muon(trained, lr=0.01), None)}
        found.append(run(model, branching_rows(), max_steps=3, execution=execution, options=options))
    assert max(apart(*found).values()) < 1e-2  # it orthogonalises in bfloat16


def test_trees_built_by_worker_processes_are_the_same() -> None:
    found = [run(small_model(), branching_rows(), max_steps=4, dataloader_num_workers=n) for n in (0, 1)]
    assert max(apart(*found).values()) == 0


def test_a_loss_of_the_users_own_can_be_trained() -> None:
    class Own:
        scope = "trajectory"

        def __call__(self, logprobs, entropies, trajectory):
            mask = torch.as_tensor(trajectory.weights[1:], dtype=logprobs.dtype)
            return -(logprobs * mask).sum(), {"mine": 1.0}

        def normaliser(self, trajectories):
            return float(sum(row.weights[1:].sum() for row in trajectories))

    own = run(small_model(torch.float64), branching_rows(), max_steps=3, options={"loss": Own()})
    sft = run(small_model(torch.float64), branching_rows(), max_steps=3, options={"loss": losses.sft()})
    assert steps(own)[-1]["mine"] == 1.0
    assert error([s["loss"] for s in steps(own)], [s["loss"] for s in steps(sft)]) < 1e-12


@pytest.mark.slow
def test_bfloat16_is_autocast_that_ends_with_the_step() -> None:
    narrow, wide = (run(small_model(), branching_rows(), max_steps=3, bf16=bf16) for bf16 in (True, False))
    found = error(*([step["loss"] for step in steps(t)] for t in (narrow, wide)))
    assert 1e-6 < found < 2e-2
    assert next(narrow.model.parameters()).dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_a_batch_bit_for_bit(tmp_path) -> None:
    settings = {"loss": "ppo", "updates_per_batch": 3, "num_train_epochs": 1, "logging_steps": 2}
    whole = run(small_model(), branching_rows(), folder=tmp_path / "whole", **settings)
    folder = tmp_path / "parts"
    saves = {"save_strategy": "steps", "save_steps": 4}
    run(small_model(), branching_rows(), folder=folder, **saves, **settings)
    shutil.rmtree(folder / "checkpoint-8")
    again = TreeTrainer(small_model(), make_arguments(folder, **saves, **settings), branching_rows())
    again.train(resume_from_checkpoint=True)
    assert max(apart(again, whole).values()) == 0


@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_routers_auxiliary_loss_is_that_of_the_whole_step_in_any_number_of_calls(calls) -> None:
    rows = [row.replace(ids=row.ids % VOCAB) for row in branching_rows()]
    settings = {"max_steps": 3, "tokens_per_step": 180, "optim": "sgd", "learning_rate": 0.05}

    def model():
        return make_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)

    tree = run(model(), rows, gradient_accumulation_steps=calls, **settings)
    linear = run(model(), rows, execution="linear", **settings)
    found = apart(tree, linear)
    assert "router_aux_loss" in found and max(found.values()) < 1e-5


def test_tokens_a_second_are_those_of_rows_by_the_time_of_passes_and_scoring() -> None:
    settings = {"loss": "grpo", "updates_per_batch": 2, "logging_steps": 2, "max_steps": 4}
    for log in steps(run(small_model(torch.float32), branching_rows(), **settings)):
        spent = log["tree/seconds"] + log["tree/scoring_seconds"]
        assert log["tree/tokens_per_second"] == pytest.approx(log["tree/flat_tokens"] / spent)


def test_groups_that_are_larger_than_a_step_are_counted_and_the_largest_is_named(caplog) -> None:
    rows = [
        Trajectory([1, 2, *range(5, 5 + length)], group=name, id=f"{name}{k}")
        for name, length in {"a": 20, "b": 8, "c": 12}.items()
        for k in range(3)
    ]
    with caplog.at_level("WARNING"):
        run(small_model(torch.float32), rows, tokens_per_step=31, max_steps=1)
    (said,) = [record.getMessage() for record in caplog.records if "tokens_per_step" in record.getMessage()]
    assert said.startswith("2 of 3 groups have more tokens than tokens_per_step=31;")
    assert "up to 66 tokens (the group of trajectory 'a0')" in said
    caplog.clear()
    run(small_model(torch.float32), rows, tokens_per_step=66, max_steps=1)
    assert not [record for record in caplog.records if "tokens_per_step" in record.getMessage()]
