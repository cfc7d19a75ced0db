"""A loss of the user's own that takes log-probabilities learns what it learns from logits, with trees and without."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainer_runs as runs
from test_share_prefixes_fsdp2 import launched
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from trainer_runs import BUILDERS, Run, difference, double, train
from transformers import Gemma2Config, Gemma2ForCausalLM, Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

import treetrain as tt
from support.fsdp_on_cpus import needs_sharding_on_cpus
from support.models import make_model
from treetrain.check.contract import DOUBLE, SINGLE

ROWS = [
    [5, 6, 7, 8, 9, 10],
    [5, 6, 7, 8, 9, 10],  # twice
    [5, 6, 7],  # a prefix of others
    [5, 6, 11, 12, 13, 14, 15, 16, 17],
    [5, 6, 11, 12, 18],
    [20, 21, 22, 23],  # forks at the first token
    [3],
    [5, 6, 11, 12, 13, 14, 15, 16, 19, 4],
]
SETTINGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def padded(side: str) -> dict[str, Tensor]:
    rows = [torch.tensor(row) for row in ROWS]
    ids = pad_sequence(rows, True, 0, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, padding_side=side)
    return {"input_ids": ids, "attention_mask": mask}


def packed(by: str) -> dict[str, Tensor]:
    ids = torch.tensor([[token for row in ROWS for token in row]])
    if by == "position_ids":
        return {"input_ids": ids, by: torch.tensor([[t for row in ROWS for t in range(len(row))]])}
    ends = torch.tensor([0, *map(len, ROWS)]).cumsum(0).to(torch.int32)
    return {"input_ids": ids, "cu_seq_lens_q": ends}


BATCHES = {
    "left": partial(padded, "left"),
    "right": partial(padded, "right"),
    "positions": partial(packed, "position_ids"),
    "lengths": partial(packed, "cu_seq_lens"),
}


def starts(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """Where each row begins in the batch."""
    if "attention_mask" in batch:
        return [(b, int(mask.argmax())) for b, mask in enumerate(batch["attention_mask"])]
    ends = torch.tensor([0, *map(len, ROWS)]).cumsum(0).tolist()
    return [(0, start) for start in ends[:-1]]


def labelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """With labels of some tokens: none of a row's first, nor those that 3 divides."""
    labels = torch.full_like(batch["input_ids"], -100)
    for (b, first), row in zip(starts(batch), ROWS):
        for t, token in enumerate(row):
            if t and token % 3:
                labels[b, first + t] = token
    return batch | {"labels": labels}


def by_rows(model: Any, batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each row alone through the plain model."""
    ids = batch["input_ids"]
    cells: list[dict[tuple[int, int], Tensor]] = [{}, {}]
    for (b, first), row in zip(starts(batch), ROWS):
        logps = (model(input_ids=torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
        for t, token in enumerate(row[1:]):
            if "labels" not in batch or batch["labels"][b, first + t + 1] != -100:
                cells[0][b, first + t] = logps[t, token]
                cells[1][b, first + t] = -(logps[t].exp() * logps[t]).sum()
    nothing = torch.zeros((), dtype=model.dtype)
    first, second = (
        torch.stack(
            [torch.stack([found.get((b, t), nothing) for t in range(ids.shape[1] - 1)]) for b in range(len(ids))]
        )
        for found in cells
    )
    return first, second


def objective(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A loss that is not linear, in which every prediction has a weight of its own."""
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    return (weights * (logprobs.exp() + logprobs.square() - 0.1 * entropies)).sum()


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("budget", ["plain", None, 7])
@pytest.mark.parametrize("shape", BATCHES)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_and_gradients_are_those_of_each_row_alone(budget, shape, labels, dtype, tmp_path):
    bound = DOUBLE if dtype is torch.float64 else SINGLE
    model, batch = runs.model(dtype=dtype), BATCHES[shape]()
    batch = labelled(batch) if labels else batch
    with double() if dtype is torch.float64 else contextlib.nullcontext():
        expected = by_rows(model, batch, 1.3)
        objective(*expected).backward()
        wanted = gradient(model)
        model.zero_grad()
        if budget == "plain":
            found = tt.token_logprobs(model, batch, temperature=1.3, return_entropy=True)
            objective(*found).backward()
        else:
            trainer = own_trainer(model, tmp_path)
            tt.share_prefixes(trainer, budget)
            found = tt.token_logprobs(trainer.model, batch, temperature=1.3, return_entropy=True)
            objective(*found).backward()
            trainer.prefix_sharing.settle()
    assert found[0].shape == (len(batch["input_ids"]), batch["input_ids"].shape[1] - 1)
    for ours, theirs in zip([x.detach() for x in found], expected):
        assert float((ours - theirs.detach()).abs().max()) <= bound * float(theirs.detach().abs().max())
    assert float((gradient(model) - wanted).norm() / wanted.norm()) <= bound


def given_ids(batch: dict[str, Tensor]) -> Tensor:
    """[B, L - 1, 4] different ids, between which some are missing; at some predictions all are."""
    shape, generator = batch["input_ids"].shape, torch.Generator().manual_seed(3)
    ids = torch.rand(shape[0], shape[1] - 1, 30, generator=generator).argsort(-1)[..., :4]
    missing = torch.rand(ids.shape, generator=generator) < 0.3
    missing[:, ::5] = True
    return ids.masked_fill(missing, -1)


@pytest.mark.parametrize("way", ["plain", "logits", None, 7])
@pytest.mark.parametrize("shape", BATCHES)
def test_scores_at_given_ids_are_those_of_each_row_alone(way, shape, tmp_path):
    model = runs.model(dtype=torch.float64)
    batch = labelled(BATCHES[shape]())
    ids = given_ids(batch)
    with double():
        logps = [(model(input_ids=torch.tensor([row])).logits[0] / 1.3).log_softmax(-1) for row in ROWS]
        expected = torch.zeros(ids.shape, dtype=torch.float64)
        for (b, first), row, every in zip(starts(batch), ROWS, logps):
            for t in range(len(row) - 1):
                if batch["labels"][b, first + t + 1] != -100:
                    own = ids[b, first + t]
                    expected[b, first + t] = torch.where(own == -1, 0.0, every[t][own])
        objective(expected, expected.exp()).backward()
        wanted = gradient(model)
        model.zero_grad()
        if way == "logits":
            logits = torch.zeros(*batch["input_ids"].shape, len(logps[0][0]), dtype=torch.float64)
            for (b, first), row, every in zip(starts(batch), ROWS, logps):
                logits[b, first : first + len(row)] = 1.3 * every.detach()
            output = CausalLMOutputWithPast(logits=logits)
            found = tt.token_logprobs(output, batch["labels"], temperature=1.3, ids=ids)
        elif way == "plain":
            found = tt.token_logprobs(model, batch, temperature=1.3, ids=ids)
        else:
            trainer = own_trainer(model, tmp_path)
            tt.share_prefixes(trainer, way)
            found = tt.token_logprobs(trainer.model, batch, temperature=1.3, ids=ids)
        assert len(found) == 2 and found[1].shape == ids.shape
        assert float((found[1] - expected).detach().abs().max()) <= DOUBLE * float(expected.detach().abs().max())
        if way == "logits":
            return
        objective(found[1], found[1].exp()).backward()
        if way != "plain":
            trainer.prefix_sharing.settle()
    assert float((gradient(model) - wanted).norm() / wanted.norm()) <= DOUBLE


def test_bad_ids_are_named():
    batch = padded("right")
    ids = given_ids(batch)
    outside, twice = ids.clone(), ids.clone()
    outside[2, 1], twice[2, 1] = torch.tensor([1, 2, 90, 3]), torch.tensor([1, 5, -1, 5])
    for wrong, message in (
        (ids[:, 1:], r"ids is a torch.int64 \[8, 8, 4\]; give whole numbers \[8, 9, k\]"),
        (outside, r"ids\[2, 1\]: 90 is outside the vocabulary of 42"),
        (twice, r"ids\[2, 1\]: 5 is there twice"),
    ):
        with pytest.raises(tt.DataError, match=message):
            tt.token_logprobs(runs.model(), batch, ids=wrong)


@pytest.mark.parametrize("shape", ["left", "positions", "lengths"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "lfm2", "bamba", "qwen3_5_text"])
def test_the_plain_model_sees_nothing_before_a_row(name, shape):
    """Positions of these models count padding, or their layers run on from one packed row into the next."""
    model = make_model(name)
    batch = labelled(BATCHES[shape]())
    expected = by_rows(model, batch, 1.3)
    objective(*expected).backward()
    wanted = gradient(model)
    model.zero_grad()
    found = tt.token_logprobs(model, batch, temperature=1.3, return_entropy=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    objective(*found).backward()
    assert float((gradient(model) - wanted).norm() / wanted.norm()) <= SINGLE


def own_trainer(model: Any, folder: Path, **settings: Any) -> Any:
    arguments = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False}
    return Trainer(model, runs.TrainingArguments(**arguments, **settings))


def test_logits_that_a_model_caps_are_capped(tmp_path):
    torch.manual_seed(0)
    shape = {**runs.SHAPE, "final_logit_softcapping": 3.0, "attn_implementation": "eager"}
    model, batch = Gemma2ForCausalLM(Gemma2Config(**shape)), padded("right")
    logps = model(**batch).logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    expected = logps * batch["attention_mask"][:, 1:]
    torch.testing.assert_close(tt.token_logprobs(model, batch), expected, rtol=1e-5, atol=1e-5)


def test_the_plain_model_makes_no_logits_of_the_batch(monkeypatch):
    model, batch = runs.model(), padded("right")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    tt.token_logprobs(model, batch)
    assert seen == [(1, sum(len(row) - 1 for row in ROWS), 1)]  # log-probabilities in the place of logits


def test_outputs_with_logits_give_what_the_model_gives():
    model, batch = runs.model(), labelled(padded("left"))
    labels = batch["labels"]
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    found = tt.token_logprobs(outputs, labels, temperature=0.7, return_entropy=True)
    for ours, theirs in zip(found, tt.token_logprobs(model, batch, temperature=0.7, return_entropy=True)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- in trainers


def clipped(logprobs: Tensor, entropies: Tensor, labels: Tensor, items: Any) -> Tensor:
    """A policy loss over the labels, with an entropy bonus; advantages depend on the token."""
    advantages = (labels[:, 1:] % 5 - 2).to(logprobs.dtype)
    ratios = (logprobs + 3.0).exp()
    gains = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages) + 0.05 * entropies
    return -(gains * (labels[:, 1:] != -100)).sum() / items


def from_logits(logits: Tensor, labels: Tensor, items: Any, temperature: float) -> Tensor:
    """The same from logits, as losses are written without treetrain."""
    logps = (logits[:, :-1] / temperature).log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return clipped(logps.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0], entropies, labels, items)


def takes_logprobs(base: Any, *, pop: bool = False) -> Any:
    class Own(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = dict(inputs)
            labels = inputs.pop("labels") if pop else inputs["labels"]
            logprobs, entropies = tt.token_logprobs(model, inputs, temperature=0.7, return_entropy=True)
            loss = clipped(logprobs, entropies, labels, num_items_in_batch or 1)
            hot = tt.token_logprobs(model, inputs, temperature=1.3)  # a second call, at another temperature
            loss = loss + 0.1 * (hot * (labels[:, 1:] != -100)).mean()
            with torch.no_grad():
                metric = tt.token_logprobs(model, inputs).mean()
            loss = loss + metric
            return (loss, {}) if return_outputs else loss

    return Own


def reads_logits(base: Any) -> Any:
    class Own(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels, ids = inputs["labels"], inputs["input_ids"]
            logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits
            loss = from_logits(logits, labels, num_items_in_batch or 1, 0.7)
            for weight, temperature, given in ((0.1, 1.3, logits), (1.0, 1.0, logits.detach())):
                logps = (given[:, :-1] / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                loss = loss + weight * (logps * (labels[:, 1:] != -100)).mean()
            return (loss, {}) if return_outputs else loss

    return Own


def scales_the_loss(base: Any) -> Any:
    class Own(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs.loss * 0.3 + 0.2 * outputs["loss"] ** 2 + 0.1 * outputs[0]
            return (loss, outputs) if return_outputs else loss

    return Own


def run(name: str, own: Any, folder: Path, patch: Any, *, shared: bool, steps: int = 2, **settings: Any) -> Run:
    """Train a subclass of a trainer of trl or transformers."""
    plain = {"plain": Trainer, "sft": runs.SFTTrainer}[name]
    with pytest.MonkeyPatch.context() if patch is None else patch.context() as local:
        local.setattr(runs, plain.__name__, own(plain))
        return train(BUILDERS[name], folder, shared=shared, steps=steps, evaluate=True, **{**SETTINGS, **settings})


def assert_same(shared: Run, plain: Run, dtype: torch.dtype = torch.float32) -> None:
    found = difference(shared, plain)
    bound, of_updates = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-10, 1e-10)}[dtype]
    assert max(found.metrics, found.weights) <= bound and found.updates <= of_updates, found
    assert any("tree/overlap" in logs for logs in shared.logs)


CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "plain": ("plain", takes_logprobs, reads_logits, {}),
    "plain packed": ("plain", takes_logprobs, reads_logits, {"packed": True}),
    "plain lora budget": ("plain", takes_logprobs, reads_logits, {"lora": True, "budget": 40}),
    "plain experts": ("plain", takes_logprobs, reads_logits, {"moe": True}),
    "plain bfloat16": ("plain", takes_logprobs, reads_logits, {"bf16": True}),
    "sft": ("sft", takes_logprobs, reads_logits, {}),
    "sft lora budget": ("sft", takes_logprobs, reads_logits, {"lora": True, "budget": 40}),
    "outputs.loss": ("plain", scales_the_loss, scales_the_loss, {}),
}
FAST = ("plain", "sft", "outputs.loss")


def both(case: str, folder: Path, patch: Any, dtype: torch.dtype, steps: int) -> None:
    name, own, plain, settings = CASES[case]
    shared = run(name, own, folder, patch, shared=True, dtype=dtype, steps=steps, **settings)
    alone = run(name, plain, folder, patch, shared=False, dtype=dtype, steps=steps, **settings)
    if settings.get("bf16"):
        exact = run(name, plain, folder, patch, shared=False, dtype=dtype, steps=steps)
        assert difference(shared, exact).updates <= 1.5 * difference(alone, exact).updates
    else:
        assert_same(shared, alone, dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", FAST)
def test_a_loss_of_ones_own_learns_what_it_learns_from_logits(case, tmp_path, monkeypatch):
    both(case, tmp_path, monkeypatch, torch.float32, 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_after_twenty_steps(case, dtype, tmp_path, monkeypatch):
    if dtype is torch.float64 and ("experts" in case or "bfloat16" in case):
        pytest.skip("transformers routes in float32, and bfloat16 is no autocast of float64 weights")
    both(case, tmp_path, monkeypatch, dtype, 20)


@pytest.mark.slow
def test_the_same_lines_run_without_shared_prefixes(tmp_path, monkeypatch):
    alone, logits = (run("plain", own, tmp_path, monkeypatch, shared=False) for own in (takes_logprobs, reads_logits))
    found = difference(alone, logits)
    assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4, found


def with_loss_function(loss_function: Any) -> Any:
    def own(base: Any) -> Any:
        return partial(base, compute_loss_func=loss_function)

    return own


def loss_of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logprobs, entropies = tt.token_logprobs(outputs, labels, temperature=0.7, return_entropy=True)
    return clipped(logprobs, entropies, labels, num_items_in_batch or 1)


def loss_of_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return from_logits(outputs.logits, labels, num_items_in_batch or 1, 0.7)


def test_a_loss_function_takes_the_outputs(tmp_path, monkeypatch):
    shared, alone, logits = (
        run("plain", with_loss_function(function), tmp_path, monkeypatch, shared=shared)
        for function, shared in ((loss_of_outputs, True), (loss_of_outputs, False), (loss_of_logits, False))
    )
    assert_same(shared, logits)
    found = difference(alone, logits)
    assert max(found.metrics, found.weights) <= 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize("pop", [False, True], ids=["labels", "labels taken out"])
def test_micro_batches_share_with_one_another(pop, tmp_path, monkeypatch):
    own = partial(takes_logprobs, pop=pop)
    overlaps = [
        run("plain", own, tmp_path, monkeypatch, shared=True, steps=1, **settings).logs[0]["tree/overlap"]
        for settings in (SETTINGS, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1})
    ]
    assert overlaps[0] == overlaps[1] > 0.2


# ---- refusals


def two_lines(call: str) -> str:
    return rf"reads .*logits.* share_prefixes(?s:.*)tt\.token_logprobs\({call}\)(?s:.*)loss = -logprobs\.sum\(\) / num"


def test_a_loss_that_reads_logits_is_told_the_two_lines_at_its_first_call(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=two_lines("model, inputs")):
        run("plain", reads_logits, tmp_path, monkeypatch, shared=True, steps=1)
    with pytest.raises(RuntimeError, match=two_lines("outputs, labels")):
        run("plain", with_loss_function(loss_of_logits), tmp_path, monkeypatch, shared=True, steps=1)


READS = {
    "logits beside the loss": lambda model, batch: model(**batch).logits,
    "logits by position": lambda model, batch: model(batch["input_ids"], batch["attention_mask"]).logits,
    "logits by index": lambda model, batch: model(**batch)[1],
    "logits by name": lambda model, batch: model(**batch)["logits"],
    "both unpacked": lambda model, batch: tuple(model(**batch)),
    "hidden states": lambda model, batch: model(**batch).hidden_states,
    "a default": lambda model, batch: getattr(model(**batch), "logits", None),
}


@pytest.mark.parametrize("name", READS)
def test_whatever_else_is_read_of_the_output_is_refused(name, tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return READS[name](model, inputs)

    trainer: Any = tt.share_prefixes(Own(runs.model(), own_trainer(runs.model(), tmp_path).args))
    with pytest.raises(RuntimeError, match=r"tt\.token_logprobs\(model, inputs\)"):
        trainer.compute_loss(trainer.model, labelled(padded("right")))
    with torch.no_grad():
        trainer.model(**padded("right")).logits.sum()


def test_a_wrong_tree_stops_the_first_step_of_a_loss_of_ones_own(tmp_path, monkeypatch):
    runs.make_scores_wrong(monkeypatch)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02.*check=False"):
        run("plain", takes_logprobs, tmp_path, monkeypatch, shared=True, steps=1)
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e-02.*check=False"):
        run("plain", with_loss_function(loss_of_outputs), tmp_path, monkeypatch, shared=True, steps=1)


def test_what_cannot_be_scored_is_refused_by_name():
    model, batch = runs.model(), labelled(padded("left"))
    with pytest.raises(ValueError, match=r"temperature=0"):
        tt.token_logprobs(model, batch, temperature=0.0)
    with pytest.raises(ValueError, match="has inputs_embeds, which Qwen3ForCausalLM reads"):
        tt.token_logprobs(model, batch | {"inputs_embeds": torch.zeros(1)})
    tt.token_logprobs(model, batch | {"advantages": torch.zeros(1)})
    with pytest.raises(tt.DataError, match="no input_ids; it has prompt_ids"):
        tt.token_logprobs(model, {"prompt_ids": batch["input_ids"]})
    with pytest.raises(TypeError, match="give the batch"):
        tt.token_logprobs(model, batch["input_ids"])
    with pytest.raises(TypeError, match="give the labels"):
        tt.token_logprobs(model(input_ids=batch["input_ids"]), batch)
    with pytest.raises(tt.DataError, match="labels has shape"):
        tt.token_logprobs(model, batch | {"labels": batch["labels"][:, 1:]})
    shifted = batch | {"labels": batch["labels"].roll(-1, 1)}
    with pytest.raises(tt.DataError, match="set it to"):
        tt.token_logprobs(model, shifted)
    lengths = packed("cu_seq_lens")
    with pytest.raises(tt.DataError, match="must rise from 0 to the number of tokens"):
        tt.token_logprobs(model, lengths | {"cu_seq_lens_q": lengths["cu_seq_lens_q"][:-1]})
    critic = runs.model(kind=runs.Qwen3ForSequenceClassification, num_labels=1)
    with pytest.raises(tt.UnsupportedModel, match="no language-model head"):
        tt.token_logprobs(critic, batch)


# ---- two processes


def on_ranks(group: Any, name: str, folder: str, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train on these processes: shared prefixes, the plain model with the same lines, and logits."""
    found = []
    for own, shared in ((takes_logprobs, True), (takes_logprobs, False), (reads_logits, False)):
        with launched(group) as arguments:
            arguments = arguments if settings.get("sharded") else {"ddp_backend": "gloo"}
            given = {**arguments, **{name: value for name, value in settings.items() if name != "sharded"}}
            found.append(run(name, own, Path(folder), None, shared=shared, steps=steps, **given))
    apart = [difference(one, found[2]) for one in found[:2]]
    return {"worst": [max(each.metrics, each.weights) for each in apart], "updates": [each.updates for each in apart]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, settings",
    [
        ("plain", {"masked": True, "train_sampling_strategy": "sequential"}),  # a rank without labels
        ("plain", {"lora": True, "budget": 40, "ddp_find_unused_parameters": True}),
        ("sft", {}),
        pytest.param("plain", {"sharded": True}, marks=needs_sharding_on_cpus),
        ("plain", {"sharded": True, "lora": True, "budget": 40}),
        ("sft", {"sharded": True}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else " ".join(value),
)
def test_two_processes_learn_the_same(two, name, settings, tmp_path):
    for rank in two.run(on_ranks, name, str(tmp_path), 2, settings, timeout=400):
        assert max(rank["worst"]) <= 1e-5 and max(rank["updates"]) <= 1e-4, rank


def wrapped(group: Any) -> float:
    """A model in `DistributedDataParallel`, one of whose ranks predicts nothing."""
    model = runs.model()
    batch = padded("right")
    empty = batch | {"labels": torch.full_like(batch["input_ids"], -100)}
    rank = dist.get_rank(group)
    (tt.token_logprobs(model, batch).sum() / 2).backward()
    expected, worst = gradient(model), 0.0
    ways: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for options in ways:
        model.zero_grad()
        ddp = DistributedDataParallel(model, process_group=group, **options)
        tt.token_logprobs(ddp, empty if rank else batch).sum().backward()
        worst = max(worst, float((gradient(model) - expected).norm() / expected.norm()))
    return worst


def test_a_rank_may_predict_nothing_in_distributed_data_parallel(two):
    assert max(two.run(wrapped)) <= 1e-5
