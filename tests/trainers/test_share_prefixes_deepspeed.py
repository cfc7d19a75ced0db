"""Processes under DeepSpeed's ZeRO, set up by accelerate, train the same with shared prefixes as without."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_rows_with_images as with_images
import torch
import torch.distributed as dist
import trainer_runs
from test_token_logprobs import reads_logits, takes_logprobs
from trainer_runs import (
    Difference,
    assert_padding_is_seen,
    build_plain,
    difference,
    padding_in_positions,
    train,
)
from transformers import TrainerCallback
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from support.processes import Processes, RankFailed
from treetrain.core.engine.model_passes import ModelPasses
from treetrain.core.engine.score import Scored
from treetrain.layers.images.images import Images
from treetrain.trainers import zero_processes
from treetrain.trainers.zero_processes import check_zero

REASON = "deepspeed is not installed; it needs an environment of its own: make test-deepspeed"
deepspeed = pytest.importorskip("deepspeed", reason=REASON)

AUTO = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
SMALL = {"stage3_param_persistence_threshold": 0}
"""Small weights are partitioned too."""
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3}
"""AdamW at a usual rate. At 1e-2 it makes float32's rounding grow 5,000 times in 20 steps, in plain training too: see
`test_adam_at_a_high_rate_is_as_far_from_itself`."""
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}


BUILDERS = {**trainer_runs.BUILDERS, "images": with_images.build_images}


def start(group: Any) -> None:
    """Let accelerate and DeepSpeed find these processes."""
    import datasets
    from accelerate.state import AcceleratorState, GradientState, PartialState

    datasets.disable_progress_bars()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(DS_ACCELERATOR="cpu")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    deepspeed.init_distributed("gloo")
    unset_hf_deepspeed_config()  # transformers would partition the next model while it is made


def run(
    group: Any, name: str, folder: str, steps: int, stage: int, config: dict[str, Any], shared: bool, **settings: Any
) -> Any:
    """Train under ZeRO on these processes; with `from_start` the weights are partitioned as they are loaded."""
    start(group)
    early = None
    if settings.pop("from_start", False):
        early = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **SMALL}})
    zero = {"stage": stage, **(SMALL if stage == 3 else {}), **config.get("zero_optimization", {})}
    settings["deepspeed"] = dict.fromkeys(AUTO, "auto") | {"zero_allow_untested_optimizer": True} | config
    settings["deepspeed"] |= {"zero_optimization": zero}
    found = train(BUILDERS[name], Path(folder), shared=shared, steps=steps, evaluate=True, **settings)
    del early
    for logs in found.logs:
        logs.pop("total_flos", None)  # transformers counts the weights that ZeRO-3 has gathered at the moment
    return found


def both(
    group: Any, name: str, folder: str, steps: int, stage: int, config: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Train with shared prefixes and without on these processes; how far they are apart, and this rank's weights."""
    runs = [run(group, name, folder, steps, stage, config, shared, **settings) for shared in (True, False)]
    assert runs[0].trainer.accelerator.num_processes == dist.get_world_size(group)
    assert runs[0].trainer.deepspeed.zero_optimization_stage() == stage
    logs = runs[0].logs
    assert any("tree/overlap" in log for log in logs) and any("grad_norm" in log for log in logs)
    found = difference(*runs)
    own = torch.cat([x.flatten() for x in runs[0].updates.values()]).tolist()
    return vars(found) | {"own": own}


FOUR = {"per_device_train_batch_size": 4}
IN_ORDER = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
ONE_WITHOUT = {"masked": True, "train_sampling_strategy": "sequential", **FOUR}
TWO = {"gradient_accumulation_steps": 2, **FOUR}
SFT = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
CLIPPED = {"budget": 40, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **ADAM}
SMALL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": False}}
OFFLOAD_ALL = OFFLOAD | {"zero_optimization": OFFLOAD["zero_optimization"] | {"offload_param": {"device": "cpu"}}}
STAGES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3), TWO),
    "plain, clipped, budget": ((1, 3), CLIPPED),
    "plain, one rank without labels": ((2, 3), ONE_WITHOUT),
    "plain, experts, one rank without labels": ((1, 2, 3), {"moe": True, **ONE_WITHOUT}),
    "plain, small buckets": ((2,), {"config": SMALL_BUCKETS, **FOUR}),
    "plain, checkpointing, budget": ((3,), {"gradient_checkpointing": True, "budget": 40}),
    "plain, packed, budget": ((3,), {"packed": True, "budget": 40, **TWO}),
    "sft": ((1, 3), SFT),
    "sft, lora, clipped, budget": ((2, 3), {"lora": True, "max_grad_norm": 0.1, "budget": 40, **FOUR}),
    "sft, lora, padding-free": ((3,), {"padding_free": True, "lora": True}),
    "sft, offload": ((2,), {"config": OFFLOAD, "gradient_accumulation_steps": 2, **ADAM}),
    "sft, offload of weights too, budget": (
        (3,),
        {"config": OFFLOAD_ALL, "gradient_accumulation_steps": 2, "budget": 40, **ADAM},
    ),
    "sft, experts": ((2, 3), {"moe": True, **TWO}),
    "sft, experts, budget": ((3,), {"moe": True, "budget": 40, **TWO}),
    "dpo": ((2, 3), FOUR),
    "dpo, lora, budget": ((1, 3), {"lora": True, "budget": 40, **TWO}),
    "grpo": ((2, 3), TWO),
    "grpo, lora": ((1,), {"lora": True}),
    "grpo, lora, partitioned from the start": ((3,), {"lora": True, "from_start": True}),
    "kto": ((2, 3), FOUR),
    "reward": ((2, 3), FOUR),
    "rloo": ((2, 3), {}),
    "images, budget": ((2, 3), {"budget": 20, **IN_ORDER}),
    "images, lora": ((3,), {"lora": True, **IN_ORDER}),
    "images, accumulated, clipped": ((1, 3), {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, **IN_ORDER}),
}
"""Cases, each with the stages of ZeRO that it runs under. The first word is the trainer."""
CASES = {
    f"{name}, stage {stage}": (name.partition(",")[0], stage, settings)
    for name, (stages, settings) in STAGES.items()
    for stage in stages
}


def check(processes: Callable[..., list[Any]], case: str, folder: Any, steps: int, size: int = 2) -> dict[str, float]:
    """Train on all ranks, with and without, and compare; the ranks must hold the same weights."""
    name, stage, settings = CASES[case]
    settings = {"config": {}, **settings}
    ranks = processes(both, name, str(folder), steps, stage, settings.pop("config"), settings, size=size, timeout=900)
    for rank in ranks:
        assert max(rank["metrics"], rank["weights"]) <= 1e-5 and rank["updates"] <= 1e-4, {
            key: value for key, value in rank.items() if key != "own"
        }
        assert rank["own"] == ranks[0]["own"]
    return {name: max(rank[name] for rank in ranks) for name in ("metrics", "weights", "updates")}


@pytest.mark.parametrize(
    "case",
    [
        *("plain, stage 2", "sft, offload, stage 2", "plain, one rank without labels, stage 2"),
        *("plain, clipped, budget, stage 3", "sft, lora, clipped, budget, stage 3", "grpo, stage 3"),
        *("images, budget, stage 2", "images, budget, stage 3"),
    ],
)
def test_two_processes_train_the_same_with_shared_prefixes(two: Processes, tmp_path, case):
    check(two.run, case, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_the_same_after_twenty_steps(two: Processes, case, tmp_path, record_property):
    record_property("errors", check(two.run, case, tmp_path, 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("plain, stage 2", "sft, stage 1", "dpo, stage 2", "grpo, stage 2"),
        *("plain, clipped, budget, stage 3", "sft, lora, clipped, budget, stage 3", "dpo, stage 3", "grpo, stage 3"),
    ],
)
def test_four_processes_are_the_same_after_twenty_steps(four: Processes, case, tmp_path, record_property):
    record_property("errors", check(four.run, case, tmp_path, 20, size=4))


def build_reordered(order: Callable[[list[Any]], list[Any]], *args: Any, **kwargs: Any) -> Any:
    """Build a Trainer whose micro-batches have their rows in another order, which changes rounding alone."""
    trainer = build_plain(*args, **kwargs)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: collate(order(rows))
    return trainer


def reordered(group: Any, folder: str, rate: float) -> list[Difference]:
    """How far runs are from plain DeepSpeed: with shared prefixes, and plain with its rows in two other orders."""
    settings, runs = {**CLIPPED, "learning_rate": rate}, []
    for order in (list, lambda rows: rows[::-1], lambda rows: rows[1:] + rows[:1]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(BUILDERS, "plain", partial(build_reordered, order))
            runs.append(run(group, "plain", folder, 20, 1, {}, False, **settings))
    shared = run(group, "plain", folder, 20, 1, {}, True, **settings)
    return [difference(each, runs[0]) for each in (shared, *runs[1:])]


@pytest.mark.slow
def test_adam_at_a_high_rate_is_as_far_from_itself(two: Processes, tmp_path, record_property):
    for rate, least, most in ((1e-2, 1e-5, 1e-2), (1e-3, 0.0, 5e-6)):
        for shared, *orders in two.run(reordered, str(tmp_path), rate, timeout=600):
            record_property(f"metrics at {rate}", [shared.metrics, *(each.metrics for each in orders)])
            itself = max(each.metrics for each in orders)
            assert least <= itself <= most and shared.metrics <= 10 * itself
            assert shared.weights <= 10 * max(each.weights for each in orders)


def drop_a_part(patch: pytest.MonkeyPatch, rank: int) -> None:
    """On rank 0 the backward of every second part is left out."""
    plain, count = ModelPasses.backward, iter(range(10**6))

    def backward(passes: Any, part: Any, output: Any) -> None:
        if rank or next(count) % 2 == 0:
            plain(passes, part, output)

    patch.setattr(ModelPasses, "backward", backward)


def skip_a_reduction(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 reduces nothing of its own."""
    plain = zero_processes.reduce_once

    def reduce_once(engine: Any) -> None:
        if rank:
            engine.module.zero_grad()
        plain(engine)

    patch.setattr(zero_processes, "reduce_once", reduce_once)


def leave_a_rank_out(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Rank 1 has gradients of zero."""
    plain = Scored.backward

    def backward(scored: Scored, *, sync: bool = True) -> None:
        if rank:
            scored.zero_gradients()
        plain(scored, sync=sync)

    patch.setattr(Scored, "backward", backward)


def reduce_the_last_part_alone(patch: pytest.MonkeyPatch, rank: int) -> None:
    """DeepSpeed does not add the gradients of a step's parts."""
    patch.setattr(
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag", lambda _: None
    )


def drop_the_encoder(patch: pytest.MonkeyPatch, rank: int) -> None:
    """On rank 0 the gradients of images do not go through their encoder."""
    around = Images.around

    def without(self: Images, *, graph: bool, backward: bool) -> Any:
        return around(self, graph=graph, backward=backward and rank > 0)

    patch.setattr(Images, "around", without)


MUTANTS = {
    "a part's gradient": ("plain", 2, drop_a_part),
    "a rank's reduction": ("plain", 2, skip_a_reduction),
    "an encoder's gradient": ("images", 2, drop_the_encoder),
    "a rank's gradient, partitioned": ("plain", 3, leave_a_rank_out),
    "all parts but the last, partitioned": ("plain", 3, reduce_the_last_part_alone),
}


def broken(group: Any, mutant: str, folder: str) -> float:
    """The difference of the updates where something is left out."""
    name, stage, change = MUTANTS[mutant]
    settings = {"budget": 40, **(IN_ORDER if name == "images" else FOUR)}
    plain = run(group, name, folder, 2, stage, {}, False, **settings)
    with pytest.MonkeyPatch.context() as patch:
        change(patch, dist.get_rank(group))
        # Without the comparison in the first step, which would see it.
        patch.setattr("treetrain.trainers.share_prefixes.PrefixSharing._check_first_step", lambda *_, **__: None)
        return difference(run(group, name, folder, 2, stage, {}, True, **settings), plain).updates


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_gradient_that_is_left_out_is_seen(two: Processes, mutant, tmp_path):
    assert min(two.run(broken, mutant, str(tmp_path), timeout=400)) > 1e-2


def left_padded(group: Any, name: str, folder: str, stage: int) -> tuple[list[str], float]:
    """See `padding_in_positions`."""
    return padding_in_positions(partial(run, group, name, folder, 1, stage, {}, True), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "plain"])
@pytest.mark.parametrize("stage", [2, 3])
def test_padding_that_positions_count_is_seen_and_rows_by_themselves_go_on(two: Processes, name, stage, tmp_path):
    for found in two.run(left_padded, name, str(tmp_path), stage, timeout=400):
        assert_padding_is_seen(*found)


def without_images_on_one(group: Any, folder: str) -> Difference:
    """Two steps with shared prefixes, in the second of which one rank has text alone, under ZeRO-3 and ZeRO-2.

    Plain DeepSpeed cannot be compared: its ranks would reduce other weights.
    """
    return difference(*(run(group, "images", folder, 2, stage, {}, True, **IN_ORDER | FOUR) for stage in (3, 2)))


def test_a_process_may_have_text_alone(two: Processes, tmp_path):
    for found in two.run(without_images_on_one, str(tmp_path), timeout=400):
        assert max(found.metrics, found.weights) <= 1e-5 and found.updates <= 1e-4


BF16 = {"bf16": {"enabled": True}}


def rounded(group: Any, folder: str, stage: int, config: dict[str, Any]) -> tuple[float, float]:
    """How far bfloat16 is from float32 after some steps, with shared prefixes and without."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **ADAM}
    exact = run(group, "plain", folder, 5, stage, {}, False, **settings)
    errors = []
    for shared in (True, False):
        found = run(group, "plain", folder, 5, stage, config, shared, bf16=True, **settings)
        errors.append(difference(found, exact).metrics)
    return errors[0], errors[1]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accumulates", [{}, {"data_types": {"grad_accum_dtype": "fp32"}}], ids=["bf16", "fp32"])
def test_bfloat16_is_as_near_to_float32_as_without(two: Processes, tmp_path, stage, accumulates):
    for ours, plain in two.run(rounded, str(tmp_path), stage, BF16 | accumulates, timeout=400):
        assert 0 < ours <= 1.5 * plain


def resumed(group: Any, folder: str, stage: int) -> float:
    """How far a run that stops and resumes from DeepSpeed's checkpoint is from one that does not stop."""
    settings = {"per_device_train_batch_size": 4, "optim": "adamw_torch", "seed": 3}
    whole = run(group, "plain", folder, 4, stage, {}, True, **settings)
    run(group, "plain", folder, 4, stage, {}, True, save_strategy="steps", save_steps=2, **settings)
    rest = run(group, "plain", folder, 4, stage, {}, True, resume=Path(folder) / "checkpoint-2", **settings)
    weights = {name: (rest.weights[name] - x).abs().max().item() for name, x in whole.weights.items()}
    return max(weights.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_deepspeed_is_resumed(two: Processes, tmp_path, stage):
    assert max(two.run(resumed, str(tmp_path), stage, timeout=400)) == 0.0


def own_loss(group: Any, folder: str, stage: int, settings: dict[str, Any]) -> list[Difference]:
    """A loss of one's own on `tt.token_logprobs`, with and without shared prefixes: how far from one on logits."""
    runs = []
    for own, shared in ((takes_logprobs, True), (takes_logprobs, False), (reads_logits, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer_runs, "Trainer", own(trainer_runs.Trainer))
            runs.append(run(group, "plain", folder, 2, stage, {}, shared, **settings))
    return [difference(each, runs[2]) for each in runs[:2]]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"masked": True, "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential"},
        {"lora": True, "budget": 40, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    ],
    ids=["one rank without labels", "lora budget"],
)
def test_a_loss_of_ones_own_is_the_same_as_from_logits(two: Processes, tmp_path, stage, settings):
    for found in two.run(own_loss, str(tmp_path), stage, settings, timeout=400):
        for each in found:
            assert max(each.metrics, each.weights) <= 1e-5 and each.updates <= 1e-4, each


class Dies(TrainerCallback):
    """Rank 1 ends after its first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def dies(group: Any, folder: str, stage: int) -> None:
    """Write what rank 0 says when the other one has ended."""
    build = BUILDERS["sft"]

    def with_callback(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.add_callback(Dies())
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "sft", with_callback)
        try:
            run(group, "sft", folder, 3, stage, {}, True, **TWO)
        except Exception as error:
            Path(folder, "said").write_text(f"{error} {getattr(error, '__notes__', '')}")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_dies_releases_the_other(tmp_path, stage):
    with pytest.raises(RankFailed, match="rank 1: the process ended"):
        Processes(2).run(dies, str(tmp_path), stage, timeout=120)
    said = Path(tmp_path, "said").read_text()
    assert "another rank has left" in said and "no answer within 5 s from rank 1 of 2" in said


@pytest.mark.parametrize(
    "config, message",
    [
        ({"zero_optimization": {"stage": 0}}, r"zero_optimization\.stage: 0; set it to 1 or 2 or 3"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, r"zero_quantized_weights \(ZeRO\+\+\)"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, r"zero_quantized_gradients \(ZeRO\+\+\)"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, r"zero_hpz_partition_size: 8 \(ZeRO\+\+\)"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, r"offload_param\.device: nvme"),
        ({"pipeline": {"stages": 2}}, "pipeline; leave it out"),
        ({"fp16": {"enabled": True}}, r"fp16; leave it out \(bf16\.enabled: true is exact"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"tensor_parallel": {"autotp_size": 2}}, r"tensor_parallel\.autotp_size: 2"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        (
            {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            r"grad_accum_dtype: fp32 with bf16 and stage 1.*set zero_optimization\.stage: 2",
        ),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(config, message):
    zero = {"stage": 2, **config.get("zero_optimization", {})}
    with pytest.raises(ValueError, match=f"share_prefixes cannot be exact with DeepSpeed's .*{message}"):
        check_zero({"fp16": {"enabled": False}, **config, "zero_optimization": zero})


def test_a_deepspeed_that_cannot_reduce_once_is_refused():
    engine = SimpleNamespace(optimizer=SimpleNamespace())
    with pytest.raises(ValueError, match="coalesce_grad_reduction"):
        zero_processes.check_engine(engine)
