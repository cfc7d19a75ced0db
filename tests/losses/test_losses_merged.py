"""Losses on merged rows: value, gradients, coefficients and metrics are those of the rows."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from support.node_trees import random_node_tree
from treetrain import losses
from treetrain.errors import DataError
from treetrain.losses import Facts
from treetrain.losses.losses import SFTLoss
from treetrain.tree import Node, NodeTrajectory, TokenTree

MAKE = {
    "sft": lambda **options: losses.sft(**options),
    "reinforce": lambda **options: losses.reinforce(**options),
    "reinforce k1": lambda **options: losses.reinforce(kl=0.3, kl_estimator="k1", **options),
    "ppo on policy": lambda **options: losses.ppo(on_policy=True, kl=0.2, kl_estimator="k1", **options),
    "grpo on policy": lambda **options: losses.grpo(on_policy=True, clip=0.0, **options),
    # Not linear in the log-probabilities, but affine in the advantage on each side of 0.
    "reinforce k2 entropy": lambda **options: losses.reinforce(kl=0.3, kl_estimator="k2", entropy=0.1, **options),
    "ppo": lambda **options: losses.ppo(clip_low=0.2, clip_high=0.28, entropy=0.05, **options),
    "grpo k3": lambda **options: losses.grpo(clip=0.1, kl=0.2, **options),
    "ppo corrected": lambda **options: losses.ppo(importance_cap=1.5, **options),
    "grpo on policy masked": lambda **options: losses.grpo(
        on_policy=True, importance_cap=1.5, importance_mode="token_mask", **options
    ),
    "reinforce corrected": lambda **options: losses.reinforce(importance_cap=1.5, **options),
    "distill": lambda **options: losses.distill(**options),
    "distill corrected": lambda **options: losses.distill(
        estimator="policy_gradient", importance_cap=1.5, importance_mode="token_mask", **options
    ),
    "grpo unclipped below": lambda **options: losses.grpo(clip_low=1.0, clip_high=0.1, **options),
}
LINEAR = {"sft", "reinforce", "reinforce k1", "ppo on policy", "grpo on policy"}
SEEDS = range(12)
node_tree = functools.cache(random_node_tree)  # the same trees for every loss
every_loss = pytest.mark.parametrize("name", MAKE)
both_reductions = pytest.mark.parametrize("reduction", ["token", "trajectory"])
some_advantages = pytest.mark.parametrize("advantages", ["of nodes", "of rows", "of some rows"])


def predictions(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Which predictions of the rows are trained, bool [sum of L_k - 1], and the tree's index of each of these."""
    offsets, index = tree.paths()
    first = offsets[:-1][tree.trajectory_length > 0]
    used = np.concatenate([np.zeros(0), *(row.weights[1:] for row in tree.trajectories)]) != 0
    return used, np.delete(index, first)[used]


def numbers(tree: TokenTree, seed: int) -> tuple[Tensor, Tensor]:
    """A log-probability and an entropy for every token of the tree; ratios beyond the clip bounds are frequent."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, entropies = torch.randn(2, tree.num_tokens, dtype=torch.float64, generator=generator)
    return logprobs.requires_grad_(), entropies.abs().requires_grad_()


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every_loss
@both_reductions
@some_advantages
def test_value_gradients_and_metrics_are_those_of_the_rows(name, reduction, advantages):
    loss = MAKE[name](reduction=reduction)
    for seed in SEEDS:
        tree = node_tree(seed, advantages)
        used, index = predictions(tree)
        logprobs, entropies = numbers(tree, seed)
        spread = entropies if "entropies" in loss.needs or seed % 2 else None
        facts = Facts.pack(list(tree.trajectories), dtype=torch.float64, used=used)
        total, metrics = loss.packed(logprobs[index], None if spread is None else spread[index], facts)

        merged = tree.merged(reduction)
        at = torch.from_numpy(merged.tokens)
        merged_facts = Facts.pack(merged, dtype=torch.float64)
        found, found_metrics = loss.packed(logprobs[at], None if spread is None else spread[at], merged_facts)

        assert_close(found, total)
        assert found_metrics.keys() == metrics.keys()
        for key, pair in metrics.items():
            for one, other in zip(found_metrics[key], pair):
                assert_close(one, other)
        gradients = [torch.autograd.grad(t, (logprobs, entropies), materialize_grads=True) for t in (found, total)]
        for one, other in zip(*gradients):
            assert_close(one, other)
        if len(index):
            assert loss.normaliser(merged) == pytest.approx(loss.normaliser(list(tree.trajectories)), rel=1e-13)


@pytest.mark.parametrize("name", sorted(LINEAR))
@both_reductions
@some_advantages
def test_coefficients_sum_to_those_of_the_rows_on_every_token(name, reduction, advantages):
    loss = MAKE[name](reduction=reduction)
    for seed in SEEDS:
        tree = node_tree(seed, advantages)
        used, index = predictions(tree)
        merged = tree.merged(reduction)
        rows = loss.coefficients(Facts.pack(list(tree.trajectories), dtype=torch.float64, used=used))
        ours = loss.coefficients(Facts.pack(merged, dtype=torch.float64))
        per_token = torch.zeros(2, tree.num_tokens, dtype=torch.float64)
        per_token[0].index_add_(0, torch.from_numpy(index), rows)
        per_token[1].index_add_(0, torch.from_numpy(merged.tokens), ours)
        assert_close(per_token[1], per_token[0])


@every_loss
def test_coefficients_are_given_just_where_the_loss_is_linear(name):
    loss = MAKE[name](reduction="token")
    facts = Facts.pack(node_tree(1, "of some rows").merged("token"))
    assert len(facts)
    assert (loss.coefficients(facts) is not None) == (name in LINEAR)


@every_loss
@both_reductions
def test_pieces_add_up_to_the_whole(name, reduction):
    loss, tree = MAKE[name](reduction=reduction), node_tree(4, "of some rows")
    merged = tree.merged(reduction)
    logprobs, entropies = numbers(tree, 0)
    whole = torch.from_numpy(merged.tokens)
    total, metrics = loss.packed(logprobs[whole], entropies[whole], Facts.pack(merged, dtype=torch.float64))
    sums, sum_metrics = torch.zeros((), dtype=torch.float64), {}
    for index in np.array_split(np.random.default_rng(0).permutation(len(merged)), 3):
        at = whole[torch.from_numpy(index)]
        facts = Facts.pack(merged, dtype=torch.float64, used=index)
        part, part_metrics = loss.packed(logprobs[at], entropies[at], facts)
        sums, sum_metrics = sums + part, losses.add_metrics(sum_metrics, part_metrics)
    assert_close(sums, total)
    assert losses.mean_metrics(sum_metrics) == pytest.approx(losses.mean_metrics(metrics), rel=1e-12)


NODES = [Node(None, [1, 2], loss_weights=0), Node(0, [3, 4], advantages=1.0), Node(0, [5], advantages=-1.0)]
TREE = TokenTree.from_nodes(NODES, [1, 2])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Squared(SFTLoss):
    """A user's own, which does not say that it is mergeable."""

    mergeable: ClassVar[bool] = False


def test_a_loss_that_does_not_say_it_is_mergeable_is_refused_by_name():
    loss, merged = Squared(reduction="token"), TREE.merged("token")
    for call in (
        lambda: loss.check(merged),
        lambda: loss.normaliser(merged),
    ):
        with pytest.raises(ValueError, match=r"Squared does not say that it is mergeable, .* pass the rows"):
            call()


def test_a_loss_is_not_mergeable_unless_it_says_so():
    assert losses.Loss.mergeable is False
    needed = {"dr_grpo": {"length": 8}}
    made = {name: losses.by_name(name, **needed.get(name, {})) for name in losses.LOSSES}
    assert {name for name, loss in made.items() if not loss.mergeable} == {"gspo", "dpo"}


@pytest.mark.parametrize("make", [losses.reinforce, losses.ppo, losses.grpo, losses.dapo, losses.distill])
@pytest.mark.parametrize("mode", losses.IMPORTANCE_MODES)
def test_a_correction_of_whole_rows_cannot_be_merged_one_of_tokens_can(make, mode):
    assert make(importance_cap=2.0, importance_mode=mode).mergeable == mode.startswith("token")
    assert make(importance_mode=mode).mergeable


def test_rows_merged_for_another_reduction_are_refused_with_both():
    merged = TREE.merged("token")
    with pytest.raises(ValueError, match="rows merged for reduction 'token', asked for 'trajectory'"):
        Facts.pack(merged).shares("trajectory")


def test_a_missing_fact_names_the_node_before_the_step_and_in_the_step():
    merged = TREE.merged("token")
    loss = losses.ppo()
    with pytest.raises(DataError, match=r"node 1 has no old_logprobs, which the loss needs; .*on_policy=True"):
        loss.normaliser(merged)
    with pytest.raises(DataError, match="node 1 has no ref_logprobs, which the loss needs"):
        _ = Facts.pack(merged).ref_logprobs
    rows = [NodeTrajectory(node=1, advantages=1.0), NodeTrajectory(node=1)]
    mixed = TokenTree.from_nodes([Node(None, [1]), Node(0, [2])], rows).merged("token")
    with pytest.raises(DataError, match=r"node 1 \(of trajectory number 1, counted from 0\) has no advantages"):
        losses.reinforce().normaliser(mixed)


def raises(check, given) -> bool:
    try:
        check(given)
    except DataError:
        return True
    return False


@both_reductions
def test_a_missing_fact_is_missed_on_merged_rows_just_where_it_is_on_rows(reduction):
    loss, outcomes = losses.reinforce(reduction=reduction), set()
    for seed in SEEDS:
        for advantages in ("of nodes", "of rows", "of some rows", "none"):
            tree = node_tree(seed, advantages)
            rows, merged = list(tree.trajectories), tree.merged(reduction)
            refused = [raises(loss.check, rows), raises(loss.check, merged)]
            assert refused[0] == refused[1]
            outcomes.add(refused[0])
    assert outcomes == {False, True}


@both_reductions
def test_merged_rows_with_nothing_to_train_are_an_error(reduction):
    merged = TokenTree.from_nodes([Node(None, [1, 2], loss_weights=[1, 0])], [0]).merged(reduction)
    with pytest.raises(DataError, match="nothing to train: the loss weights of all nodes sum to 0"):
        losses.sft(reduction=reduction).normaliser(merged)


def test_signed_weights_have_no_normaliser_but_a_sum():
    tree = TokenTree.from_nodes([Node(None, [1, 2, 3], loss_weights=[-9, 1, -0.5])], [0])
    merged = tree.merged("token")
    with pytest.raises(DataError, match=r"node 0: loss_weights\[2\] = -0.5, but a mean needs weights of 0 or more"):
        losses.sft().normaliser(merged)
    total, _ = losses.sft().packed(torch.tensor([-2.0, -6.0]), None, Facts.pack(merged))
    assert total.item() == -1.0
