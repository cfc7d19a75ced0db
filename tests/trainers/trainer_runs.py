"""Short trainings of tiny models by the trainers of TRL and transformers, with and without shared prefixes."""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import treetrain as tt
from treetrain.check.contract import PureFloat64

WORDS = 40
SPECIAL = ["<pad>", "<eos>"]
SHAPE = {
    "vocab_size": WORDS + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
CLOCK = ("runtime", "per_second", "step_time", "seconds", "tree/", "profiling/", "memory")
"""Parts of the names of logged numbers that are not the same in two runs."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... and two special tokens."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def model(seed: int = 0, dtype: torch.dtype = torch.float32, kind: Any = Qwen3ForCausalLM, **config: Any) -> Any:
    """A random model of two layers."""
    torch.manual_seed(seed)
    return kind(Qwen3Config(**{**SHAPE, **config})).to(dtype)


def learned_positions(dtype: torch.dtype = torch.float32) -> Any:
    """A random model that looks up a vector for each position, and counts padding where it gets no positions."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=64, initializer_range=0.5)
    for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config).to(dtype)


def words(seed: Any, least: int, most: int) -> str:
    """Some words."""
    draw = random.Random(str(seed))
    return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(least, most)))


def chats(rows: int) -> Dataset:
    """Conversations of two turns."""
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": words(("task", k // 4), 12, 16)},
                    {"role": "assistant", "content": words(("first", k // 2), 3, 9)},
                    {"role": "user", "content": words(("more", k // 2), 2, 4)},
                    {"role": "assistant", "content": words(("second", k), 3, 9)},
                ]
            }
            for k in range(rows)
        ]
    )


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}w0 {% generation %}"
    "{{ message.content }} <eos> {% endgeneration %}{% else %}w1 {{ message.content }} {% endif %}{% endfor %}"
)


def preferences(rows: int) -> Dataset:
    """Prompts of which four share a beginning, with two answers each that share some words."""
    return Dataset.from_list(
        [
            {
                "prompt": words(("task", k // 4), 12, 16) + " " + words(("prompt", k // 2), 2, 4),
                "chosen": " " + words(("common", k), 0, 2) + " " + words(("chosen", k), 3, 9),
                "rejected": " " + words(("common", k), 0, 2) + " " + words(("rejected", k), 3, 9),
            }
            for k in range(rows)
        ]
    )


def judged(rows: int) -> Dataset:
    """Answers with a label."""
    return Dataset.from_list(
        [
            {
                "prompt": words(("task", k // 4), 12, 16),
                "completion": " " + words(("answer", k), 3, 9),
                "label": k % 3 != 0,
            }
            for k in range(rows)
        ]
    )


def answers(rows: int) -> Dataset:
    """Prompts and completions, four for a prompt."""
    return judged(rows).remove_columns("label")


def tokens(rows: int, whole: bool = False) -> Dataset:
    """Rows of ids for a plain Trainer, with labels of the completions, or without."""
    encode, found = tokenizer(), []
    for row in answers(rows):
        prompt, completion = (encode(row[name])["input_ids"] for name in ("prompt", "completion"))
        labels = {} if whole else {"labels": [-100] * len(prompt) + completion}
        found.append({"input_ids": prompt + completion, **labels})
    return Dataset.from_list(found)


def prompts(rows: int) -> Dataset:
    """Prompts alone."""
    return Dataset.from_list([{"prompt": words(("task", k), 8, 14)} for k in range(rows)])


def word_reward(completions: list[str], **_: Any) -> list[float]:
    """How many even words a completion has, and how long it is."""
    return [
        sum(int(word[1:]) % 2 == 0 for word in text.split() if word.startswith("w")) + 0.1 * len(text.split())
        for text in completions
    ]


KINDS = ("lora", "moe", "chat", "packed", "whole", "masked", "learned")
"""Settings that choose the model or the data."""


@dataclass
class Run:
    """Results of a training run."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    updates: dict[str, torch.Tensor]
    """Changes that training made to the weights."""
    trainer: Any = field(repr=False)


def train(
    build: Callable[..., Any],
    folder: Path,
    *,
    shared: bool,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    budget: int | None = None,
    evaluate: bool = False,
    resume: Path | None = None,
    check: bool | str = True,
    **settings: Any,
) -> Run:
    """Train for some steps.

    Args:
        build: one of the functions below.
        shared: whether prefixes are shared.
        resume: a checkpoint to go on from.
        check: see `tt.share_prefixes`.
        settings: of the trainer's arguments, and `KINDS`.
    """
    common = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 0,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    kind: dict[str, Any] = {key: settings.pop(key) for key in KINDS if key in settings}
    trainer = build({**common, **settings}, dtype, folder, **kind)
    before = {name: whole(p).clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    if shared:
        assert tt.share_prefixes(trainer, budget, check=check) is trainer
    with double() if dtype is torch.float64 else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        if evaluate:
            trainer.evaluate()
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in trainer.model.named_parameters()]
    weights = {name: whole(p) for name, p in zip(names, trainer.model.parameters(), strict=True) if name in before}
    updates = {name: p - before[name] for name, p in weights.items()}
    return Run(trainer.state.log_history, weights, updates, trainer)


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight as one process would have it; a collective call if it is sharded."""
    if hasattr(weight, "ds_tensor"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()
    weight = weight.detach()
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def make_scores_wrong(patch: pytest.MonkeyPatch) -> None:
    """Scores of a tree are those of another model, by 1 percent."""
    score = tt.TreeEngine.score

    def wrong(self: tt.TreeEngine, *args: Any, **kwargs: Any) -> tt.Scored:
        scored = score(self, *args, **kwargs)
        for row in scored.logprobs:
            row.data *= 1.01
        return scored

    patch.setattr(tt.TreeEngine, "score", wrong)


def padding_in_positions(run: Callable[..., Run], name: str) -> tuple[list[str], float]:
    """Check the first step of `learned_positions` on several processes, which do not all have as many rows to compare.

    Args:
        run: trains for a step with shared prefixes, by the builder of this name.

    Returns:
        what the comparisons with the batch, and of wrong scores with each row by itself, say; how far gradients are
        from those of each row by itself.
    """
    said, build = [], BUILDERS[name]

    def fewer_labels(row: dict[str, Any], k: int) -> dict[str, Any]:
        return {"labels": [-100] * len(row["input_ids"])} if k % 8 in (4, 5) else {}

    def changed(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        if name == "plain":
            trainer.train_dataset = trainer.train_dataset.map(fewer_labels, with_indices=True)
        return trainer

    settings: dict[str, Any] = {"learned": True}
    if name == "plain":
        settings |= {"per_device_train_batch_size": 4, "budget": 20, "train_sampling_strategy": "sequential"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, name, changed)
        with pytest.raises((RuntimeError, tt.RanksDisagree)) as caught:
            run(**settings)
        said.append(str(caught.value))
        goes_on = run(check="rows", **settings)
        make_scores_wrong(patch)
        with pytest.raises((RuntimeError, tt.RanksDisagree)) as caught:
            run(check="rows", **settings)
        said.append(str(caught.value))
    (apart,) = [log["tree/gradient_difference"] for log in goes_on.logs if "tree/gradient_difference" in log]
    return said, apart


def assert_padding_is_seen(said: list[str], apart: float) -> None:
    """What `padding_in_positions` must find on every process."""
    assert "Shared prefixes are right" in said[0] and "counts the padding on a row's left" in said[0], said
    assert "check='rows'" in said[0] and "shared prefixes are wrong for this model" in said[1], said
    assert 0 < apart < 1e-5


@contextlib.contextmanager
def double() -> Iterator[None]:
    """Float64 throughout: the casts of transformers are lifted, and so is the head of TRL, whose sums are float32."""
    with PureFloat64(), mock.patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", DenseHead):
        yield


class DenseHead:
    """The numbers of TRL's fused head from all logits, in their own dtype."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs) -> Any:
        """See `trl.kernels.ChunkedLogProbFunction`."""
        assert bias is None and softcap is None and logit_scale == 1.0
        logits = hidden @ weight.T / temperature
        logprobs = logits.log_softmax(-1)
        probabilities = logprobs.exp()
        chosen = logprobs.gather(-1, targets[:, None])[:, 0]
        found = {
            "entropy": -(probabilities * logprobs).sum(-1),
            "log_sum_sq_probs": probabilities.square().sum(-1).log().detach(),
            "mean_logits": logits.mean(-1).detach(),
            "is_top1": logits.argmax(-1) == targets,
        }
        names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        return chosen, *(found[name] if name in outputs else None for name in names)


def adapter(task: str = "CAUSAL_LM") -> LoraConfig:
    """LoRA on the attention, without dropout."""
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type=task)


def experts(seed: int, dtype: torch.dtype) -> Any:
    """A mixture of four experts with an auxiliary loss."""
    torch.manual_seed(seed)
    settings = {name: value for name, value in SHAPE.items() if name != "intermediate_size"}
    config = Qwen3MoeConfig(
        **settings,
        num_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        router_aux_loss_coef=0.1,
    )
    found = Qwen3MoeForCausalLM(config).to(dtype)
    if dtype is torch.float64:
        found.set_experts_implementation("eager")  # torch's grouped products know no float64
    return found


def build_sft(
    settings: dict[str, Any],
    dtype: torch.dtype,
    folder: Path,
    *,
    lora: bool = False,
    moe: bool = False,
    chat: bool = False,
) -> Any:
    """SFT on prompts and completions, or on conversations."""
    words_ = tokenizer()
    words_.chat_template = CHAT_TEMPLATE
    return SFTTrainer(
        experts(0, dtype) if moe else model(dtype=dtype),
        SFTConfig(**{"max_length": None, **settings}),
        train_dataset=chats(32) if chat else answers(32),
        eval_dataset=chats(8) if chat else answers(8),
        processing_class=words_,
        peft_config=adapter() if lora else None,
    )


def build_dpo(
    settings: dict[str, Any], dtype: torch.dtype, folder: Path, *, lora: bool = False, moe: bool = False
) -> Any:
    """DPO with a reference model of its own, or the disabled adapter."""
    make = experts if moe else model
    return DPOTrainer(
        make(seed=0, dtype=dtype),
        ref_model=None if lora else make(seed=1, dtype=dtype),
        args=DPOConfig(**{"beta": 0.5, **settings}),
        train_dataset=preferences(32),
        eval_dataset=preferences(8),
        processing_class=tokenizer(),
        peft_config=adapter() if lora else None,
    )


def build_kto(settings: dict[str, Any], dtype: torch.dtype, folder: Path, *, lora: bool = False) -> Any:
    """KTO with its KL pass."""
    return KTOTrainer(
        model(dtype=dtype),
        ref_model=None if lora else model(seed=1, dtype=dtype),
        args=KTOConfig(**{"beta": 0.5, **settings}),
        train_dataset=judged(32),
        eval_dataset=judged(8),
        processing_class=tokenizer(),
        peft_config=adapter() if lora else None,
    )


def build_reward(settings: dict[str, Any], dtype: torch.dtype, folder: Path, *, lora: bool = False) -> Any:
    """A reward model on pairs."""
    return RewardTrainer(
        model(dtype=dtype, kind=Qwen3ForSequenceClassification, num_labels=1),
        args=RewardConfig(**{"max_length": None, "center_rewards_coefficient": 0.1, **settings}),
        train_dataset=preferences(32),
        eval_dataset=preferences(8),
        processing_class=tokenizer(),
        peft_config=adapter("SEQ_CLS") if lora else None,
    )


def build_grpo(
    settings: dict[str, Any], dtype: torch.dtype, folder: Path, *, lora: bool = False, learned: bool = False
) -> Any:
    """GRPO with a reference, four completions for a prompt and two iterations; `learned`: of `learned_positions`."""
    made = learned_positions(dtype) if learned else model(dtype=dtype)
    return _online(GRPOTrainer, GRPOConfig, {"num_iterations": 2, **settings}, made, folder, lora)


def build_rloo(settings: dict[str, Any], dtype: torch.dtype, folder: Path, *, lora: bool = False) -> Any:
    """RLOO with a reference and four completions for a prompt."""
    return _online(RLOOTrainer, RLOOConfig, settings, model(dtype=dtype), folder, lora)


def _online(kind: Any, config: Any, settings: dict[str, Any], made: Any, folder: Path, lora: bool) -> Any:
    own = {"num_generations": 4, "max_completion_length": 8, "beta": 0.1, "temperature": 0.8}
    saved = folder / "start"
    made.save_pretrained(saved)  # the first rank alone writes
    if dist.is_initialized():
        dist.barrier()
    started = type(made).from_pretrained(saved, dtype=made.dtype)
    return kind(
        started,
        reward_funcs=word_reward,
        args=config(**{**own, **settings}),
        train_dataset=prompts(32),
        eval_dataset=prompts(4),
        processing_class=tokenizer(),
        peft_config=adapter() if lora else None,
    )


def build_plain(
    settings: dict[str, Any],
    dtype: torch.dtype,
    folder: Path,
    *,
    lora: bool = False,
    packed: bool = False,
    whole: bool = False,
    moe: bool = False,
    masked: bool = False,
    learned: bool = False,
) -> Any:
    """A plain Trainer with labels.

    `masked`: every second four rows have none. `learned`: `learned_positions`, with rows padded on the left.
    """
    lm: Any = experts(0, dtype) if moe else learned_positions(dtype) if learned else model(dtype=dtype)
    if moe:
        lm.config.output_router_logits = True
    if dtype is torch.float64:
        lm.loss_function = _mean_in_float64  # transformers casts logits to float32
    if lora:
        lm = get_peft_model(lm, adapter())
    if packed:
        collator = DataCollatorWithFlattening()
    elif whole:
        collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    else:
        (words_ := tokenizer()).padding_side = "left" if learned else "right"
        collator = DataCollatorForSeq2Seq(words_, padding=True)
    rows = tokens(32, whole)
    if masked:
        rows = rows.map(
            lambda row, k: {"labels": [-100] * len(row["labels"])} if k % 8 >= 4 else row, with_indices=True
        )
    return Trainer(
        lm,
        TrainingArguments(**settings),
        train_dataset=rows,
        eval_dataset=tokens(8, whole),
        data_collator=collator,
    )


def _mean_in_float64(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = nn.functional.cross_entropy(logits.view(-1, vocab_size), labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


BUILDERS = {
    "sft": build_sft,
    "dpo": build_dpo,
    "kto": build_kto,
    "grpo": build_grpo,
    "rloo": build_rloo,
    "reward": build_reward,
    "plain": build_plain,
}


@dataclass(frozen=True)
class Difference:
    """The largest differences of two runs."""

    metrics: float
    """|a - b| / max(1, |b|) over the logged numbers."""
    weights: float
    """|a - b| / |b| over all trained weights."""
    updates: float
    """The same of what training has added to them: in float32 they are rounded to the weights' own precision."""
    worst: str
    """Which number differs most."""


def difference(shared: Run, plain: Run) -> Difference:
    """How far two runs are apart; they must have logged the same names."""
    worst, name = 0.0, ""
    assert len(shared.logs) == len(plain.logs)
    for step, (ours, theirs) in enumerate(zip(shared.logs, plain.logs)):
        ours, theirs = (
            {key: value for key, value in logs.items() if not any(part in key for part in CLOCK)}
            for logs in (ours, theirs)
        )
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        for key, expected in theirs.items():
            if expected is None or not math.isfinite(expected):
                apart = 0.0 if str(ours[key]) == str(expected) else math.inf
            else:
                apart = abs(ours[key] - expected) / max(1.0, abs(expected))
            if not apart <= worst:
                worst, name = apart, f"{key} at {step}"
    return Difference(worst, _apart(shared.weights, plain.weights), _apart(shared.updates, plain.updates), name)


def _apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    error = sum(float((found[name] - x).double().square().sum()) for name, x in expected.items()) ** 0.5
    size = sum(float(x.double().square().sum()) for x in expected.values()) ** 0.5
    return error / size if size else error
