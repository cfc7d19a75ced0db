"""DeepSpeed's ZeRO in `share_prefixes`: DeepSpeed reduces, clips and steps, with one whole gradient per parameter.

DeepSpeed's hooks reduce a gradient when a backward reaches its parameter, once in a micro-batch, and accelerate has
DeepSpeed step within `accelerator.backward`. The backward of a step's trees reaches a parameter part by part, after the
last micro-batch. So:

- DeepSpeed's hooks are taken off the parameters. Gradients are added up in ``.grad``, as in one process.
- `TreesFirst` stands for accelerate's wrapper of DeepSpeed. In the last micro-batch of a step it has the trees run
  backward, and hands every parameter's sum to DeepSpeed at once (`DeepSpeedEngine.coalesce_grad_reduction`).
  DeepSpeed reduces these sums in its own buckets and dtype, then clips and steps.

Until then every process holds its own gradients whole, in the weights' dtype. Under ZeRO-1 DeepSpeed does so too.
Under ZeRO-2 it would free them within a backward, so trees need more memory there.

Under ZeRO-3 no process holds whole gradients. `parallel/zero.py` has DeepSpeed reduce the gradients of each part as
they come, and all ranks score and run backward together, as under FSDP2.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from treetrain.core.engine.deferred import DeferredGradient
from treetrain.core.engine.score import Scored
from treetrain.engine import TreeEngine
from treetrain.logs.columns import Json
from treetrain.parallel.zero import head_read_outside
from treetrain.trainers.settings import Refusal, refuse
from treetrain.trainers.sharded_processes import ShardedProcesses
from treetrain.trainers.step_scores import StepScores

STAGES = (1, 2, 3)
"""The stages of ZeRO that are supported."""
REDUCTION = "coalesce_grad_reduction"
"""The method of DeepSpeedEngine that reduces whole gradients once (DeepSpeed 0.19 has it)."""


class ZeroProcesses(ShardedProcesses):
    """Processes that DeepSpeed trains, as accelerate sets it up."""

    def check(self, trainer: Trainer) -> None:
        plugin = trainer.accelerator.state.deepspeed_plugin
        assert plugin is not None
        check_zero(plugin.deepspeed_config)
        self._partitioned = plugin.zero_stage == 3

    def check_prepared(self, model: nn.Module) -> None:
        check_engine(model)

    def comparison(self, model: nn.Module) -> AbstractContextManager[None]:
        """See `Processes`. The model is called without its DeepSpeedEngine, so each rank has whole gradients of it."""
        return head_read_outside(model) if self._partitioned else nullcontext()

    def scored(self, scored: Scored, settle: Callable[..., None]) -> None:
        if self._partitioned:
            super().scored(scored, settle)
        else:
            scored.deferral.settle = settle

    def begin(self, model: nn.Module, settle: Callable[..., None]) -> None:
        wrapper = self.accelerator.deepspeed_engine_wrapped
        if isinstance(wrapper, TreesFirst):
            return
        engine: Any = model
        # ZeRO-3 reduces the experts of a layer by hooks of its leaf modules.
        for handle in (*engine.optimizer._grad_acc_hooks, *getattr(engine.optimizer, "_leaf_module_hooks", ())):
            handle.remove()
        self.accelerator.deepspeed_engine_wrapped = TreesFirst(wrapper, settle)  # type: ignore[assignment]

    def settle(self, engine: TreeEngine, steps: StepScores, *, everything: bool, last: bool) -> list[Scored]:
        if self._partitioned:
            return super().settle(engine, steps, everything=everything, last=last)
        if not last:
            return steps.settle(everything=everything)
        with engine.ranks.together("the backward of the step's trees"):
            return steps.settle(everything=everything)


class TreesFirst:
    """Stands for accelerate's `DeepSpeedEngineWrapper`: trees run backward before DeepSpeed reduces and steps.

    Args:
        wrapper: accelerate's.
        settle: runs all gradients that wait through their trees.
    """

    def __init__(self, wrapper: Any, settle: Callable[..., None]):
        self._wrapper, self._settle = wrapper, settle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def backward(self, loss: Tensor, sync_gradients: bool = True, *, scale_wrt_gas: bool = True) -> None:
        """Run a micro-batch's backward; in the last one of a step also the trees', and DeepSpeed's step."""
        engine = self._wrapper.engine
        weights = list(engine.module.parameters())
        engine.set_gradient_accumulation_boundary(sync_gradients)
        (loss / engine.gradient_accumulation_steps() if scale_wrt_gas else loss).backward()
        partitioned = engine.zero_optimization_stage() == 3
        if partitioned and any(p.grad is not None and not isinstance(p.grad, DeferredGradient) for p in weights):
            raise ValueError(
                "the loss reads weights other than through the scores of the model (a penalty, a second call?), which "
                "is not supported under ZeRO-3; leave it out, or set zero_optimization.stage: 2"
            )
        if sync_gradients:
            self._settle(everything=True, last=True)
            if not partitioned:
                reduce_once(engine)
            engine.step()


def reduce_once(engine: Any) -> None:
    """Have DeepSpeed reduce the gradients that are in ``.grad``; a collective call, for ZeRO-1 and 2.

    A gradient that another rank has and this one lacks is zero: DeepSpeed's buckets hold the same parameters on all
    ranks.
    """
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=engine.device)
    torch.distributed.all_reduce(present, torch.distributed.ReduceOp.MAX, group=engine.seq_data_parallel_group)
    for p, anywhere in zip(parameters, present.tolist()):
        if anywhere and p.grad is None:
            p.grad = torch.zeros_like(p)
    with engine.coalesce_grad_reduction():
        engine.optimizer.backward_epilogue()  # moves gradients to where the reduction reads them


ROUNDING = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""Settings of ZeRO++ that round weights or gradients."""
CHANGES_PASSES = (
    *("pipeline", "progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training"),
    *("sparse_attention", "amp", "torch_autocast", "fp16"),
)
"""Sections of DeepSpeed's configuration that change what its own forward and backward compute."""


def check_zero(config: Mapping[str, Json]) -> None:
    """Refuse settings of DeepSpeed's configuration that cannot be exact.

    Raises:
        ValueError: the message names the setting to change.
    """
    zero = config.get("zero_optimization") or {}
    stage, partition = zero.get("stage", 0), zero.get("zero_hpz_partition_size", 1)
    accumulates = str((config.get("data_types") or {}).get("grad_accum_dtype")).removeprefix("torch.")
    tp_size = (config.get("tensor_parallel") or {}).get("autotp_size", 0)
    offloads_to = str((zero.get("offload_param") or {}).get("device"))
    fp32_gradients = stage == 1 and _enabled(config, "bf16") and accumulates in ("fp32", "float32")
    refusals: list[Refusal] = [
        (stage not in STAGES, f"zero_optimization.stage: {stage}; set it to {' or '.join(map(str, STAGES))}"),
        (partition > 1, f"zero_optimization.zero_hpz_partition_size: {partition} (ZeRO++); leave it out"),
        *((zero.get(name), f"zero_optimization.{name} (ZeRO++), which rounds; leave it out") for name in ROUNDING),
        (zero.get("zenflow"), "zero_optimization.zenflow, which steps with old gradients; leave it out"),
        (offloads_to.endswith("nvme"), "zero_optimization.offload_param.device: nvme; set it to cpu or none"),
        (tp_size > 1, f"tensor_parallel.autotp_size: {tp_size}; leave it out"),
        ((config.get("compile") or {}).get("deepcompile"), "compile.deepcompile; leave it out"),
        (
            fp32_gradients,
            "data_types.grad_accum_dtype: fp32 with bf16 and stage 1, whose optimizer takes gradients within a "
            "backward; set zero_optimization.stage: 2",
        ),
        *((_enabled(config, name), f"{name}; leave it out (bf16.enabled: true is exact)") for name in CHANGES_PASSES),
    ]
    refuse("share_prefixes cannot be exact with DeepSpeed's ", refusals)


def _enabled(config: Mapping[str, Json], name: str) -> bool:
    """Whether a section of the configuration is there and does not say that it is switched off."""
    section = config.get(name)
    return section.get("enabled", True) is True if isinstance(section, dict) else bool(section)


def check_engine(engine: Any) -> None:
    """Refuse a DeepSpeed that does not have what is relied on here.

    Raises:
        ValueError: a pipeline, an optimizer without ZeRO, or another version of DeepSpeed.
    """
    if getattr(engine, "pipeline_parallelism", False):
        raise ValueError("share_prefixes cannot be exact with DeepSpeed's PipelineModule; give the trainer the model")
    if not hasattr(engine, REDUCTION) or not hasattr(engine.optimizer, "_grad_acc_hooks"):
        raise ValueError(
            f"share_prefixes hands whole gradients to DeepSpeedEngine.{REDUCTION}; this DeepSpeed does not have it for "
            f"{type(engine.optimizer).__name__}: DeepSpeed 0.19.8 has it for ZeRO"
        )
