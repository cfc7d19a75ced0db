"""The check in the first step: it sees what is wrong, stops on all ranks, and is not what runs out of memory."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from datasets import Dataset
from peft import AdaLoraConfig, get_peft_model
from torch import nn
from trainer_runs import BUILDERS, train
from transformers import (
    DataCollatorForSeq2Seq,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import treetrain as tt
from treetrain.core.attention.kv_cache import KVCacheView
from treetrain.core.engine.executor import Executor
from treetrain.core.engine.score import Scored
from treetrain.core.errors import RanksDisagree
from treetrain.core.head import lm_head
from treetrain.models.costs import cost_if_countable
from treetrain.models.meters import CountStorages
from treetrain.trainers import first_step
from treetrain.trainers.batches import rows_of
from treetrain.trainers.first_step import small_batch, tokens_within
from treetrain.trainers.outputs import FusedOutput, LossOutput, Question

NAMES = [name for name, _ in runs.model().named_parameters()]
KINDS = [name for name in NAMES if "layers.1." in name or "layers" not in name]
IDS = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9], [1, 2, 3, 9, 7, 5, 4, 2]]


def settings(folder: Any) -> dict[str, Any]:
    return {"output_dir": str(folder), "use_cpu": True, "report_to": [], "gradient_checkpointing": False}


def plain_trainer(model: nn.Module, folder: Any) -> Trainer:
    return Trainer(model, TrainingArguments(**settings(folder)))  # type: ignore[arg-type]


def batch_of(ids: list[list[int]], side: str = "right") -> dict[str, torch.Tensor]:
    """A padded batch whose labels are all but the first token of each row."""
    words = runs.tokenizer()
    words.padding_side = side
    batch = DataCollatorForSeq2Seq(words)([{"input_ids": row, "labels": [-100, *row[1:]]} for row in ids])
    return {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}


def packed(ids: list[list[int]]) -> dict[str, torch.Tensor]:
    """The same without padding, in one sequence."""
    rows = {
        "input_ids": [i for row in ids for i in row],
        "labels": [i for row in ids for i in (-100, *row[1:])],
        "position_ids": [i for row in ids for i in range(len(row))],
    }
    return {name: torch.tensor([row]) for name, row in rows.items()}


def check(model: nn.Module, folder: Any, batch: dict[str, Any], budget: int | None = None, how: Any = True) -> Any:
    """Run the check on a batch, as the first step does; returns the trainer."""
    trainer = tt.share_prefixes(plain_trainer(model, folder), budget, check=how)
    sharing: Any = trainer.prefix_sharing  # type: ignore[attr-defined]
    forward: Any = model.forward
    question = Question(forward, sharing.output, batch, sharing.output.rows(batch, model))
    sharing._check_first_step(question, sharing._engine_for(model, sharing.output), balanced=False)
    assert not sharing.check
    return trainer


def test_gradients_of_left_padded_rows_are_compared_with_each_row_by_itself(tmp_path):
    """A norm after the rotary embedding: scores know no absolute positions, the gradient of its weights does."""
    torch.manual_seed(0)
    model = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**runs.SHAPE))
    with pytest.raises(RuntimeError, match=r"gradients .*differ.*Shared prefixes are right.*padding on a row's left"):
        check(model, tmp_path, batch_of(IDS, "left"))
    check(model, tmp_path / "rows", batch_of(IDS, "left"), how="rows")
    check(HunYuanDenseV1ForCausalLM(model.config), tmp_path / "right", batch_of(IDS))


def test_adapters_that_are_narrower_than_their_base_are_compared_in_their_own_dtype(tmp_path):
    """QLoRA computes in float32 with adapters in bfloat16."""
    model = get_peft_model(runs.model(), runs.adapter())
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16 if p.requires_grad else torch.float32)
    trainer = check(model, tmp_path, batch_of(IDS))
    assert 1e-3 < trainer.prefix_sharing.gains.once["tree/gradient_difference"] < 1e-2


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    """Change the gradient of one parameter whenever a tree has run backward."""
    original = Scored.backward

    def spoiled(self: Scored, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        model = self._scoring.call.model
        for parameter_name, parameter in model.named_parameters():
            if name in parameter_name and parameter.grad is not None:
                change(parameter.grad)

    monkeypatch.setattr(Scored, "backward", spoiled)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [*KINDS, "layers.0."])
@pytest.mark.parametrize("factor", [0.9, 0.0])
def test_a_wrong_gradient_of_any_kind_of_parameter_stops_the_first_step(name, factor, tmp_path, monkeypatch):
    spoil(monkeypatch, name, lambda grad: grad.mul_(factor))
    with pytest.raises(RuntimeError, match="gradients of the plain model and with shared prefixes differ") as failed:
        check(runs.model(), tmp_path, batch_of(IDS))
    assert name in str(failed.value).replace("*", "1") or name == "layers.0."
    assert len(str(failed.value)) <= 400


@pytest.mark.parametrize("row", [9, 40])
def test_a_wrong_row_of_the_embedding_stops_the_first_step(row, tmp_path, monkeypatch):
    spoil(monkeypatch, "embed_tokens", lambda grad: grad[row].add_(0.1))  # 40: of a token that is in no row
    with pytest.raises(RuntimeError, match="embed_tokens"):
        check(runs.model(), tmp_path, batch_of(IDS))


@pytest.mark.parametrize("mutant", ["a part without backward", "a row without gradient", "head off by one"])
def test_a_mutated_engine_stops_the_first_step(mutant, tmp_path, monkeypatch):
    if mutant == "a part without backward":
        backward, seen = Executor._backward, []

        def skipping(self: Executor, done: Any, gradients: Any) -> None:
            seen.append(done)
            if len(seen) != 2:
                backward(self, done, gradients)

        monkeypatch.setattr(Executor, "_backward", skipping)
    elif mutant == "a row without gradient":
        original = Scored.backward

        def dropping(self: Scored, *args: Any, **kwargs: Any) -> None:
            self.leaves[1].grad.zero_()  # type: ignore[union-attr]
            original(self, *args, **kwargs)

        monkeypatch.setattr(Scored, "backward", dropping)
    else:
        score = lm_head.score_edges
        monkeypatch.setattr(
            lm_head, "score_edges", lambda hidden, *args, **kwargs: score(hidden.roll(1, 0), *args, **kwargs)
        )
    with pytest.raises(RuntimeError, match="differ by"):
        check(runs.model(), tmp_path, batch_of(IDS), budget=3)


def test_gradients_that_stop_at_a_cache_stop_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(KVCacheView, "add_path_gradients", lambda *_args, **_options: None)
    with pytest.raises(RuntimeError, match="3 rows in parts: gradients of the plain model"):
        check(runs.model(), tmp_path, batch_of(IDS))


def test_a_tree_runs_as_one_part_and_in_parts_whatever_the_budget(tmp_path, monkeypatch):
    parts, original = [], Scored.backward

    def backward(self: Scored, *args: Any, **kwargs: Any) -> None:
        parts.append(self.parts)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Scored, "backward", backward)
    for budget in (None, 5):
        check(runs.model(), tmp_path, batch_of(IDS), budget=budget)
    assert parts[::2] == [1, 1] and min(parts[1::2]) > 2


def own_loss(model: Any) -> nn.Module:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    return model


def ignores_num_items(model: Any) -> nn.Module:
    function = model.loss_function
    model.loss_function = lambda logits, labels, vocab_size, num_items_in_batch=None, **_: function(
        logits, labels, vocab_size
    )
    return model


def z_loss(model: Any) -> nn.Module:
    class WithZLoss(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if output.loss is not None:
                output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()
            return output

    model.__class__ = WithZLoss
    return model


def adalora(model: Any) -> nn.Module:
    config = AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        lora_dropout=0.0,
        init_r=4,
        target_r=2,
        total_step=20,
        tinit=1,
        tfinal=1,
    )
    return get_peft_model(model, config)


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [own_loss, ignores_num_items, z_loss, adalora], ids=lambda f: f.__name__)
def test_a_model_with_another_loss_than_the_cross_entropy_stops_the_first_step(change, tmp_path):
    batch = {**batch_of(IDS), "num_items_in_batch": torch.tensor(40)}
    with pytest.raises(RuntimeError, match=r"model's own loss is .*AdaLoRA.*tt\.TreeTrainer") as failed:
        check(change(runs.model()), tmp_path, batch)
    assert len(str(failed.value)) <= 400


def test_adalora_stops_a_plain_trainer_in_its_first_step(tmp_path):
    trainer = BUILDERS["plain"]({**settings(tmp_path), "max_steps": 1}, torch.float32, tmp_path)
    trainer = Trainer(
        adalora(runs.model()),  # type: ignore[arg-type]
        trainer.args,
        train_dataset=trainer.train_dataset,
        data_collator=trainer.data_collator,
    )
    with pytest.raises(RuntimeError, match="adapter's regularisation"):
        tt.share_prefixes(trainer).train()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["plain", "experts with auxiliary loss", "bfloat16", "own function, same loss"])
def test_what_is_exact_passes(kind, tmp_path):
    model = runs.model()
    if kind == "experts with auxiliary loss":
        model = runs.experts(0, torch.float32)
        model.config.output_router_logits = True
    if kind == "bfloat16":
        model = model.bfloat16()
    if kind == "own function, same loss":
        function = model.loss_function
        model.loss_function = lambda *args, **kwargs: function(*args, **kwargs)
    for extra in ({}, {"num_items_in_batch": torch.tensor(77)}):
        for p in model.parameters():
            p.grad = torch.full_like(p, 3.0)
        trainer = check(model, tmp_path, {**batch_of(IDS), **extra})
        assert all(bool((p.grad == 3).all()) for p in model.parameters())  # of earlier micro-batches
        model.forward = model.forward.__wrapped__
    assert trainer.prefix_sharing.gains.once["tree/gradient_difference"] > 0


def test_a_batch_that_predicts_nothing_leaves_the_check_to_the_next(tmp_path):
    trainer = tt.share_prefixes(plain_trainer(runs.model(), tmp_path))
    sharing: Any = trainer.prefix_sharing  # type: ignore[attr-defined]
    batch, checks = batch_of(IDS), []
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    for each in (empty, batch):
        trainer.compute_loss(trainer.model, dict(each))
        checks.append(sharing.check)
    assert checks == [True, False] and sharing.gains.once


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_the_left_of_learned_positions_stops_the_first_step(side, tmp_path):
    model, batch = runs.learned_positions(), batch_of(IDS, side)
    if side == "right":
        check(model, tmp_path, batch)
        return
    right = r"Shared prefixes are right.*counts the padding on a row's left in its positions.*pad on the right.*'rows'"
    with pytest.raises(RuntimeError, match=right) as failed:
        check(model, tmp_path, batch)
    assert len(str(failed.value)) <= 650
    model.forward = model.forward.__wrapped__  # type: ignore[union-attr]
    check(model, tmp_path, batch, how="rows")


def test_a_row_with_padding_on_its_left_is_among_those_compared(tmp_path):
    long = [list(range(2, 20)), [*range(2, 19), 30], [*range(2, 18), 31, 32]]
    with pytest.raises(RuntimeError, match="Shared prefixes are right"):
        check(runs.learned_positions(), tmp_path, batch_of([[40, 41, 42], *long], "left"))
    check(runs.learned_positions(), tmp_path, batch_of(long, "left"))


def test_rows_that_are_cut_keep_padding_on_their_left(tmp_path, monkeypatch):
    monkeypatch.setattr(first_step, "tokens_within", lambda *_: 24)
    ids = [list(range(2, 40)), [*range(2, 30), *range(2, 12)], [*range(2, 25), 31]]
    with pytest.raises(RuntimeError, match="counts the padding on a row's left"):
        check(runs.learned_positions(), tmp_path, batch_of(ids, "left"))
    check(runs.learned_positions(), tmp_path, batch_of(ids, "left"), how="rows")
    check(runs.model(), tmp_path, batch_of(ids, "left"))


def test_a_convolution_that_crosses_packed_rows_stops_the_first_step(tmp_path):
    kinds = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}

    def model() -> Any:
        torch.manual_seed(0)
        return Lfm2ForCausalLM(Lfm2Config(**runs.SHAPE, **kinds))

    batch = packed(IDS)
    with pytest.raises(
        RuntimeError, match=r"Shared prefixes are right.*lets packed rows see one another.*pad the rows"
    ):
        check(model(), tmp_path, batch)
    check(model(), tmp_path, batch, how="rows")
    check(model(), tmp_path, batch_of(IDS))


@pytest.mark.parametrize("how", [True, "rows"])
def test_a_tree_that_is_wrong_is_said_to_be(how, tmp_path, monkeypatch):
    score = lm_head.score_edges
    shifted = lambda hidden, *args, **kwargs: score(hidden.roll(1, 0), *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(lm_head, "score_edges", shifted)
    with pytest.raises(RuntimeError, match=r"[Ss]hared prefixes are wrong.*train without share_prefixes"):
        check(runs.model(), tmp_path, batch_of(IDS), how=how)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["reward", "plain", "sft", "dpo"])
def test_rows_by_themselves_are_those_of_every_trainer(name, tmp_path):
    settings_ = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False, "max_steps": 1}
    trainer = tt.share_prefixes(runs.BUILDERS[name](settings_, torch.float32, tmp_path), check="rows")
    trainer.train()
    assert trainer.prefix_sharing.check is False  # type: ignore[attr-defined]
    once = [
        logs["tree/gradient_difference"] for logs in trainer.state.log_history if "tree/gradient_difference" in logs
    ]
    assert not once or once[0] < 1e-4


@pytest.mark.parametrize("how", [True, "rows"])
def test_a_batch_with_nothing_to_compare_leaves_the_comparison_for_the_next(how, tmp_path):
    model, batch = runs.model(), batch_of(IDS)
    trainer = tt.share_prefixes(plain_trainer(model, tmp_path), check=how)
    sharing: Any = trainer.prefix_sharing  # type: ignore[attr-defined]
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    question = Question(model.forward, sharing.output, nothing, sharing.output.rows(nothing, model))  # type: ignore
    sharing._check_first_step(question, sharing._engine_for(model, sharing.output), balanced=False)
    assert sharing.check == how and type(sharing.check) is type(how)


def test_what_check_takes_is_said(tmp_path):
    with pytest.raises(ValueError, match="check is 'batch'; give True, False or 'rows'"):
        tt.share_prefixes(plain_trainer(runs.model(), tmp_path), check="batch")  # type: ignore[arg-type]


def test_packed_rows_that_see_one_another_stop_the_first_step(tmp_path):
    class Leaking(runs.Qwen3ForCausalLM):
        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            if kwargs.get("labels") is not None:
                position_ids = None
            return super().forward(*args, position_ids=position_ids, **kwargs)

    check(runs.model(), tmp_path, packed(IDS))
    with pytest.raises(RuntimeError, match="lets packed rows see one another"):
        check(runs.model(kind=Leaking), tmp_path, packed(IDS))


# ---- the batch that is compared


def trees(batch: dict[str, Any]) -> tuple[int, int]:
    rows = rows_of(batch)
    tree = tt.build_tree(rows.ids)
    return tree.num_tokens, tree.num_flat_tokens


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_rows_are_cut_around_their_fork_and_laid_out_as_they_were(layout):
    draw = np.random.default_rng(0)
    shared = draw.integers(2, 40, 300).tolist()
    ids = [[*shared, k, *draw.integers(2, 40, n).tolist()] for k, n in ((5, 90), (6, 70), (7, 200))]
    batch = packed(ids) if layout == "packed" else batch_of(ids, layout)
    batch |= {"num_items_in_batch": 9, "use_cache": False}  # type: ignore[dict-item]
    rows = rows_of(batch)
    small = small_batch(batch, rows, [0, 1, 2], 90)
    assert small["input_ids"].numel() <= 90 and small["num_items_in_batch"] == 9 and small["use_cache"] is False
    unique, flat = trees(small)
    lead = layout == "left"  # a column of the padding
    assert flat == 90 - 3 * lead and unique == 60 - lead  # 15 tokens of the shared prefix, and 15 of each row
    for k, row in enumerate(rows_of(small).ids):
        assert row.tolist() == ids[k][285 + lead : 315]
    whole = small_batch(batch, rows, [0, 2], 10_000)
    assert [row.tolist() for row in rows_of(whole).ids] == [ids[0], ids[2]]
    if layout != "packed":
        assert whole["input_ids"].shape == (2, batch["input_ids"].shape[1])
    if layout == "left":
        assert not whole["attention_mask"][0, 0]
        assert not small["attention_mask"][:, 0].any() and small["attention_mask"][:, 1:].all()


def test_where_the_cut_leaves_nothing_to_predict_all_its_tokens_are():
    ids = [[1, *[2] * 60, k, *[3] * 40] for k in (4, 5)]
    batch = batch_of(ids)
    batch["labels"][:, :-1] = -100
    small = small_batch(batch, rows_of(batch), [0, 1], 20)
    assert small["input_ids"].shape == (2, 10) and all(mask.all() for mask in rows_of(small).masks)


def test_arguments_of_packing_follow_the_cut():
    batch: dict[str, Any] = packed(IDS)
    batch |= {"cu_seq_lens_q": torch.tensor([0, 7, 13, 21]), "max_length_q": 8, "seq_idx": torch.zeros(1, 21).int()}
    small = small_batch(batch, rows_of(batch), [0, 2], 8)
    assert small["cu_seq_lens_q"].tolist() == [0, 4, 8] and small["max_length_q"] == 4
    assert small["seq_idx"].tolist() == [[0] * 4 + [1] * 4] and small["seq_idx"].dtype == torch.int32
    assert small["position_ids"].tolist() == [[*range(4)] * 2]


# ---- memory


MEMORY: dict[str, dict[str, Any]] = {
    "few tokens": {"layers": 6},  # parts add up gradients, so that of one matrix stands beside those of all
    "few tokens, bfloat16": {"layers": 6, "dtype": torch.bfloat16},
    "long rows": {"length": 120},
    "long rows, budget": {"length": 120, "budget": 60},
    "long rows, LoRA": {"length": 120, "lora": True},
    "long rows, checkpointing, budget": {"length": 120, "budget": 60, "gradient_checkpointing": True},
    "long rows, TRL, budget": {"length": 120, "budget": 60, "trl": True, "vocabulary": 4096, "hidden": 512},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEMORY)
def test_the_first_step_needs_no_more_memory_with_its_check(case, tmp_path, monkeypatch):
    wanted = {"length": 8, **MEMORY[case]}
    length, budget, lora = wanted.pop("length"), wanted.pop("budget", None), wanted.pop("lora", False)
    draw, peaks = np.random.default_rng(0), []
    shared = draw.integers(2, 40, length).tolist()
    data = [{"input_ids": shared + draw.integers(2, 40, 8 + length // 4).tolist()} for _ in range(4)]
    data = [{**row, "labels": row["input_ids"]} for row in data]
    for checks in (False, False, True):  # the first also pays for what is checked once in a process
        model = runs.model(
            dtype=wanted.get("dtype", torch.float32),
            hidden_size=wanted.get("hidden", 256),
            intermediate_size=1024,
            max_position_embeddings=1024,
            num_hidden_layers=wanted.get("layers", runs.SHAPE["num_hidden_layers"]),
            vocab_size=wanted.get("vocabulary", 512),
        )
        trained: Any = get_peft_model(model, runs.adapter()) if lora else model
        arguments = {**settings(tmp_path), "per_device_train_batch_size": 4, "max_steps": 1, "optim": "sgd"}
        arguments |= {"save_strategy": "no", "gradient_checkpointing": wanted.get("gradient_checkpointing", False)}
        trainer: Any
        if wanted.get("trl"):
            arguments |= {"max_length": None}
            rows = Dataset.from_list(data)
            trainer = SFTTrainer(trained, SFTConfig(**arguments), train_dataset=rows, processing_class=runs.tokenizer())
        else:
            collate = DataCollatorForSeq2Seq(runs.tokenizer())
            trainer = Trainer(trained, TrainingArguments(**arguments), train_dataset=data, data_collator=collate)  # type: ignore[arg-type]
        tt.share_prefixes(trainer, budget, check=checks)
        trained.train()
        cost_if_countable(trained)  # counts fake tensors, once
        with CountStorages() as meter:
            trainer.train()
        peaks.append(meter.peak)
    assert peaks[2] <= 1.1 * peaks[1], [peak / 1e6 for peak in peaks]


def test_tokens_of_the_plain_side_follow_the_budget():
    model = runs.model(hidden_size=64, max_position_embeddings=4096)
    ids = np.arange(2000) % 40
    batch = {"input_ids": torch.from_numpy(ids[None]), "labels": torch.from_numpy(ids[None])}
    within = [tokens_within(tt.TreeEngine(model, budget=b), rows_of(batch), LossOutput()) for b in (100, 1000)]
    assert first_step.LEAST_TOKENS < within[0] < within[1] < 2000


def test_a_tenth_of_the_time_of_a_step_is_compared_but_no_less_than_two_windows():
    rows = rows_of({"input_ids": torch.arange(8000)[None].remainder(7), "attention_mask": torch.ones(1, 8000)})
    found = []
    for settings in (
        {},
        {"sliding_window": 8, "use_sliding_window": True},
        {"sliding_window": 90, "use_sliding_window": True},
    ):
        windows = {"layer_types": ["sliding_attention", "full_attention"], **settings} if settings else {}
        model = runs.model(max_position_embeddings=8192, **windows)
        found.append(first_step.tokens_in_time(tt.TreeEngine(model), rows))
    assert found == [200, 200, 2 * first_step.ROWS * 90]
    few = rows_of({"input_ids": torch.arange(80)[None].remainder(7), "attention_mask": torch.ones(1, 80)})
    assert first_step.tokens_in_time(tt.TreeEngine(runs.model()), few) == first_step.LEAST_TOKENS


def test_the_rows_of_a_long_step_are_cut_to_what_is_compared_in_time(tmp_path):
    trunk = list(range(2, 40)) * 40
    batch = batch_of([[*trunk, *own] for own in ([5, 6, 7] * 200, [8, 9] * 300, [3] * 600)], "right")
    model = runs.model(max_position_embeddings=4096)
    question = Question(model, LossOutput(), batch, rows_of(batch))
    small = first_step._small_sample(question, range(3), tt.TreeEngine(model))
    assert small.batch["input_ids"].shape == (3, (len(trunk) + 3 * 600) // first_step.STEP_SHARE // 3)


def uncountable(model: nn.Module) -> Any:
    raise tt.UnsupportedModel("its cost is not known")


def test_quadratic_attention_and_a_model_that_cannot_be_counted_get_fewer_tokens(monkeypatch):
    ids = np.arange(2000) % 40
    batch = {"input_ids": torch.from_numpy(ids[None]), "labels": torch.from_numpy(ids[None])}
    within = {}
    for attention in ("sdpa", "eager"):
        model = runs.model(max_position_embeddings=4096)
        model.set_attn_implementation(attention)
        within[attention] = tokens_within(tt.TreeEngine(model), rows_of(batch), FusedOutput())
    assert first_step.LEAST_TOKENS < within["eager"] < within["sdpa"] / 2
    monkeypatch.setattr("treetrain.registry.cost_of", uncountable)
    assert tokens_within(tt.TreeEngine(model), rows_of(batch), FusedOutput()) == first_step.UNCOUNTED_TOKENS


# ---- ranks


def on_ranks(group: Any, folder: str, wrong: int) -> str:
    """Train one step in which one rank's gradients are wrong; what this rank raises."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        if rank == wrong:
            spoil(patch, "mlp", lambda grad: grad.mul_(0.9))
        try:
            train(BUILDERS["plain"], folder, shared=True, steps=1, ddp_backend="gloo")  # type: ignore[arg-type]
        except (RuntimeError, RanksDisagree) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_finds_a_difference_stops_all_of_them(two, tmp_path):
    first, second = two.run(on_ranks, str(tmp_path), 1, timeout=120)
    assert first.startswith("RanksDisagree: the comparison in the first step stopped on all ranks, because of rank 1")
    assert second.startswith("RuntimeError: first step") and "gradients" in second
