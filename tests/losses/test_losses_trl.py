"""Losses against TRL 1.16's own loss code on the same log-probabilities, which a stand-in model hands to it."""

import ast
import functools
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from treetrain import losses
from treetrain.layers.trajectory import Trajectory

trl = pytest.importorskip("trl")
if not trl.__version__.startswith("1.16."):
    pytest.skip(f"the stand-ins are for TRL 1.16, this is {trl.__version__}", allow_module_level=True)

PROMPT = 2
LENGTHS = (3, 5, 4, 4, 1, 2)  # completion tokens of six rows: three pairs, chosen and rejected in turn
HOLE = (1, 2)  # one token of one row that is not trained, as a tool's output in a transcript


def mask() -> Tensor:
    """[6, 5] of 0 and 1: the trained tokens of every completion."""
    trained = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    trained[HOLE] = False
    return trained.double()


def numbers(name: str) -> Tensor:
    """[6, 5] log-probabilities to three decimals, and [6] advantages, the same in every run and on every machine."""
    if name == "advantages":
        return torch.tensor([1.2, -0.7, 0.4, -0.9, 1.5, -1.5], dtype=torch.float64)
    seed = ("now", "old", "ref", "rollout").index(name)
    # A congruential generator written out: torch's and numpy's may change.
    state, values = 12345 + 7919 * seed, []
    for _ in range(mask().numel()):
        state = (1103515245 * state + 12345) % 2**31
        values.append(round(-0.05 - 1.5 * state / 2**31, 3))
    return torch.tensor(values, dtype=torch.float64).reshape(mask().shape)


def rows() -> list[Trajectory]:
    """The six rows with all facts."""
    facts = {f"{name}_logprobs": numbers(name) for name in ("old", "ref", "rollout")}
    advantages, weights, made = numbers("advantages"), mask(), []
    for k, length in enumerate(LENGTHS):
        own: dict[str, Any] = {name: [0.0] * PROMPT + value[k, :length].tolist() for name, value in facts.items()}
        made.append(
            Trajectory(
                range(PROMPT + length),
                loss_weights=[0.0] * PROMPT + weights[k, :length].tolist(),
                advantages=float(advantages[k]),
                pair=k // 2,
                chosen=k % 2 == 0,
                id=k,
                **own,
            )
        )
    return made


@functools.cache
def trl_blocks() -> list[Any]:
    """The statements of GRPOTrainer that make the ratio of old policy and sampler, and those that log it.

    They stand inside of generation, in a method that needs a model and a server, so they are taken out of its source.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    asks = "self.use_vllm and self.vllm_importance_sampling_correction"
    found = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.If) and ast.unparse(x.test) == asks]
    found = [compile(ast.unparse(ast.Module(x.body, [])), "TRL", "exec") for x in sorted(found, key=lambda x: x.lineno)]
    made = [block for block in found if "logps_diff" in block.co_names or "delta" in block.co_names]
    assert len(made) == 2
    return made


def correction(mode: str, cap: float | None, floor: float | None) -> tuple[Tensor, dict[str, float]]:
    """[6, 5] or [6, 1]: the ratio of old policy and sampler by GRPOTrainer's own code, and what it logs about it."""
    from trl.trainer import grpo_trainer

    limits = {"clip_max": cap, "clip_min": floor, "mode": mode}
    me = trainer(**{f"vllm_importance_sampling_{name}": value for name, value in limits.items()})
    names = vars(grpo_trainer) | {
        "self": me,
        "mode": "train",
        "device": torch.device("cpu"),
        "completion_mask": mask(),
        "tool_mask": None,
        "old_per_token_logps": numbers("old"),
        "sampling_per_token_logps": numbers("rollout"),
    }
    for block in trl_blocks():
        exec(block, names)
    return names["vllm_importance_sampling_ratio"], {k: values[0] for k, values in me._metrics["train"].items()}


def logprobs(name: str = "now") -> list[Tensor]:
    """[L_k - 1] of every row; those of the prompt are never read."""
    prompt = torch.full((PROMPT - 1,), -9.0, dtype=torch.float64)
    return [torch.cat([prompt, numbers(name)[k, :length]]) for k, length in enumerate(LENGTHS)]


def trainer(**settings: Any) -> Any:
    """A stand-in for a trainer: only what its loss code reads."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        sync_gradients=False,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        unwrap_model=lambda model: model,
    )
    common = {
        "model": SimpleNamespace(training=False),
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(common | settings))


def padded(values: Tensor) -> Tensor:
    """[B, 5] at completions -> [B, 6] at the predictions of whole rows, 0 where nothing is trained."""
    return torch.nn.functional.pad(values * mask()[: len(values)], (PROMPT - 1, 0))


def model(values: Tensor) -> Any:
    """A stand-in for a model whose fused head gives these log-probabilities, [B, 6]."""
    blank = torch.zeros_like(values)
    outputs = SimpleNamespace(log_probs=values, entropy=blank, mean_logits=blank, is_top1=blank.bool())
    return lambda **inputs: outputs


def whole_mask() -> Tensor:
    """int [6, 7]"""
    return torch.nn.functional.pad(mask(), (PROMPT, 0)).long()


def trl_dpo(loss_type: str, beta: float) -> tuple[float, dict[str, float]]:
    """DPOTrainer: mean over the three pairs, and what it logs."""
    from trl.trainer.dpo_trainer import DPOTrainer

    order = torch.tensor([0, 2, 4, 1, 3, 5])  # it wants all chosen rows first
    reference = (numbers("ref") * mask()).sum(1)
    me = trainer(
        ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=beta,
        use_weighting=False,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.ones_like(whole_mask()),
        "attention_mask": torch.ones_like(whole_mask()),
        "completion_mask": whole_mask()[order],
        "ref_chosen_logps": reference[order][:3],
        "ref_rejected_logps": reference[order][3:],
    }
    loss = DPOTrainer._compute_loss(me, model(padded(numbers("now"))[order]), inputs, False)
    return float(loss), {name: values[-1] for name, values in me._metrics["eval"].items() if name != "num_tokens"}


def trl_grpo(loss_type: str, *, correction: Tensor | None = None, **settings: Any) -> float:
    """GRPOTrainer's loss of the six rows; `correction` is its importance-sampling ratio, [6, 5] or [6, 1]."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    scored = numbers("now"), torch.zeros_like(numbers("now")), None
    defaults = {
        "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token",
        "max_completion_length": 8, "off_policy_mask_threshold": None,
    }  # fmt: skip
    me = trainer(
        loss_type=loss_type, top_entropy_quantile=1.0, get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=correction is not None, vllm_importance_sampling_correction=correction is not None,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: scored, **(defaults | settings),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.ones(6, PROMPT).long(),
        "prompt_mask": torch.ones(6, PROMPT).long(),
        "completion_ids": torch.ones(6, 5).long(),
        "completion_mask": mask(),
        "advantages": numbers("advantages"),
        "old_per_token_logps": numbers("old"),
        "ref_per_token_logps": numbers("ref"),
        "num_items_in_batch": mask().sum(),
        "importance_sampling_ratio": correction,
        "sampling_per_token_logps": numbers("rollout"),
    }
    return float(GRPOTrainer._compute_loss(me, None, inputs))


def ours(loss) -> tuple[float, dict[str, float]]:
    """Value and metrics on TRL's rows."""
    if loss.scope == "batch":
        total, metrics = loss(logprobs(), None, rows())
    else:
        total, metrics = torch.zeros((), dtype=torch.float64), {}
        for row, now in zip(rows(), logprobs()):
            part, part_metrics = loss(now, None, row)
            total, metrics = total + part, losses.add_metrics(metrics, part_metrics)
    return float(total) / loss.normaliser(rows()), losses.mean_metrics(metrics)


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_and_what_it_reports_are_those_of_trl(beta):
    (value, metrics), (expected, logged) = ours(losses.dpo(beta=beta)), trl_dpo("sigmoid", beta)
    assert value == pytest.approx(expected, rel=1e-12)
    names = {
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "chosen_logps": "logps/chosen",
        "rejected_logps": "logps/rejected",
    }
    assert metrics == {name: pytest.approx(logged[key], rel=1e-7) for name, key in names.items()}


SEQUENCE = {"importance_sampling_level": "sequence"}
POLICY = {  # a loss of ours, and TRL's name and options
    "grpo": (losses.grpo(kl=0.1), "grpo", {"beta": 0.1}),
    "dapo": (losses.dapo(), "dapo", {"epsilon_high": 0.28}),
    "dr_grpo": (losses.dr_grpo(length=8, kl=0.05), "dr_grpo", {"beta": 0.05}),
    "gspo": (losses.gspo(), "grpo", SEQUENCE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "gspo with kl": (
        losses.gspo(clip_low=0.1, clip_high=0.1, kl=0.2),
        "grpo",
        SEQUENCE | {"epsilon_low": 0.1, "epsilon_high": 0.1, "beta": 0.2},
    ),
}


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_are_those_of_trl(name):
    loss, kind, options = POLICY[name]
    assert ours(loss)[0] == pytest.approx(trl_grpo(kind, **options), rel=1e-12)


@pytest.mark.parametrize(("cap", "floor"), [(1.5, None), (1.5, 0.8), (None, 0.8)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrected_policy_losses_are_those_of_trl(mode, cap, floor):
    loss = losses.grpo(kl=0.1, importance_cap=cap, importance_floor=floor, importance_mode=mode)
    (value, metrics), (factor, logged) = ours(loss), correction(mode, cap, floor)
    assert value == pytest.approx(trl_grpo("grpo", beta=0.1, correction=factor), rel=1e-12)
    unbounded, trained = correction(mode.replace("truncate", "mask"), None, None)[0].expand_as(mask()), mask()
    for name, beyond in (("capped", unbounded > (cap or math.inf)), ("floored", unbounded < (floor or 0.0))):
        shares = (beyond * trained).sum(1) / trained.sum(1)  # a mean over rows, as grpo's
        assert metrics[f"importance_{name}"] == pytest.approx(float(shares[trained.any(1)].mean()), rel=1e-12)
    assert metrics["importance_floored"] > 0 if floor else metrics["importance_capped"] > 0
    # TRL's mean is over tokens, as dapo's, or over rows, as grpo's, whatever the loss.
    means = ours(losses.dapo(importance_cap=cap, importance_floor=floor, importance_mode=mode))[1]
    means = metrics if mode.startswith("sequence") else means
    for ours_, theirs in (("importance", "mean"), ("importance_max", "max"), ("importance_min", "min")):
        assert means[ours_] == pytest.approx(logged[f"sampling/importance_sampling_ratio/{theirs}"], rel=1e-12)


def test_rows_that_have_become_unlikely_are_left_out_as_by_trl():
    """By GRPOTrainer's `off_policy_mask_threshold`, with the sampler's log-probabilities."""
    values = {}
    for kl in (0.05, 0.3, 9.0):
        values[kl], metrics = ours(losses.grpo(kl=0.1, off_policy_kl=kl))
        assert values[kl] == pytest.approx(trl_grpo("grpo", beta=0.1, off_policy_mask_threshold=kl), rel=1e-12)
        assert (metrics["off_policy"] == 0) == (kl == 9.0)
    assert values[9.0] == pytest.approx(ours(losses.grpo(kl=0.1))[0], rel=1e-12) != pytest.approx(values[0.05])
