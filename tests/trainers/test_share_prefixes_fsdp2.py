"""Processes under FSDP2, sharded by accelerate, train the same with shared prefixes as without."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_async_grpo
import test_rows_with_images as with_images
import torch
import torch.distributed as dist
import trainer_runs
import yaml
from datasets import Dataset
from trainer_runs import (
    Difference,
    Run,
    assert_padding_is_seen,
    difference,
    padding_in_positions,
    train,
)

import treetrain as tt
from support.fsdp_on_cpus import let_accelerate_shard, needs_sharding_on_cpus
from support.processes import Processes, RankFailed
from treetrain.core.engine.score import Scored, Scoring
from treetrain.parallel.process_group import is_shard, is_sharded
from treetrain.trainers import step_scores

pytestmark = needs_sharding_on_cpus
BUILDERS = {**trainer_runs.BUILDERS, "images": with_images.build_images}
IN_ORDER = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
TWO = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


@contextmanager
def launched(group: Any) -> Iterator[dict[str, Any]]:
    """Let accelerate find these processes and shard on CPUs inside the block; yields trainers' arguments for it."""
    import datasets
    from accelerate.state import AcceleratorState, GradientState, PartialState

    datasets.disable_progress_bars()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    let_accelerate_shard()
    with mock.patch.dict(os.environ):  # accelerate sets variables for good
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        yield {"ddp_backend": "gloo", "fsdp": True, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def run(group: Any, name: str, folder: str, shared: bool, fsdp: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Train on these processes, under FSDP2 with these settings of accelerate's plugin."""
    with launched(group) as arguments:
        arguments["fsdp_config"] |= fsdp or {}
        found = train(BUILDERS[name], Path(folder), shared=shared, **{"evaluate": True, **arguments, **settings})
    assert found.trainer.accelerator.num_processes == dist.get_world_size(group) and is_sharded(found.trainer.model)
    return found


def compared(found: Difference, own: Run) -> dict[str, Any]:
    """What a rank reports: how far two runs are apart, and the weights of one."""
    updates = torch.cat([x.flatten() for x in own.updates.values()])
    assert updates.abs().sum() > 0
    return {**vars(found), "own": updates.tolist()}


def both(group: Any, name: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with shared prefixes and without; a plain Trainer also predicts logits."""
    if isinstance(settings.get("budget"), list):
        settings = {**settings, "budget": settings["budget"][dist.get_rank(group)]}
    shared, plain = (run(group, name, folder, shared, **settings) for shared in (True, False))
    assert any("tree/overlap" in log for log in shared.logs) and any("grad_norm" in log for log in plain.logs)
    if name == "plain" and not {"packed", "moe"} & {*settings}:
        ours, theirs = (each.trainer.predict(each.trainer.eval_dataset).predictions for each in (shared, plain))
        assert abs(ours - theirs).max() <= 1e-5 * abs(theirs).max()
    return compared(difference(shared, plain), shared)


ONE_WITHOUT = {"masked": True, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", TWO),
    "plain, one rank without labels": ("plain", ONE_WITHOUT),
    "experts, one rank without labels": ("plain", {"moe": True, **ONE_WITHOUT}),
    "plain packed within a budget": ("plain", {**TWO, "packed": True, "budget": 40}),
    "plain lora": ("plain", {**TWO, "lora": True}),
    "sft": ("sft", {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "max_grad_norm": 0.1}),
    "sft padding-free lora": ("sft", {"padding_free": True, "lora": True}),
    "sft within a budget": ("sft", {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "budget": 30}),
    "sft, budgets of their own": ("sft", {**TWO, "budget": [30, None]}),
    "sft experts": ("sft", {**TWO, "moe": True}),
    "sft checkpointing": ("sft", {**TWO, "gradient_checkpointing": True}),
    "sft whole weights kept": ("sft", {**TWO, "fsdp": {"reshard_after_forward": False}}),
    "sft one group": ("sft", {**TWO, "fsdp": {"auto_wrap_policy": "NO_WRAP"}}),
    "sft weights from the first rank": ("sft", {**TWO, "fsdp": {"cpu_ram_efficient_loading": True}}),
    "sft offload": ("sft", {**TWO, "fsdp": {"cpu_offload": True}}),
    "dpo": ("dpo", TWO),
    "dpo lora": ("dpo", {**TWO, "lora": True}),
    "dpo checkpointing by accelerate": ("dpo", {**TWO, "budget": 40, "fsdp": {"activation_checkpointing": True}}),
    "kto": ("kto", {"per_device_train_batch_size": 4}),
    "reward": ("reward", {"per_device_train_batch_size": 4}),
    "reward lora": ("reward", {**TWO, "lora": True}),
    "grpo": ("grpo", TWO),
    "grpo lora within a budget": ("grpo", {**TWO, "lora": True, "budget": 60}),
    "rloo": ("rloo", {}),
    "images": ("images", {"gradient_accumulation_steps": 2, **IN_ORDER}),
    "images within a budget": ("images", {"budget": 20, **IN_ORDER}),
    "images lora": ("images", {"lora": True, **IN_ORDER}),
}


def check(processes: Processes, case: str, folder: Any, steps: int, size: int = 2) -> dict[str, float]:
    """Train on all ranks, with and without, and compare; the ranks must hold the same weights."""
    name, settings = CASES[case]
    ranks = processes.run(both, name, str(folder), {**settings, "steps": steps}, size=size, timeout=900)
    own = ranks[0]["own"]
    assert all(rank.pop("own") == own for rank in ranks)
    for rank in ranks:
        assert max(rank["metrics"], rank["weights"]) <= 1e-5 and rank["updates"] <= 1e-4, rank
    return {name: max(rank[name] for rank in ranks) for name in ("metrics", "weights", "updates")}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["sft", "images within a budget", "grpo lora within a budget"])
def test_two_processes_train_the_same_with_shared_prefixes(two, tmp_path, case):
    check(two, case, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "experts"])
def test_a_process_may_have_nothing_to_predict(two, kind, tmp_path):
    check(two, f"{kind}, one rank without labels", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_the_same_after_twenty_steps(two, case, tmp_path, record_property):
    record_property("errors", check(two, case, tmp_path, 20))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "sft", "dpo", "grpo", "sft within a budget", "grpo lora within a budget"])
def test_four_processes_are_the_same_after_twenty_steps(four, case, tmp_path, record_property):
    record_property("errors", check(four, case, tmp_path, 20, size=4))


def without_images_on_one(group: Any, folder: str) -> dict[str, Any]:
    """Two steps, in the second of which one rank has text alone, against plain DistributedDataParallel."""
    settings = {"steps": 2, **IN_ORDER, "per_device_train_batch_size": 4}
    shared = run(group, "images", folder, True, evaluate=False, **settings)
    with launched(group):
        plain = train(BUILDERS["images"], Path(folder), shared=False, ddp_backend="gloo", **settings)
    assert plain.trainer.accelerator.num_processes == 2 and not is_sharded(plain.trainer.model)
    return compared(difference(shared, plain), shared)


@pytest.mark.slow
def test_a_process_may_have_text_alone(two, tmp_path):
    for rank in two.run(without_images_on_one, str(tmp_path), timeout=400):
        assert max(rank["metrics"], rank["weights"]) <= 1e-5 and rank["updates"] <= 1e-4


def three(group: Any, name: str, folder: str) -> list[float]:
    """How far bfloat16 is from float32 after two steps, with shared prefixes and without."""
    exact = run(group, name, folder, False, steps=2)
    runs = [run(group, name, folder, shared, steps=2, bf16=True) for shared in (True, False)]
    assert not torch.is_autocast_enabled("cpu")
    return [difference(each, exact).updates for each in runs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_bfloat16_is_no_further_from_float32_than_without_shared_prefixes(two, name, tmp_path):
    for ours, theirs in two.run(three, name, str(tmp_path), timeout=600):
        assert 1e-4 < ours <= 1.5 * theirs


def async_grpo(group: Any, folder: str) -> list[int]:
    """AsyncGRPO with TRL's trees and with ours: the parts of ours."""
    drawn, found = test_async_grpo.samples(groups=20), []
    for shared in (False, True):
        with pytest.MonkeyPatch.context() as patch, launched(group) as arguments:
            trainer = test_async_grpo.trainers(patch, Path(folder))(drawn, max_steps=2, **arguments)
            if shared:
                tt.share_prefixes(trainer)
            trainer.train()
            found.append(trainer)
    assert is_sharded(found[0].model) and is_sharded(found[1].model)
    test_async_grpo.assert_same_run(*found)
    return [log["tree/parts"] for log in found[1].state.log_history if "tree/parts" in log]


@pytest.mark.slow
def test_async_grpo_trains_as_with_its_own_kernel(two, tmp_path):
    pytest.importorskip("trl.experimental.async_grpo")
    test_async_grpo.write_model(tmp_path)
    for parts in two.run(async_grpo, str(tmp_path), timeout=400):
        assert parts == [1, 1]


def resumed(group: Any, folder: str, kind: str) -> float:
    """How far a run that goes on from accelerate's checkpoint is from one that was not stopped."""
    settings = {"steps": 2, "fsdp": {"state_dict_type": kind}, "optim": "adamw_torch", "evaluate": False, **TWO}
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    whole = run(group, "sft", folder, True, **settings, **saves)
    again = run(group, "sft", folder, True, resume=Path(folder, "checkpoint-1"), **settings)
    steps = [[log["loss"] for log in each.logs if "loss" in log] for each in (whole, again)]
    assert len(steps[0]) == 2 and steps[0] == pytest.approx(steps[1], rel=1e-6)
    return max(float((again.weights[name] - weight).abs().max()) for name, weight in whole.weights.items())


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow)])
def test_a_checkpoint_of_accelerate_goes_on_as_if_the_run_had_not_stopped(two, kind, tmp_path):
    assert max(two.run(resumed, str(tmp_path), kind, timeout=400)) <= 1e-6


EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_fsdp2.yaml"


def example(group: Any, folder: str) -> list[list[float]]:
    """Losses of the example with shared prefixes and without, set up by its accelerate file as the launcher does."""
    from examples import trl_sft

    config = yaml.safe_load(EXAMPLE.read_text())
    assert config["distributed_type"] == "FSDP"
    found = []
    for shared in (True, False):
        with launched(group):
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": config["mixed_precision"]}
            os.environ |= {name.upper(): str(value).lower() for name, value in config["fsdp_config"].items()}
            os.environ |= {name: os.environ[name].upper() for name in os.environ if name in KEPT_UPPER}
            arguments = partial(trl_sft.SFTConfig, ddp_backend="gloo", use_cpu=True)
            with mock.patch.object(trl_sft, "SFTConfig", arguments):
                trainer = trl_sft.main(steps=2, output=folder, share=shared)
            assert is_sharded(trainer.model)
            trainer.save_model()
        found.append([log["train_loss"] for log in trainer.state.log_history if "train_loss" in log])
    return found


KEPT_UPPER = ("FSDP_AUTO_WRAP_POLICY", "FSDP_STATE_DICT_TYPE")


@pytest.mark.slow
def test_the_example_with_its_accelerate_file_has_the_losses_of_trl_alone(two, tmp_path):
    for shared, plain in two.run(example, str(tmp_path), timeout=600):
        assert shared == pytest.approx(plain, rel=1e-5) and len(plain) == 1
    assert Path(tmp_path, "model.safetensors").exists()


# ---- mistakes that the comparison must see


def drop_gradients_of_a_part(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The gradients of one prediction of each tree get lost on every rank."""
    backward = Scoring.backward

    def dropped(self: Scoring, edges: torch.Tensor, *others: Any) -> None:
        backward(self, edges * (torch.arange(len(edges)) > 0), *others)

    patch.setattr(Scoring, "backward", dropped)


def leave_a_rank_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The second rank's gradients do not take part in the reduction."""
    backward = Scored.backward

    def without(self: Scored, *, sync: bool = True) -> None:
        if rank == 1:
            self.zero_gradients()
        backward(self, sync=sync)

    patch.setattr(Scored, "backward", without)


def reduce_only_the_last_tree(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A tree whose gradients wait unreduced at the end of a step."""
    backward = Scored.backward
    patch.setattr(Scored, "backward", lambda self, *, sync=True: backward(self, sync=False))


def mutated(group: Any, mutate: Any, folder: str) -> dict[str, Any]:
    """Two runs of SFT, of which the one with shared prefixes has a mistake."""
    plain = run(group, "sft", folder, False, steps=2, evaluate=False, **TWO)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, dist.get_rank(group))
        shared = run(group, "sft", folder, True, steps=2, evaluate=False, check=False, **TWO)
    return vars(difference(shared, plain))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        leave_a_rank_out,
        drop_gradients_of_a_part,
        reduce_only_the_last_tree,
    ],
)
def test_the_comparison_sees_gradients_that_get_lost(two, mutate, tmp_path):
    for found in two.run(mutated, mutate, str(tmp_path), timeout=300):
        assert found["updates"] > 1e-2, found


def test_the_first_step_sees_gradients_that_get_lost(two, tmp_path):
    for said in two.run(mutated_and_checked, str(tmp_path), timeout=300):
        assert "gradients of the plain model and with shared prefixes differ" in said


def left_padded(group: Any, name: str, folder: str) -> tuple[list[str], float]:
    """See `padding_in_positions`."""
    return padding_in_positions(partial(run, group, name, folder, True, steps=1, evaluate=False), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "plain"])
def test_padding_that_positions_count_is_seen_and_rows_by_themselves_go_on(two, name, tmp_path):
    for found in two.run(left_padded, name, str(tmp_path), timeout=300):
        assert_padding_is_seen(*found)


def mutated_and_checked(group: Any, folder: str) -> str:
    """What the first step says of a mistake."""
    with pytest.MonkeyPatch.context() as patch:
        drop_gradients_of_a_part(patch, dist.get_rank(group))
        with pytest.raises((RuntimeError, tt.RanksDisagree)) as caught:
            run(group, "sft", folder, True, steps=1, **TWO)
    return str(caught.value)


# ---- ranks that differ, and ranks that go


def other_settings(group: Any, folder: str, by_rank: dict[str, list[Any]]) -> str:
    """What a rank says when it has settings of its own."""
    settings = {name: values[dist.get_rank(group)] for name, values in by_rank.items()}
    with pytest.raises(tt.RanksDisagree) as caught:
        run(group, "sft", folder, True, **{"steps": 1, "per_device_train_batch_size": 4, **settings})
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [("check", [True, False]), pytest.param("gradient_accumulation_steps", [1, 2], marks=pytest.mark.slow)],
    ids=lambda x: str(x),
)
def test_ranks_with_other_settings_stop_with_one_message(two, name, values, tmp_path):
    said = two.run(other_settings, str(tmp_path), {name: values}, timeout=300)
    assert said[0] == said[1]
    assert f"the ranks differ in {name}: rank 0 has {values[0]}, rank 1 {values[1]}" in said[0]


def other_versions(group: Any, folder: str, package: str) -> str:
    """What a rank says when another one has another version of a package."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(f"{package}.__version__", "9.9")
        return other_settings(group, folder, {})


@pytest.mark.parametrize("package", [pytest.param("transformers", marks=pytest.mark.slow), "trl"])
def test_ranks_with_other_versions_stop_with_one_message(two, package, tmp_path):
    said = two.run(other_versions, str(tmp_path), package, timeout=60)
    assert said[0] == said[1] and f"the ranks differ in {package}: rank 0 has" in said[0] and "rank 1 '9.9'" in said[0]


def leaves_modules_out(group: Any, folder: str) -> str:
    """The error for a trained module that accelerate leaves out of FSDP2."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    made = FullyShardedDataParallelPlugin.__post_init__

    def ignoring(self: Any) -> None:
        made(self)
        self.ignored_modules = "model.norm"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullyShardedDataParallelPlugin, "__post_init__", ignoring)
        with pytest.raises(ValueError) as caught:
            run(group, "sft", folder, True, steps=1)
    return str(caught.value)


def test_trained_weights_that_are_left_out_of_the_shards_are_refused(two, tmp_path):
    for said in two.run(leaves_modules_out, str(tmp_path), timeout=300):
        assert "model.norm.weight" in said and "fsdp_ignored_modules" in said


def reads_gradients_early(group: Any, folder: str) -> str:
    """The error of a callback that reads gradients between the micro-batches of a step."""
    from transformers import TrainerCallback

    class Reads(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            [p.grad.norm() for p in model.parameters() if p.grad is not None]

    build = BUILDERS["sft"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "sft", lambda *a, **k: _with_callback(build(*a, **k), Reads()))
        patch.setattr(step_scores, "WORTH_JOINING", 2.0)
        with pytest.raises(RuntimeError) as caught:
            run(group, "sft", folder, True, steps=1, **TWO)
    return str(caught.value)


def _with_callback(trainer: Any, callback: Any) -> Any:
    trainer.add_callback(callback)
    return trainer


def test_gradients_that_are_read_between_micro_batches_are_an_error_that_says_when_they_are_there(two, tmp_path):
    for said in two.run(reads_gradients_early, str(tmp_path), timeout=300):
        assert "after the last micro-batch" in said and "on_pre_optimizer_step" in said


def cut_rows(trainer: Any) -> Any:
    """Rank 1 gets rows of one token in its first two batches of two."""
    short = [k % 4 in (2, 3) and k < 8 for k in range(len(trainer.train_dataset))]
    rows = zip(trainer.train_dataset, short)
    trainer.train_dataset = Dataset.from_list(
        [{name: ids[:1] if cut else ids for name, ids in row.items()} for row, cut in rows]
    )
    return trainer


def alike(group: Any, folder: str, change: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Compare two runs of a trainer that was changed on some rank."""
    build = BUILDERS["plain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "plain", lambda *a, **k: change(build(*a, **k)))
        return both(group, "plain", folder, {"steps": 3, "evaluate": False, **settings})


def hook_shards(kind: str, ranks: tuple[int, ...], trainer: Any) -> Any:
    """Hooks on these ranks' shards double their gradients, where FSDP2 runs such hooks."""
    from transformers import TrainerCallback

    def double_grad(p: Any) -> None:
        p.grad.mul_(2)

    class Hooks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for p in model.parameters() if dist.get_rank() in ranks else ():
                assert is_shard(p)
                getattr(p, kind)((lambda grad: grad * 2) if kind == "register_hook" else double_grad)

    return _with_callback(trainer, Hooks())


def give_token_types(training: bool, trainer: Any) -> Any:
    """Rank 1's batches have token types while it trains, or while it evaluates; this model ignores them."""
    collate = trainer.data_collator

    def collated(rows: Any) -> Any:
        batch = collate(rows)
        if dist.get_rank() == 1 and trainer.model.training == training:
            batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
        return batch

    trainer.data_collator = collated
    return trainer


def with_loss(change: Any, trainer: Any) -> Any:
    """On rank 1 the trainer computes its loss in another way."""

    class Own(type(trainer)):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if dist.get_rank() == 1:
                return change(super().compute_loss, model, inputs, return_outputs, **kwargs)
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    trainer.__class__ = Own
    return trainer


def from_output(training: bool, plain: Any, model: Any, inputs: Any, outputs: bool, **kwargs: Any) -> Any:
    """The loss from the model's logits, while it trains or while it evaluates."""
    if model.training != training:
        return plain(model, inputs, outputs, **kwargs)
    labels = inputs.pop("labels")
    output = model(**inputs)
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return (loss, output) if outputs else loss


def from_token_logprobs(plain: Any, model: Any, inputs: Any, outputs: bool, **kwargs: Any) -> Any:
    """The loss from log-probabilities of tokens."""
    return -tt.token_logprobs(model, inputs).mean()


HOOKED = {**TWO, "max_grad_norm": 0.0, "steps": 2, "train_sampling_strategy": "sequential"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "settings"),
    [
        pytest.param(
            cut_rows, {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}, id="short rows"
        ),
        *(
            pytest.param(partial(hook_shards, kind, ranks), HOOKED, id=f"{kind} on ranks {ranks}", marks=marks)
            for kind in ("register_hook", "register_post_accumulate_grad_hook")
            for ranks, marks in (((0,), pytest.mark.slow if "post" in kind else ()), ((0, 1), pytest.mark.slow))
        ),
        pytest.param(
            partial(give_token_types, False), {**TWO, "steps": 1, "evaluate": True}, id="evaluates token types"
        ),
        pytest.param(
            partial(with_loss, partial(from_output, False)),
            {**TWO, "steps": 1, "evaluate": True},
            id="evaluates logits",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_may_be_unlike_the_others(two, tmp_path, change, settings):
    for found in two.run(alike, str(tmp_path), change, settings, timeout=200):
        found.pop("own")
        assert max(found["metrics"], found["weights"]) <= 1e-5 and found["updates"] <= 1e-4, found


def trains_token_types(group: Any, folder: str) -> str:
    """The error of each rank when one of them trains on inputs that trees do not know."""
    build = BUILDERS["plain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "plain", lambda *a, **k: give_token_types(True, build(*a, **k)))
        with pytest.raises((ValueError, tt.RanksDisagree)) as caught:
            run(group, "plain", folder, True, steps=1, **TWO)
    return str(caught.value)


def test_inputs_that_trees_do_not_know_stop_the_training_of_all_ranks(two, tmp_path):
    for said in two.run(trains_token_types, str(tmp_path), timeout=60):
        assert "token_type_ids" in said


def asks_differently(group: Any, folder: str, change: Any) -> str:
    """The error of each rank when they do not ask their model for the same."""
    build = BUILDERS["plain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "plain", lambda *a, **k: with_loss(change, build(*a, **k)))
        with pytest.raises(tt.RanksDisagree) as caught:
            run(group, "plain", folder, True, steps=1, **TWO)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "theirs"),
    [
        pytest.param(partial(from_output, True), "an output without labels", marks=pytest.mark.slow),
        (from_token_logprobs, "tt.token_logprobs"),
    ],
)
def test_ranks_that_ask_for_different_things_stop_with_one_message(two, tmp_path, change, theirs):
    said = two.run(asks_differently, str(tmp_path), change, timeout=60)
    assert said[0] == said[1]
    wanted = (
        f"the ranks differ in what the loss asks the model for: rank 0 has 'the scores of labels', rank 1 {theirs!r}"
    )
    assert wanted in said[0]


def dies(group: Any, folder: str) -> str:
    """Rank 1 is killed in its second step; what the other says, and how soon."""
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    build, begin = BUILDERS["sft"], time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "sft", lambda *a, **k: _with_callback(build(*a, **k), Dies()))
        try:
            run(group, "sft", folder, True, steps=3, **TWO)
        except Exception as error:
            Path(folder, "said").write_text(f"{error} {error.__notes__}")
    return f"{time.monotonic() - begin}"


@pytest.mark.slow
def test_a_rank_that_dies_releases_the_other(tmp_path):
    processes = Processes(2)
    with pytest.raises(RankFailed, match="rank 1: the process ended"):
        processes.run(dies, str(tmp_path), timeout=120)
    said = Path(tmp_path, "said").read_text()
    assert "another rank has left" in said and "no answer within 5 s from rank 1 of 2" in said
