"""TRL's other trainers: those whose model has TRL's fused head are let through, those that read logits are refused.

Nothing here goes by a trainer's name; docs/integrations.md lists them.
"""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
"""Steps of a distillation; those marked slow take 20."""


def experimental(name: str) -> Any:
    """A trainer and its configuration."""
    module, name = pytest.importorskip(f"trl.experimental.{name.lower()}"), name.replace("_", "")
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


def build_distillation(name: str, **own: Any) -> Any:
    def build(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
        trainer, config = experimental(name)
        words = bytes_tokenizer() if name == "GOLD" else runs.tokenizer()
        words.chat_template = runs.CHAT_TEMPLATE
        teacher = runs.model(seed=1, dtype=dtype, vocab_size=300)
        if name == "IW_OPD":  # it compares the student's tokenizer with the one in the teacher's folder
            words.save_pretrained(folder / "teacher")
            teacher.config.save_pretrained(folder / "teacher")
            teacher.config._name_or_path = str(folder / "teacher")
        return trainer(
            runs.model(dtype=dtype, vocab_size=300),
            teacher_model=teacher,
            args=config(**{"max_length": 256, "lmbda": 0.0, **own, **settings}),
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


def build_self_distillation(name: str, teacher: str, lora: bool = False, **own: Any) -> Any:
    """SDFT and SDPO, whose teacher is the student itself, with more in its prompt."""

    def build(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
        trainer, config = experimental(name)
        rows = runs.prompts(3).select([0, 1, 2] * 9)
        more: dict[str, Any] = {"reward_funcs": [runs.word_reward]} if name == "SDPO" else {}
        common = {"max_completion_length": 8, "num_generations": 4, "teacher_model_kind": teacher, **own}
        return trainer(
            runs.model(dtype=dtype),
            args=config(**{**common, **settings}),
            train_dataset=rows.map(lambda row: {"privileged_context": row["prompt"][:12]}),
            processing_class=runs.tokenizer(),
            peft_config=runs.adapter() if lora else None,
            **more,
        )

    return build


class TeacherServer:
    """Stands for a server with a teacher: its log-probabilities do not depend on the rows."""

    def __init__(self, **_: Any) -> None: ...

    def get_sequence_logprobs(self, sequences: Any, prompt_lengths: Any, top_logprobs: int, **_: Any) -> Any:
        counts = [len(ids) - start for ids, start in zip(sequences, prompt_lengths)]
        best = [[[-0.5 - 0.25 * k for k in range(top_logprobs)]] * count for count in counts]
        return {
            "logprobs": best,
            "logprob_token_ids": [[[2 + k for k in range(top_logprobs)]] * count for count in counts],
            "actual_logprobs": [[[-1.5]] * count for count in counts],
        }


def build_server(settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> Any:
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
    from trl.generation import vllm_client

    own = {"max_completion_length": 8, "teacher_model_server_url": "http://localhost:1", "beta": 0.0, "loss_top_k": 3}
    with mock.patch.object(vllm_client, "VLLMClient", TeacherServer):
        return ServerDistillationTrainer(
            runs.model(dtype=dtype),
            args=ServerDistillationConfig(**{**own, **settings}),
            train_dataset=runs.prompts(3).select([0, 1, 2] * 9),
            processing_class=runs.tokenizer(),
        )


DISTILLATIONS = {
    "GKD": build_distillation("GKD"),
    "GKD on policy": build_distillation("GKD", lmbda=1.0, max_new_tokens=8),
    "GOLD": build_distillation("GOLD"),
    "IWOPD": build_distillation("IW_OPD", lmbda=1.0, max_completion_length=8),
    "IWOPD, a divergence": build_distillation(
        "IW_OPD", distillation_objective="jsd", beta=0.5, loss_top_k=0, max_completion_length=8
    ),
    "SDFT": build_self_distillation("SDFT", "live", distillation_topk=5),
    "SDFT, the adapter taken off": build_self_distillation("SDFT", "base", lora=True, distillation_topk=5),
    "SDFT, a second adapter": build_self_distillation("SDFT", "ema", lora=True, distillation_mode="full_logits"),
    "SDPO": build_self_distillation("SDPO", "live", distillation_weight=0.5, success_reward_threshold=0.1),
    "server": build_server,
}


@pytest.mark.parametrize(("name", "budget"), [*((name, None) for name in DISTILLATIONS), ("GKD", 16), ("SDFT", 16)])
def test_distillation_from_logits_learns_the_same(name, budget, tmp_path):
    build = DISTILLATIONS[name]
    shared, plain = (train(build, tmp_path, shared=share, steps=DISTILLED, budget=budget) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-3, found
    assert shared.trainer.last_states._compared  # trees have answered


@pytest.mark.parametrize("name", ["CPO", "ORPO", "TPO"])
def test_a_trainer_that_reads_logits_without_the_fused_head_is_refused_before_training(name, tmp_path):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = build_preference(name)(settings, torch.float32, tmp_path)
    with pytest.raises(ValueError, match=rf"{name}Trainer of TRL asks its model for logits.*tt\.token_logprobs"):
        tt.share_prefixes(trainer)


def test_a_wrong_score_of_such_a_trainer_stops_the_first_step(tmp_path, monkeypatch):
    runs.make_scores_wrong(monkeypatch)
    with pytest.raises((RuntimeError, tt.UnsupportedModel), match=r"differ.* by 1\.0e-02"):
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


@pytest.mark.parametrize(
    "own", [{}, {"lora": True}, {"bf16": True}, {"bf16": True, "budget": 16}, {"bf16": True, "lora": True}], ids=str
)
def test_distillation_from_hidden_states_learns_the_same(own, tmp_path):
    """Also with bf16=True, TRL's default: TRL calls its models around accelerate's autocast, in float32."""
    own = {"bf16": False, **own}
    build = functools.partial(build_stable_distillation, lora=own.pop("lora", False))
    shared, plain = (train(build, tmp_path, shared=share, steps=DISTILLED, **own) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found
    engines = shared.trainer.last_states._engines
    assert len(engines) == 2  # the student's and the teacher's


@pytest.mark.parametrize("name", DISTILLATIONS)
def test_distillation_from_logits_in_mixed_precision_is_as_far_from_float32_as_the_plain_one(name, tmp_path):
    build = DISTILLATIONS[name]
    shared, plain = (train(build, tmp_path, shared=share, steps=2, bf16=True) for share in (True, False))
    exact = train(build, tmp_path, shared=False, steps=2)
    ours, theirs = (difference(run, exact) for run in (shared, plain))
    assert 1e-3 < ours.updates <= 1.5 * theirs.updates, (ours, theirs)
    assert ours.metrics <= 2.5 * theirs.metrics, (ours, theirs)
    assert shared.trainer.last_states._compared  # in 16 bits, though accelerate's output is in float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["DistillationTrainer", "DistillationTrainer lora", "DistillationTrainer bf16", *DISTILLATIONS]
)
def test_a_distillation_is_the_same_after_twenty_steps(name, tmp_path, record_property):
    stable = functools.partial(build_stable_distillation, lora="lora" in name)
    build, bf16 = DISTILLATIONS.get(name, stable), "bf16" in name
    shared, plain = (train(build, tmp_path, shared=share, steps=20, bf16=bf16) for share in (True, False))
    found = difference(shared, plain)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-3, found
    record_property("errors", {"metrics": found.metrics, "weights": found.weights, "updates": found.updates})


@pytest.mark.parametrize(
    ("build", "what"), [(build_stable_distillation, "hidden states"), (DISTILLATIONS["GKD"], "logits")]
)
def test_wrong_states_stop_the_first_step_of_a_distillation(build, what, tmp_path, monkeypatch):
    from treetrain.trainers import last_states

    within = last_states.within_autograd
    monkeypatch.setattr(last_states, "within_autograd", lambda *given: [1.01 * x for x in within(*given)])
    with pytest.raises(RuntimeError, match=f"{what} of Qwen3ForCausalLM differ from the plain model's by"):
        train(build, tmp_path, shared=True, steps=1)


def made(build: Callable[..., Any], folder: Path) -> Any:
    settings = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False, "max_steps": 1}
    return build({**settings, "disable_tqdm": True}, torch.float32, folder)


def test_a_distillation_that_no_tree_can_answer_is_refused_by_name(tmp_path, monkeypatch):
    trainer = made(DISTILLATIONS["GKD"], tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="with GKDTrainer and 2 processes, which has not been verified"):
        tt.share_prefixes(trainer)
    monkeypatch.undo()
    trainer._is_vlm = True
    with pytest.raises(ValueError, match="with GKDTrainer and a model for images and text"):
        tt.share_prefixes(trainer)
    trainer._is_vlm = False
    tt.share_prefixes(trainer)
    with pytest.raises(ValueError, match="call share_prefixes once"):
        tt.share_prefixes(trainer)
    ids = torch.tensor([[2, 3, 4]])
    with trainer.last_states.answering():
        with pytest.raises(ValueError, match="GKDTrainer calls its model with position_ids, which it does not share"):
            trainer.model(input_ids=ids, position_ids=ids)
        assert trainer.model(input_ids=ids, logits_to_keep=2).logits.shape[1] == 2
    plain = made(runs.BUILDERS["plain"], tmp_path)
    kind = type("AsyncDistillationTrainer", (Trainer,), {"__module__": "trl.experimental.async_distillation"})
    plain.__class__ = kind
    with pytest.raises(ValueError, match=r"AsyncDistillationTrainer of TRL calls its model's layers.*distill_topk"):
        tt.share_prefixes(plain)


def test_a_teacher_with_another_tokenizer_is_refused_before_training(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    trainer = made(build_stable_distillation, tmp_path)
    for model, words in ((trainer.model, ("a", "b")), (trainer.teacher_model, ("b", "a"))):
        folder = tmp_path / words[0]
        folder.mkdir()
        Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="a")).save(
            str(folder / "tokenizer.json")
        )
        model.config._name_or_path = str(folder)
    with pytest.raises(tt.UnsupportedModel, match=r"student's tokenizer.*has 'a' at id 0, the teacher's.*'b'"):
        tt.share_prefixes(trainer)


def test_logits_of_trees_are_in_the_dtype_of_mixed_precision(tmp_path):
    trainer = made(DISTILLATIONS["GKD"], tmp_path)
    trainer.accelerator.state._mixed_precision, trainer.accelerator.native_amp = "bf16", True
    trainer.model = trainer.accelerator.prepare_model(trainer.model)
    ids = torch.tensor([[2, 3, 4], [2, 3, 5]])
    plain = trainer.model(input_ids=ids).logits
    tt.share_prefixes(trainer)
    with trainer.last_states.answering():
        found = trainer.model(input_ids=ids).logits
    assert found.dtype == plain.dtype == torch.float32
    assert (found - plain).abs().max() <= 0.02 * plain.abs().max()
    assert torch.equal(found, found.bfloat16().float())  # the head ran in bfloat16
