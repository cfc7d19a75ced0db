"""The library's losses beside the same losses written out row by row, for the numerics contract."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import treetrain as tt
from treetrain.check import linear
from treetrain.check.contract import Case, Rows
from treetrain.check.forests import whole_pairs

LENGTH = 9.0


def _kl(kind: str, logp: Tensor, facts: linear.Facts) -> Tensor:
    """The estimators of http://joschu.net/blog/kl-approx.html for KL(policy || reference)."""
    log_ratio = facts["ref_logprobs"] - logp
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}[kind]


def _reinforce(kind: str, reduction: str, entropy: float) -> Case:
    def per_token(logp, entropies, facts):
        return -facts["advantages"] * logp + 0.3 * _kl(kind, logp, facts) - entropy * entropies

    loss = tt.losses.reinforce(kl=0.3, kl_estimator=kind, entropy=entropy, reduction=reduction)  # type: ignore[arg-type]
    return Case(loss, per_token, reduction)


OTHERS = {
    "sft per trajectory": Case(
        tt.losses.sft(reduction="trajectory"), lambda logp, entropy, facts: -logp, "trajectory", 0.7
    ),
    "reinforce": Case(tt.losses.reinforce(), lambda logp, entropy, facts: -facts["advantages"] * logp),
    "reinforce k1": _reinforce("k1", "trajectory", 0.0),
    "reinforce k2": _reinforce("k2", "token", 0.0),
    "reinforce k3 entropy": _reinforce("k3", "token", 0.1),
    "ppo asymmetric": Case(
        tt.losses.ppo(clip_low=0.1, clip_high=0.3), lambda logp, entropy, facts: linear.clipped(logp, facts, 0.1, 0.3)
    ),
    "grpo": Case(
        tt.losses.grpo(clip=0.2, kl=0.1),
        lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2) + 0.1 * _kl("k3", logp, facts),
        "trajectory",
    ),
    "grpo on policy": Case(
        tt.losses.grpo(on_policy=True),
        lambda logp, entropy, facts: -(logp - logp.detach()).exp() * facts["advantages"],
        "trajectory",
    ),
}


def _ratio(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _factor(old: Tensor, facts: linear.Facts, cap: float, mode: str) -> Tensor:
    gap = (old.detach() - facts["rollout_logprobs"]) * (facts["weights"] != 0)
    ratio = (gap.sum() if mode.startswith("sequence") else gap).exp()
    return torch.where(ratio > cap, cap if mode.endswith("truncate") else 0.0, ratio)


def _corrected(mode: str) -> linear.RowLoss:
    def per_token(logp, entropy, facts):
        return linear.clipped(logp, facts, 0.2, 0.28) * _factor(facts["old_logprobs"], facts, 1.4, mode)

    return per_token


def _present(logp, entropy, facts):
    """REINFORCE, corrected by the present policy's ratio to the sampler."""
    return -facts["advantages"] * logp * _factor(logp, facts, 1.4, "token_truncate")


def _gspo(logp, entropy, facts):
    weights = facts["weights"]
    mean = (weights * (logp - facts["old_logprobs"])).sum() / weights.sum()
    return _ratio(mean, facts["advantages"], 0.3, 0.3)


def _dr_grpo(scores, rows: Rows) -> Tensor:
    by_token = linear.batch_loss(scores, rows, lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2))
    weights = [float(row.weights.sum()) for row in rows]
    return by_token * sum(weights) / (LENGTH * sum(weight > 0 for weight in weights))


def _teacher(logp, entropy, facts):
    gap = facts["teacher_logprobs"] - logp
    return gap.exp() - 1 - gap


def _dpo(scores, rows: Rows) -> Tensor:
    """-log sigmoid(0.3 (chosen - rejected)), the mean over pairs with something to train."""
    values = []
    for logp, row in zip(scores[0], rows):
        weights, reference = (torch.tensor(x[1:], dtype=logp.dtype) for x in (row.weights, row.ref_logprobs))
        values.append((weights * (logp - reference)).double().sum())
    losses = []
    for pair in dict.fromkeys(row.pair for row in rows):
        own = [k for k, row in enumerate(rows) if row.pair == pair]
        if any(rows[k].weights.any() for k in own):
            chosen, rejected = sorted(own, key=lambda k: not rows[k].chosen)
            losses.append(-logsigmoid(0.3 * (values[chosen] - values[rejected])))
    return sum(losses) / len(losses)  # type: ignore[return-value]


POLICY = {
    "dapo truncated": Case(tt.losses.dapo(importance_cap=1.4), _corrected("token_truncate")),
    "dapo masked by rows": Case(
        tt.losses.dapo(importance_cap=1.4, importance_mode="sequence_mask"), _corrected("sequence_mask")
    ),
    "reinforce corrected": Case(tt.losses.reinforce(importance_cap=1.4), _present),
    "dr_grpo": Case(tt.losses.dr_grpo(length=LENGTH), whole=_dr_grpo),
    "gspo": Case(tt.losses.gspo(clip_low=0.3, clip_high=0.3), _gspo, "trajectory"),
    "distill": Case(tt.losses.distill(), _teacher),
}
PREFERENCE = {"dpo": Case(tt.losses.dpo(beta=0.3), whole=_dpo, prepare=whole_pairs)}
EVERY: dict[str, Case] = POLICY | PREFERENCE
GROUPS = {"policy": POLICY, "preference": PREFERENCE}
