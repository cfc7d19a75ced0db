"""TRL's other trainers: those whose model has TRL's fused head are let through, those that read logits are refused.

Nothing here goes by a trainer's name; docs/integrations.md lists them.
"""

import functools
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_runs as runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.optim import optimizer as optimizers
from trainer_runs import difference, train
from transformers import PreTrainedTokenizerFast, Trainer

import treetrain as tt
from treetrain.trainers import outputs
from treetrain.trainers.batches import ModelInputs
from treetrain.trainers.calls import Asks, Call
from treetrain.trainers.outputs import Answer, Compared, Output, label_logprobs, zero_of
from treetrain.trainers.patches import before_steps

DISTILLED = 3
"""Steps of a distillation; 20 agree as well."""


def experimental(name: str) -> Any:
    """A trainer and its configuration."""
    module = pytest.importorskip(f"trl.experimental.{name.lower()}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def build_gmpo(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
    return runs._online(*experimental("GMPO"), settings, runs.model(dtype=dtype), folder, False)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte: GOLD takes byte-level tokenizers alone."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*letters, "<eos>", "<pad>"])}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(["<eos>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def build_distillation(name: str) -> Any:
    def build(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
        trainer, config = experimental(name)
        words = bytes_tokenizer() if name == "GOLD" else runs.tokenizer()
        words.chat_template = runs.CHAT_TEMPLATE
        return trainer(
            runs.model(dtype=dtype, vocab_size=300),
            teacher_model=runs.model(seed=1, dtype=dtype, vocab_size=300),
            args=config(**{"max_length": 256, "lmbda": 0.0, **settings}),
            train_dataset=runs.chats(32),
            processing_class=words,
        )

    return build


def build_preference(name: str) -> Any:
    def build(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
        trainer, config = experimental(name)
        rows = runs.preferences(8)
        if name == "TPO":
            rows = rows.map(lambda row: {"reference": row["chosen"]})
        return trainer(
            model=runs.model(dtype=dtype),
            args=config(**{name: value for name, value in settings.items()}),
            train_dataset=rows,
            processing_class=runs.tokenizer(),
        )

    return build


def test_a_trainer_that_scores_by_the_fused_head_learns_the_same(tmp_path):
    shared, plain = (train(build_gmpo, tmp_path, shared=share, steps=2) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found
    assert any("tree/overlap" in logs for logs in shared.logs)


@pytest.mark.parametrize("name", ["GKD", "GOLD"])
def test_a_trainer_that_has_the_fused_head_and_reads_logits_learns_the_same_and_is_told(name, tmp_path):
    build = build_distillation(name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shared = train(build, tmp_path, shared=True, steps=3)
    found = difference(shared, train(build, tmp_path, shared=False, steps=3))
    assert max(found.metrics, found.weights) <= 1e-5, found
    assert any("asked for logits, which no tree gives" in str(each.message) for each in told)


@pytest.mark.parametrize("name", ["CPO", "ORPO", "TPO"])
def test_a_trainer_that_reads_logits_without_the_fused_head_is_refused_before_training(name, tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = build_preference(name)(settings, torch.float32, tmp_path)
    with pytest.raises(ValueError, match=rf"{name}Trainer of TRL asks its model for logits.*tt\.token_logprobs"):
        tt.share_prefixes(trainer)


def test_a_wrong_score_of_such_a_trainer_stops_the_first_step(tmp_path, monkeypatch):
    runs.make_scores_wrong(monkeypatch)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02"):
        train(build_gmpo, tmp_path, shared=True, steps=1)


class SumTrainer(Trainer):
    """Reads what no trainer of TRL reads: the log-likelihood of each row."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        sums = model(**inputs).sums
        return -(sums.exp() + sums).mean()


SumTrainer.__module__ = "trl.trainer.sums"


class SumsOutput(Output):
    """Docs/contributing.md: a new kind of trainer is this class."""

    trainers = ("SumTrainer",)

    def cases(self, call: Call) -> list[tuple[object, Asks]]:
        return [(call.in_loss and call.has_labels, Asks.SCORES)]

    def answer(self, answer: Answer) -> Any:
        return SimpleNamespace(sums=answer.keep(answer.scores.sum(1)))

    def plain(self, forward: Callable[..., Any], batch: ModelInputs) -> Compared:
        scores = label_logprobs(forward(**batch).logits, batch["labels"])
        return Compared(scores, None, zero_of(scores))


def build_sums(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
    made = runs.BUILDERS["plain"](settings, dtype, folder)
    made.__class__ = SumTrainer
    plain = made.model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **inputs: Any) -> Any:
        output = plain(*args, **inputs)
        if inputs.get("labels") is not None:
            output.sums = label_logprobs(output.logits, inputs["labels"]).sum(1)
        return output

    made.model.forward = forward
    return made


def test_a_new_kind_of_trainer_is_one_class(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="SumTrainer of TRL asks its model for logits"):
        train(build_sums, tmp_path, shared=True)
    monkeypatch.setattr(outputs, "OUTPUTS", (*outputs.OUTPUTS, SumsOutput))
    shared, plain = (train(build_sums, tmp_path, shared=share, steps=3) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5, found
    assert any("tree/overlap" in logs for logs in shared.logs)


def test_the_hook_before_steps_goes_with_its_object():
    class Sharing:
        def __init__(self) -> None:
            self.steps = 0

        def step(self, optimizer: torch.optim.Optimizer) -> None:
            self.steps += 1

    hooks = optimizers._global_optimizer_pre_hooks
    before, sharing = len(hooks), Sharing()
    before_steps(sharing.step)
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()
    assert sharing.steps == 1 and len(hooks) == before + 1
    del sharing
    gc.collect()
    assert len(hooks) == before


def build_stable_distillation(settings: dict[str, Any], dtype: torch.dtype, folder: Path, *, lora: bool = False) -> Any:
    """Of TRL itself, on prompts that come again."""
    trl = pytest.importorskip("trl", minversion="1.16")
    own = {"max_completion_length": 8, "temperature": 0.8, "beta": 0.5}
    return trl.DistillationTrainer(
        runs.model(dtype=dtype),
        teacher_model=runs.model(seed=1, dtype=dtype),
        args=trl.DistillationConfig(**{**own, **settings}),
        train_dataset=runs.prompts(3).select([0, 1, 2] * 9),
        processing_class=runs.tokenizer(),
        peft_config=runs.adapter() if lora else None,
    )


@pytest.mark.parametrize("lora", [False, True])
def test_distillation_from_hidden_states_learns_the_same(lora, tmp_path):
    build = functools.partial(build_stable_distillation, lora=lora)
    shared, plain = (train(build, tmp_path, shared=share, steps=DISTILLED) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found
    engines = shared.trainer.last_states._engines
    assert len(engines) == 2  # the student's and the teacher's


def test_wrong_states_stop_the_first_step_of_a_distillation(tmp_path, monkeypatch):
    from treetrain.trainers import last_states

    within = last_states.within_autograd
    monkeypatch.setattr(last_states, "within_autograd", lambda scored: [1.01 * x for x in within(scored)])
    with pytest.raises(RuntimeError, match="hidden states of Qwen3ForCausalLM differ from the plain model's by"):
        train(build_stable_distillation, tmp_path, shared=True, steps=1)
