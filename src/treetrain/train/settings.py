"""The settings of a training run, by what they are about. Plain data that costs nothing to import.

Every class is a section of `TrainConfig`, of `treetrain train --help`, and, if wanted, a table of a configuration file.
"""

import dataclasses
from typing import Literal

LossName = Literal[
    "sft", "reinforce", "ppo", "grpo", "dapo", "dr_grpo", "gspo", "dpo", "ipo", "simpo", "kto", "distill"
]
OptimizerName = Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is trained on."""

    data: tuple[str, ...]
    """JSONL files (plain or .gz) of token rows or of conversations."""
    format: Literal["auto", "tokens", "chat"] = "auto"
    """What the files hold: token rows (`input_ids`), conversations (`messages`), or what the first row looks like."""
    view: Literal["transcript", "calls"] = "transcript"
    """Conversations as whole transcripts, or every LLM call as its own row."""
    tools: str | None = None
    """JSON file of tool schemas for conversations that bring none."""
    chat_template: str | None = None
    """Instead of the tokenizer's template: chatml (built in, keeps prefixes) or a Jinja file."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's own; a hub id, a folder or a preset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model that is trained."""

    model: str
    """Hub id, local folder, or a built-in random preset: tiny, small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """LoRA by peft: only small matrices beside the frozen weights are trained, and only they are saved."""

    lora_rank: int = 0
    """Columns of each matrix; 0 trains the whole model."""
    lora_alpha: float | None = None
    """The update is scaled by alpha / rank (by alpha / sqrt(rank) with lora_rslora); the rank if not given."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get matrices (q_proj v_proj), or all-linear: every linear layer but the head."""
    lora_rslora: bool = False
    """Scale by the root of the rank, so that large ranks learn as fast."""
    lora_dora: bool = False
    """Learn the size of each weight's columns apart from their direction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What is learnt. An option that the loss does not have is an error; what is not given is the loss's own choice."""

    loss: LossName = "sft"
    """sft: cross-entropy. reinforce, ppo, grpo, dapo, dr_grpo, gspo: policy gradients on recorded advantages, or on
    rewards per group. dpo, ipo, simpo: preference pairs. kto: rows that are good or bad. distill: a teacher's
    recorded log-probabilities."""
    reduction: Literal["token", "trajectory"] | None = None
    """Mean over all tokens of a step or over each row's tokens first; the loss's own choice if not given."""
    clip: float | None = None
    """ppo, grpo, dr_grpo: how far the probability ratio is followed from 1, 0 to 1."""
    clip_low: float | None = None
    """ppo, grpo, dapo, dr_grpo, gspo: the lower bound by itself, in place of clip."""
    clip_high: float | None = None
    """ppo, grpo, dapo, dr_grpo, gspo: the upper bound by itself, in place of clip."""
    length: int | None = None
    """dr_grpo: what every row's sum is divided by, the largest number of tokens that an answer may have."""
    kl: float | None = None
    """Policy losses: coefficient of the KL to the reference policy; the rows then need ref_logprobs."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Policy losses: which estimate of that KL."""
    entropy: float | None = None
    """Policy losses: coefficient of the entropy bonus."""
    importance_cap: float | None = None
    """Policy losses but gspo, and distill: correct for a sampler that is not quite the old policy; the largest
    correction. The rows then need rollout_logprobs."""
    importance_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    """Whether that correction is per token or per row, and whether what exceeds the cap is cut to it or left out."""
    beta: float | None = None
    """dpo, ipo, simpo, kto: how steep the loss is in the difference of scores."""
    margin: float | None = None
    """simpo: by how much the chosen row should lead."""
    label_smoothing: float | None = None
    """dpo: how often a pair is taken to be the wrong way round, 0 to 0.5."""
    reference_free: bool | None = None
    """dpo: without a reference policy."""
    desirable_weight: float | None = None
    """kto: weight of good rows."""
    undesirable_weight: float | None = None
    """kto: weight of bad rows."""
    reference_point: Literal["rows", "mismatched"] | float | None = None
    """kto: the KL that scores are measured against, from the rows of the step, from mismatched rows, or a number."""
    level: Literal["sequence", "token"] | None = None
    """gspo: one ratio per row, or its token variant."""
    estimator: Literal["policy_gradient", "k2", "k3"] | None = None
    """distill: how the divergence from the teacher is estimated."""
    sft_weight: float | None = None
    """Add so many times the cross-entropy of the same rows to the loss (dpo, ipo, simpo, kto: of the chosen ones)."""
    advantage_mean: bool = True
    """Advantages from rewards: subtract the mean of the group."""
    advantage_std: bool = True
    """Advantages from rewards: divide by the standard deviation of the group."""
    advantage_leave_one_out: bool = False
    """Advantages from rewards: subtract the mean of the group's other episodes (RLOO) in place of that of all."""
    advantage_clip: float | None = None
    """Advantages from rewards: what is further from 0 is set to this distance."""
    temperature: float = 1.0
    """Divides the logits; for policy losses the temperature that the rows were sampled with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How many steps there are, and what a step is."""

    epochs: int | None = None
    """Passes over the data; 1 where neither epochs nor steps is given."""
    steps: int | None = None
    """Optimiser steps; the data is passed over as often as that takes. In place of epochs."""
    tokens_per_step: int = 32_768
    """Flat tokens that a step (with several updates: a batch) is filled up to with whole groups (else whole trees); a
    larger group is a step alone."""
    tokens_per_call: int | None = None
    """Flat tokens of a step that one forward and backward takes, in whole groups; the gradients add up to those of the
    whole step. None: a step is one call. A budget bounds memory too, and shares more."""
    seed: int = 0
    """Of the order of the data, of a preset's random weights and of an adapter's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How often a batch is updated, and against which policies. A batch is what tokens_per_step fills."""

    updates_per_batch: int = 1
    """Passes over every batch before the next one; each is a step, or several with minibatches."""
    minibatches: int = 1
    """Parts of whole groups that every pass over a batch is divided into, each an optimiser step."""
    old_logprobs: Literal["auto", "recorded", "recompute"] = "auto"
    """Policy losses: the old policy's log-probabilities. auto: those of the rows, else computed before a batch's first
    update. recorded: the rows must have them. recompute: those of the rows are not used."""
    target_kl: float | None = None
    """Leave out the rest of a batch's updates after a step in which the KL from the old policy was above this."""
    reference_model: str | None = None
    """The reference policy of losses that need one: hub id, folder or preset. None: the rows' ref_logprobs, or where
    they have none the weights that this run begins with (with LoRA, those without the adapter)."""
    log_entropy: bool = False
    """Policy losses: record the entropy of the policy, whether there is a bonus for it or not; costs time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimiserSettings:
    """How the weights follow the gradients."""

    lr: float = 2e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: down to min_lr_ratio x lr along half a cosine or a line; constant; or constant and down a line
    over the last steps (wsd: warm-up, stable, decay)."""
    min_lr_ratio: float = 0.1
    """Where the learning rate ends, as a share of lr, 0 to 1."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; in place of warmup_fraction."""
    warmup_fraction: float | None = None
    """Share of all steps that is warm-up; 0.03 where neither is given."""
    decay_steps: int | None = None
    """wsd: steps of the decay; in place of decay_fraction."""
    decay_fraction: float | None = None
    """wsd: share of all steps that is decay; 0.2 where neither is given."""
    optimizer: OptimizerName = "adamw"
    """muon takes the matrices of hidden layers and leaves the rest to adamw; adamw8bit needs bitsandbytes and a GPU."""
    weight_decay: float = 0.01
    """Decay per step, in units of the learning rate (sgd: added to the gradient); norms and biases are not decayed."""
    beta1: float = 0.9
    """adamw, and what muon leaves to it: average of gradients."""
    beta2: float = 0.999
    """adamw, and what muon leaves to it: average of squared gradients."""
    momentum: float | None = None
    """sgd (0.9 if not given) and muon (0.95)."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them as they are."""
    ema_decay: float | None = None
    """Keep a moving average of the weights, 0 to below 1 (0.999 looks back about 1000 steps); it is evaluated too, and
    saved in the folder ema beside the model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is held out, and what is done with it."""

    eval_data: tuple[str, ...] = ()
    """Files held out for evaluation, read as the training files are."""
    eval_fraction: float = 0.0
    """Share of the groups (trees where rows have none) that is held out for evaluation, 0 to below 1."""
    eval_every_steps: int = 0
    """Evaluate after every so many steps; 0 evaluates only before the first step and after the last."""
    best_metric: Literal["loss", "nll"] = "loss"
    """Of an evaluation, what early stopping and keep_best go by: the loss that is trained, or the negative
    log-likelihood."""
    early_stop_patience: int = 0
    """Stop after so many evaluations in a row without a better one; 0: never."""
    early_stop_min_delta: float = 0.0
    """An evaluation is better only if it is lower by more than this."""
    keep_best: bool = False
    """Save the weights of the best evaluation, not the last ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    """Where and how it runs. Neither the gradients nor the result depend on this beyond rounding."""

    execution: Literal["tree", "linear"] = "tree"
    """tree: every shared prefix once. linear: every row by itself, on the same steps, to compare with."""
    budget: int | str | None = None
    """Tokens whose graph is alive at once (4096), or for a tree bytes above model, gradients and optimiser
    state (8GiB). None: a tree takes what the device has free, linear packs of 8192 tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """float32, or bfloat16 over float32 weights: by autocast; under parallel fsdp by casting every layer's weights."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    device: str = "auto"
    """auto (cuda if there is one), cpu or cuda."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Over several processes, started by torchrun: each step is that of one process on the same rows."""

    parallel: Literal["none", "ddp", "fsdp"] = "none"
    """none: one process. ddp: every process has the whole model. fsdp: weights, gradients and optimiser state are cut
    over the processes, layer by layer (FSDP2). `torchrun --nproc-per-node 8 -m treetrain train ... --parallel fsdp`"""
    reduce: Literal["auto", "part", "step"] = "auto"
    """fsdp: gradients are summed over processes after every part, or once per step and are whole until then; auto:
    once where there is ample memory for that."""
    replicas: int = 1
    """fsdp: copies of the model, each cut over so many times fewer processes (8 processes and 2 replicas: shards over
    4); as many as there are nodes keeps gathering within a node."""
    cpu_offload: bool = False
    """fsdp on GPUs: weights, gradients and optimiser state stay in CPU memory and come over layer by layer."""
    meta_init: bool = False
    """fsdp: no process but the first holds the whole model while it is loaded; safetensors are read shard by shard
    where their names are the model's, and then not even the first does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What is written."""

    output: str
    """Folder for the trained model, its tokenizer, metrics.jsonl and train_config.json."""
    overwrite: bool = False
    """Replace the model and the metrics that are in the output folder already."""
    report: bool = True
    """Keep a page of the run, report.html, up to date in the output folder. (In Python, give `Trainer` the observer
    `treetrain.report.live.LivePage()`.)"""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too, to `tensorboard` in the output folder; needs the package tensorboard."""
    wandb: str | None = None
    """Send the metrics to this project of Weights & Biases too; needs the package wandb (WANDB_MODE=offline keeps
    them here)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What survives the end of the process. Ctrl-C and SIGTERM write a checkpoint whatever is set here."""

    checkpoint_every_minutes: float = 15.0
    """Write a checkpoint after the first step that ends so long after the last one; 0: not by time."""
    checkpoint_every_steps: int = 0
    """Write a checkpoint after every so many steps; 0: not by steps."""
    keep_checkpoints: int = 2
    """The newest so many are kept; older ones are deleted when a new one is complete."""
    resume: str = "never"
    """never: begin anew. auto: go on from the newest complete checkpoint in the output folder, begin where there is
    none. Else the folder of a checkpoint, or of a run, to go on from."""


SECTIONS: dict[str, type] = {
    "data": DataSettings,
    "model": ModelSettings,
    "adapter": AdapterSettings,
    "loss": LossSettings,
    "steps": StepSettings,
    "updates": UpdateSettings,
    "optimiser": OptimiserSettings,
    "evaluation": EvaluationSettings,
    "execution": ExecutionSettings,
    "parallel": ParallelSettings,
    "output": OutputSettings,
    "checkpoints": CheckpointSettings,
}
"""Every section by its title."""
