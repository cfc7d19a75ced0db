"""The library's losses beside the same losses written out row by row, for the numerics contract."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import treetrain as tt
from treetrain.testing import linear
from treetrain.testing.contract import Case, Rows
from treetrain.testing.forests import whole_pairs

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


def _gspo_token(logp, entropy, facts):
    weights = facts["weights"]
    mean = (weights * (logp - facts["old_logprobs"])).sum() / weights.sum()
    return _ratio(mean.detach() + logp - logp.detach(), facts["advantages"], 0.3, 0.3) - 0.05 * entropy


def _dr_grpo(scores, rows: Rows) -> Tensor:
    by_token = linear.batch_loss(scores, rows, lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2))
    weights = [float(row.weights.sum()) for row in rows]
    return by_token * sum(weights) / (LENGTH * sum(weight > 0 for weight in weights))


def _teacher(logp, entropy, facts):
    gap = facts["teacher_logprobs"] - logp
    return gap.exp() - 1 - gap


def _student(logp, entropy, facts):
    gap = (logp - facts["teacher_logprobs"]).detach()
    return (gap + gap * (logp - logp.detach())) * _factor(logp, facts, 1.4, "token_mask")


def _scores(scores, rows: Rows, *, reference: bool) -> list[Tensor]:
    """One number per row."""
    found = []
    for logp, row in zip(scores[0], rows):
        weights = torch.tensor(row.weights[1:], dtype=logp.dtype)
        above = logp - torch.tensor(row.ref_logprobs[1:], dtype=logp.dtype) if reference else logp
        found.append((weights * above).double().sum())
    return found


def _pairs(one, *, reference: bool = True):
    """Mean over pairs of one(chosen - rejected)."""

    def whole(scores, rows: Rows) -> Tensor:
        values = _scores(scores, rows, reference=reference)
        losses = []
        for pair in dict.fromkeys(row.pair for row in rows):
            own = [k for k, row in enumerate(rows) if row.pair == pair]
            if any(rows[k].weights.any() for k in own):
                chosen, rejected = sorted(own, key=lambda k: not rows[k].chosen)
                losses.append(one(values[chosen] - values[rejected]))
        return sum(losses) / len(losses)  # type: ignore[return-value]

    return whole


def _policy_and_sft(scores, rows: Rows) -> Tensor:
    policy = linear.batch_loss(
        scores, rows, lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2) - 0.1 * entropy, "trajectory"
    )
    return policy + 0.1 * linear.batch_loss(scores, rows, lambda logp, entropy, facts: -logp)


def _by_group(scores, rows: Rows) -> Tensor:
    """Rows of group 0 by PPO, the others by SFT, each by its own mean; pairs of all rows besides, weighted."""
    total = torch.zeros((), dtype=torch.float64)
    losses = (
        (lambda logp, entropy, facts: linear.clipped(logp, facts, 0.2, 0.2), 1.0),
        (lambda logp, entropy, facts: -logp, 0.25),
    )
    for group, (per_token, weight) in enumerate(losses):
        own = [k for k, row in enumerate(rows) if row.group == group]
        if any(rows[k].weights.any() for k in own):
            part = [[score[k] for k in own] for score in scores]
            total = total + weight * linear.batch_loss(part, [rows[k] for k in own], per_token)
    return total


def _dpo(beta: float, smoothing: float = 0.0):
    return lambda gap: -(1 - smoothing) * logsigmoid(beta * gap) - smoothing * logsigmoid(-beta * gap)


def _policy_and_pairs(scores, rows: Rows) -> Tensor:
    policy = linear.batch_loss(scores, rows, lambda logp, entropy, facts: -facts["advantages"] * logp)
    return policy + 2 * _pairs(_dpo(0.3))(scores, rows)


MIXED = {
    "grpo and sft": Case(
        tt.losses.mix({"policy": tt.losses.grpo(entropy=0.1), "sft": tt.losses.sft()}, weights={"sft": 0.1}),
        whole=_policy_and_sft,
    ),
    "ppo or sft": Case(
        tt.losses.mix(
            {"policy": tt.losses.ppo(), "sft": tt.losses.sft()},
            weights={"sft": 0.25},
            select=lambda row: ("policy", "sft")[row.group],
        ),
        whole=_by_group,
    ),
    "reinforce and dpo": Case(
        tt.losses.mix({"policy": tt.losses.reinforce(), "dpo": tt.losses.dpo(beta=0.3)}, weights={"dpo": 2.0}),
        whole=_policy_and_pairs,
        prepare=whole_pairs,
    ),
}
POLICY = {
    "dapo truncated": Case(tt.losses.dapo(importance_cap=1.4), _corrected("token_truncate")),
    "dapo masked by rows": Case(
        tt.losses.dapo(importance_cap=1.4, importance_mode="sequence_mask"), _corrected("sequence_mask")
    ),
    "reinforce corrected": Case(tt.losses.reinforce(importance_cap=1.4), _present),
    "dr_grpo": Case(tt.losses.dr_grpo(length=LENGTH), whole=_dr_grpo),
    "gspo": Case(tt.losses.gspo(clip_low=0.3, clip_high=0.3), _gspo, "trajectory"),
    "gspo token": Case(
        tt.losses.gspo(clip_low=0.3, clip_high=0.3, entropy=0.05, level="token"), _gspo_token, "trajectory"
    ),
    "distill": Case(tt.losses.distill(), _teacher),
    "distill corrected": Case(
        tt.losses.distill(
            estimator="policy_gradient", reduction="trajectory", importance_cap=1.4, importance_mode="token_mask"
        ),
        _student,
        "trajectory",
    ),
}
PREFERENCE = {
    "dpo": Case(tt.losses.dpo(beta=0.3), whole=_pairs(_dpo(0.3)), prepare=whole_pairs),
    "dpo smoothed and free": Case(
        tt.losses.dpo(beta=0.3, label_smoothing=0.2, reference_free=True),
        whole=_pairs(_dpo(0.3, 0.2), reference=False),
        prepare=whole_pairs,
    ),
}
EVERY: dict[str, Case] = POLICY | PREFERENCE | MIXED
GROUPS = {"policy": POLICY, "preference": PREFERENCE, "mixed": MIXED}
