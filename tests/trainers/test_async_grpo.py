"""AsyncGRPO with rollout workers that only hand out what was drawn before: TRL's own loss, from the engine's rows."""

import dataclasses
import math
import queue

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trainer_runs import whole
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import treetrain as tt
from treetrain.trainers.batches import rows_of

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
VOCABULARY = 60


@pytest.fixture(scope="module")
def async_grpo():
    return pytest.importorskip("trl.experimental.async_grpo")


class Worker:
    """A rollout worker whose samples are there from the start."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue, self.samples = queue.Queue(), queue.Queue(), samples

    def start(self):
        for sample in self.samples:
            self.rollout_buffer.put(sample)

    def check_health(self, stale_after_s):
        raise AssertionError("all samples are used up")

    def stop(self): ...
    def update_model_version(self, version): ...


class NoTransfer:
    """Takes the weights nowhere."""

    def init_weight_transfer(self): ...
    def pause(self): ...
    def send_weights(self, iterator):
        for _ in iterator:
            pass

    def resume(self): ...
    def destroy(self): ...


def samples(groups=10, of_each=4, seed=0):
    """Two-turn samples of a prompt each, which share their first turn in pairs; what a tool said is not trained."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    draws = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        prompt, first = draws.integers(2, VOCABULARY, 8), [draws.integers(2, VOCABULARY, 4) for _ in range(2)]
        for number in range(of_each):
            tool, last = draws.integers(2, VOCABULARY, 3), draws.integers(2, VOCABULARY, int(draws.integers(1, 6)))
            ids = np.concatenate([prompt, first[number % 2], tool, last])
            mask = np.repeat([0, 1, 0, 1], [len(prompt), 4, len(tool), len(last)])
            old = np.where(mask, draws.normal(-4, 0.3, len(ids)), 0.0).astype(np.float32)
            found.append(
                RolloutSample([], [], *map(torch.from_numpy, (ids, mask, old)), float(draws.normal()), 0, group, {})
            )
    return found


def naive_varlen(q, k, v, starts, path_starts, longest, longest_path, *, softmax_scale, **_):
    """Attention as TRL's kernel computes it: every segment's queries over their own path, causal at its end."""
    out = []
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for a, b, c, d in zip(starts, starts[1:], path_starts, path_starts[1:]):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(int(d - c - (b - a)))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[c:d]))
    return torch.cat(out)


def write_model(folder):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, vocab_size=VOCABULARY, initializer_range=0.3, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def trainers(monkeypatch, folder):
    """Return what makes an AsyncGRPOTrainer on `folder`'s model, on this CPU; its own kernel is the naive one above."""
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer as trainer_module
    from trl.experimental.async_grpo import packing

    class Kernel:
        flash_attn_varlen_func = staticmethod(naive_varlen)

    monkeypatch.setattr(trainer_module, "VLLMClient", lambda *args: None)  # asks for a package
    monkeypatch.setattr(packing, "_flash_attn", Kernel)
    monkeypatch.setattr(packing, "get_target_dtype", lambda query, module: query.dtype)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")  # it asks for the device's peak FLOPs
    words = Tokenizer(WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))

    def make(drawn, **settings):
        settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4} | settings
        args = async_grpo.AsyncGRPOConfig(
            str(folder / "out"), token_budget=-1, learning_rate=1e-2, logging_steps=1, save_strategy="no",
            max_staleness=99, report_to=[], bf16=False, use_cpu=True, disable_tqdm=True, **settings,
        )  # fmt: skip
        return async_grpo.AsyncGRPOTrainer(
            str(folder / "model"),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["none"] * 4}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1"),
            rollout_worker=Worker(drawn),
            weight_transfer=NoTransfer(),
        )

    return make


@pytest.fixture
def trainer_of(async_grpo, tmp_path, monkeypatch):
    write_model(tmp_path)
    return trainers(monkeypatch, tmp_path)


MEASURED = ("time", "perf/", "runtime", "per_second", "_s", "tree/", "queue")


def assert_same_run(one, other, tolerance=1e-5):
    """Per-step losses and all metrics but times, gradient norms and final weights."""
    for a, b in zip(one.state.log_history, other.state.log_history, strict=True):
        for name in a:
            if not any(part in name for part in MEASURED):
                assert b[name] == pytest.approx(a[name], rel=tolerance, abs=1e-6), name
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), whole(q.detach()), rtol=tolerance, atol=1e-5)


def test_async_grpo_trains_as_with_its_own_kernel_and_shares_over_micro_batches(trainer_of):
    drawn = samples()  # each group goes to two micro-batches
    drawn = [drawn[8 * step + n] for step in range(5) for n in (0, 1, 4, 5, 2, 3, 6, 7)]
    plain, shared = trainer_of(drawn), tt.share_prefixes(trainer_of(drawn))
    plain.train()
    shared.train()
    assert_same_run(plain, shared)
    log = shared.state.log_history[0]
    # TRL's trees fork a token early and hold one micro-batch; the engine's hold the two of a step.
    assert 1 / (1 - log["tree/overlap"]) > 1.2 * log["batch/packing_ratio"] and log["tree/parts"] == 1


def test_the_rows_of_a_packed_tree_are_its_samples(async_grpo):
    from trl.experimental.async_grpo.packing import TreeRow

    drawn = samples(groups=2)
    tree = TreeRow()
    for sample in drawn:
        tree.add(dataclasses.asdict(sample))
    packed = tree.pack()
    rows = rows_of({k: v if k.startswith("tree") else v[None] for k, v in packed.items()})
    expected = {tuple(sample.input_ids.tolist()): sample.completion_mask[1:].bool().tolist() for sample in drawn}
    assert {tuple(ids.tolist()): mask.tolist() for ids, mask in zip(rows.ids, rows.masks)} == expected
    # What belongs to a prediction lands at the token it is made from.
    marks = [torch.tensor(ids[1:], dtype=torch.float32) for ids in rows.ids]
    labels = packed["shift_labels"]
    assert torch.equal(rows.batch(marks)[0][labels >= 0], labels[labels >= 0].float())
