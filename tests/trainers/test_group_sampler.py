"""The sampler keeps rows that share a prefix in one step of one process, draws anew by epoch, and loses no row."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.utils.data import BatchSampler
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

import treetrain as tt
from treetrain.core.errors import DataError
from treetrain.trainers.groups import PrefixGroupSampler, group_rows


def prompts_and_answers(prompts, answers, seed=0, system=0):
    """Shuffled rows of ids, and the prompt of each: a shared beginning, a prompt of 12 tokens, an answer of 6."""
    draws = np.random.default_rng(seed)
    rows = []
    for prompt in range(prompts):
        begin = [1] * system + draws.integers(2, 100, 12).tolist()
        rows += [(begin + draws.integers(2, 100, 6).tolist(), prompt) for _ in range(answers)]
    draws.shuffle(rows)
    return [row for row, _ in rows], [prompt for _, prompt in rows]


def steps_of(sampler):
    """Rows of every optimizer step, by process, as accelerate deals batches out."""
    found = []
    for process in range(sampler.processes):
        batches = BatchSamplerShard(BatchSampler(sampler, sampler.batch_size, False), sampler.processes, process)
        batches = list(batches)
        count = sampler.accumulation
        found.append([list(chain(*batches[first : first + count])) for first in range(0, len(batches), count)])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("batch_size, accumulation, processes", [(8, 1, 1), (2, 4, 1), (4, 2, 2), (2, 8, 3)])
@pytest.mark.parametrize("system", [0, 30])
def test_a_group_stays_within_one_step_of_one_process(batch_size, accumulation, processes, system):
    ids, prompts = prompts_and_answers(12, 8, system=system)
    for data, key in (([{"input_ids": row} for row in ids], "input_ids"), ([{"task": p} for p in prompts], "task")):
        sampler = PrefixGroupSampler(data, batch_size, key=key, accumulation=accumulation, processes=processes)
        for step in steps_of(sampler):
            for rows in step:
                assert set(Counter(prompts[row] for row in rows).values()) == {8}


def test_every_row_is_drawn_once_in_every_epoch_in_an_order_of_its_own():
    ids, _ = prompts_and_answers(7, 5)
    data = [{"input_ids": row} for row in ids]
    orders = []
    for epoch in range(3):
        sampler = PrefixGroupSampler(data, 4, accumulation=2, processes=2, seed=3)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert orders[-1] == list(sampler)
        assert sorted(orders[-1]) == list(range(35)) and len(sampler) == 35
    assert len(set(map(tuple, orders))) == 3


def test_groups_of_several_sizes_are_cut_only_where_they_must_be():
    draws = np.random.default_rng(0)
    labels = np.repeat(np.arange(60), draws.integers(1, 9, 60))
    data = [{"task": int(label)} for label in draws.permutation(labels)]
    (steps,) = zip(*steps_of(PrefixGroupSampler(data, 16, key="task")))
    places = Counter(task for rows in steps for task in {data[row]["task"] for row in rows})
    assert all(len(rows) == 16 for rows in steps[:-1])
    assert sum(count > 1 for count in places.values()) <= 8  # of 60


def test_a_group_larger_than_a_step_fills_whole_steps():
    data = [{"task": "long"}] * 32 + [{"task": str(number)} for number in range(16)]
    (steps,) = zip(*steps_of(PrefixGroupSampler(data, 8, key=lambda row: row["task"])))
    assert sum(all(data[row]["task"] == "long" for row in rows) for rows in steps) == 4


def test_what_all_rows_share_does_not_make_one_group_of_them():
    ids, _ = prompts_and_answers(40, 1, system=50)
    assert all(len(group) == 1 for group in group_rows(ids, 8))


def test_more_rows_of_one_prompt_than_a_step_holds_stay_together_in_full_steps():
    ids, prompts = prompts_and_answers(3, 20, system=5)
    groups = group_rows(ids, 8)
    assert sorted(map(len, groups)) == [4, 4, 4, 8, 8, 8, 8, 8, 8]
    assert all(len({prompts[row] for row in group}) == 1 for group in groups)


def test_rows_that_begin_others_and_equal_rows_are_kept_with_them():
    groups = group_rows([[5, 6, 7, 8], [9, 9, 9], [5, 6, 7], [5, 6, 7, 8, 9], [9, 9, 9]], 4)
    assert sorted(sorted(group.tolist()) for group in groups) == [[0, 2, 3], [1, 4]]


def test_a_missing_column_is_an_error_that_names_those_there():
    with pytest.raises(DataError, match="no column 'input_ids', only 'prompt'; name the one"):
        PrefixGroupSampler(Dataset.from_dict({"prompt": ["a"]}), 4)
    with pytest.raises(DataError, match="has no rows"):
        PrefixGroupSampler([], 4)


def test_trainers_that_generate_are_refused():
    trainer = Trainer.__new__(Trainer)
    vars(trainer).update(train_dataset=[], args=None, num_generations=4)
    with pytest.raises(DataError, match="draws whole groups of completions itself"):
        tt.group_batches(trainer)


def recorded_trainer(folder, ids, prompts, **arguments):
    """A Trainer with groups, and the prompts of every micro-batch that it trained."""
    torch.manual_seed(0)
    config = Qwen3Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                         head_dim=8, intermediate_size=16, vocab_size=100)  # fmt: skip
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    args = TrainingArguments(folder, report_to=[], use_cpu=True, save_steps=1, **settings | arguments)
    seen = []

    class Recorded(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append([prompts[ids.index(row)] for row in inputs["input_ids"].tolist()])
            return super().training_step(model, inputs, num_items_in_batch)

    data = Dataset.from_dict({"input_ids": ids, "labels": ids, "task": prompts})
    return tt.group_batches(Recorded(Qwen3ForCausalLM(config), args, train_dataset=data), key="task"), seen


def test_a_trainer_takes_its_batches_from_the_sampler_and_resumes_where_it_was(tmp_path):
    ids, prompts = prompts_and_answers(6, 8)
    trainer, seen = recorded_trainer(str(tmp_path), ids, prompts)
    trainer.train()
    assert len(seen) == 24 and all(len(set(seen[i] + seen[i + 1])) == 1 for i in range(0, 24, 2))
    assert seen[:12] != seen[12:]
    resumed, again = recorded_trainer(str(tmp_path), ids, prompts)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert again == seen[16:]


def test_rows_without_a_group_are_drawn_by_themselves_in_every_epoch():
    rows = [{"task": "a" if k < 4 else None} for k in range(24)]
    sampler = PrefixGroupSampler(rows, 4, key="task")
    assert sorted(map(len, sampler.groups)) == [1] * 20 + [4]
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([number for number in sampler if number >= 4])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(4, 24)) and orders[0] != orders[1]


@pytest.mark.parametrize("values", [[[], [1, 2], [1, 3]], [[1, 2], None, [1, 3]], [None, [1, 2], [1, 3]]])
def test_rows_without_tokens_are_groups_by_themselves(values):
    groups = group_rows(values, 4)
    (empty,) = [k for k, value in enumerate(values) if not value]
    assert sorted(map(sorted, groups)) == sorted([[empty], [k for k in range(3) if k != empty]])
