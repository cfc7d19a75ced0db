# pyright: reportMissingImports=false
"""verl: its FSDP2 engine with every shared prefix of a mini-batch computed once.

Two variables switch it on, in every process of a run, without a change to verl or to the training script::

    export VERL_USE_EXTERNAL_MODULES=treetrain.integrations.verl VERL_ENGINE_VENDOR=treetrain

verl then asks this engine for old and reference log-probabilities and for updates. All rows that a process has of a
mini-batch are one tree; verl's own losses run once over all of them. Critics stay with verl's own engine. verl's v1
trainers send the rows of a prompt to one process.

An agent loop may return several trajectories (sub-agents, a rewritten history) that train the same turns again. With
``TREETRAIN_COUNT=once`` beside the two variables, each sampled token counts in the first of them alone.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

from treetrain.core.engine.score import Scored
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.tree.token_ids import MOST_LOGPROB
from treetrain.engine import TreeEngine
from treetrain.layers.experts.recorded import without_fill
from treetrain.layers.images.encoders import image_encoder, reads_token_types, rotary_positions, with_images
from treetrain.layers.images.image_rows import IMAGE_TYPES
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.once import count_once, repeats

OWN_FORWARDS: dict[type[nn.Module], Callable] = {}
"""The forwards of classes of models that verl has replaced in this process."""


def keep_own_forwards() -> None:
    """Record in `OWN_FORWARDS` the forwards that verl's engines replace when they patch a loaded model."""
    patch = transformer_impl.apply_monkey_patch

    @functools.wraps(patch)
    def keep_and_patch(model: nn.Module, *args: Any, **options: Any) -> None:
        found = [x for x in vars(sys.modules[type(model).__module__]).values() if isinstance(x, type)]
        before = {x: x.forward for x in found if issubclass(x, nn.Module) and "forward" in vars(x)}
        patch(model, *args, **options)
        for kind, forward in before.items():
            if kind.forward is not forward:
                OWN_FORWARDS.setdefault(kind, forward)

    transformer_impl.apply_monkey_patch = keep_and_patch


keep_own_forwards()


@contextmanager
def own_forwards() -> Iterator[None]:
    """Restore the models' own forwards within the block; verl's call the encoder themselves, on each call's rows."""
    patched = {kind: kind.forward for kind in OWN_FORWARDS}
    for kind, forward in OWN_FORWARDS.items():
        kind.forward = forward
    try:
        yield
    finally:
        for kind, forward in patched.items():
            kind.forward = forward


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor="treetrain"
)
class TreeFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine; log-probabilities, entropies and gradients come from a prefix tree.

    ``max_token_len_per_gpu`` (or the longest row times ``micro_batch_size_per_gpu``) is the budget of tokens whose
    graph is alive at once. What does not fit is recomputed; no row is left out, however long.
    The processes of ``ulysses_sequence_parallel_size`` are a context group: they divide the tokens of every part. With
    ``router_replay.mode=R3``, the experts that the rollout recorded replace the routers' choices. Distillation from the
    ids of a teacher (``distillation_loss.loss_mode=forward_kl_topk``) takes the log-probabilities of these ids from the
    tree; the metrics that compare them with the student's own best ids (``distillation/overlap_*``) are not logged.

    Raises:
        ValueError: a setting of verl's configuration that cannot be exact on a tree, before the model is loaded.
        UnsupportedModel: the model, a batch with one temperature per row, or one with sampling masks.
        DataError: a teacher's ids or log-probabilities that are missing or impossible; experts that were not recorded
            or are not those of the model; images that do not fit their row, and videos; positions that the model does
            not give to a row.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any):
        check_settings(model_config, engine_config)
        super().__init__(model_config, engine_config, *args, **kwargs)
        # As in verl's own replay, the reference policy's routers choose for themselves.
        self.replays = engine_config.router_replay.mode == "R3" and not engine_config.forward_only

    def _init_device_mesh(self) -> None:
        super()._init_device_mesh()
        # The tree divides tokens and heads itself; verl's own patches of models do nothing without a group.
        self.context, self.ulysses_parallel_group = self.ulysses_parallel_group, None

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        for kind in set(map(type, module.modules())):
            if kind not in OWN_FORWARDS and kind.forward.__module__.startswith("verl."):
                raise UnsupportedModel(
                    f"verl replaced {kind.__name__}.forward before treetrain kept the model's own, which a tree needs; "
                    "name treetrain.integrations.verl in VERL_USE_EXTERNAL_MODULES of every process, and load models "
                    "of one family in a process"
                )
        return module

    @own_forwards()
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, object]:
        """Score the rows of a mini-batch as one tree, compute verl's loss, and run the tree backward once.

        Args:
            data: jagged ``input_ids`` [K, L_k], ``multi_modal_inputs`` of each row if there are images, and what the
                loss needs, as verl's workers give it.
            loss_function: one of verl's losses; None only computes log-probabilities.
            forward_only: compute no gradient.

        Returns:
            model_output with jagged log_probs (and entropy, sum_pi_squared; distillation_losses, student_mass and
            teacher_mass) [K, L_k], loss and metrics. Entry t of a row is about token t + 1; entries that no loss of
            verl reads hold 0.
        """
        group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(tokens, group=group)
        # A batch that came through Ray is locked once it is on a device.
        tu.assign_non_tensor(
            data,
            sp_size=self.ulysses_sequence_parallel_size,
            dp_size=self.get_data_parallel_size(),
            # If all rows of a mini-batch only repeat, its loss is 0, and not 0 / 0.
            batch_num_tokens=max(int(tokens.item()), int(self._asks(data, COUNTED))),
        )
        if not forward_only and counts_once() and not self._asks(data, COUNTED):
            raise DataError(
                f"{COUNT}=once, but no trainer has counted the tokens of this batch: take verl's v1 trainer "
                f"(trainer.use_v1=True), with the variable in its process too, or unset {COUNT}"
            )
        data = data.to(get_device_id())
        asks_for = {name: self._asks(data, name) for name in ("calculate_entropy", "calculate_sum_pi_squared")}
        topk = self._asks(data, "distillation_use_topk")
        narrow = self._autocast_dtype != torch.float32
        autocast = torch.autocast(get_device_name(), self._autocast_dtype) if narrow else nullcontext()
        with torch.no_grad() if forward_only else nullcontext(), autocast:
            engine = self._tree_engine(data)
            together = functools.partial(engine.sharing.passes_with.together, "TreeFSDPEngine")
            with together():  # else other ranks would wait for one whose rows are refused
                check_batch(data)
                read = wanted(data)
                rows = rows_of(data, self.module, replays=self.replays)
                taught = trained(data, read) if topk else read
                ids = teacher_ids(data, taught, distillation_of(loss_function)) if topk else None
            scored = engine.score(
                rows,
                entropies=asks_for["calculate_entropy"],
                statistics=asks_for["calculate_sum_pi_squared"],
                mask=read,
                ids=ids,
            )
            with together():  # after the score, which refuses images that do not fit their row
                check_positions(self.module, rows, data["position_ids"])
            model_output = outputs(scored, data["input_ids"].offsets())
            if topk:
                model_output |= distillation_outputs(scored, data, taught, distillation_of(loss_function))
            if self._asks(data, "distillation_only"):  # the loss is that of the teacher's ids alone
                del model_output["log_probs"]
            loss, metrics = torch.ones(()), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=model_output, data=data, dp_group=group)
        if not forward_only:
            loss.backward()
            scored.backward()  # averages over the ranks, as FSDP2 does
            metrics["tree/overlap"] = 1 - scored.unique_tokens / scored.flat_tokens
        output = {"loss": loss.detach().item(), "metrics": metrics}
        if forward_only or self._asks(data, "return_model_output"):
            output["model_output"] = detach_tree(model_output)
        return postprocess_batch_func([output], indices=[list(range(len(data)))], data=data)

    def _tree_engine(self, data: TensorDict) -> TreeEngine:
        """Make the engine with this batch's temperature (see `check_batch`) and budget, which only checks the model."""
        temperature = float(torch.as_tensor(data["temperature"], dtype=torch.float64).flatten()[0])
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            budget = int(data["max_token_len_per_gpu"])
        else:
            budget = int(data["micro_batch_size_per_gpu"]) * int(data["input_ids"].offsets().diff().max())
        return TreeEngine(self.module, budget=budget, temperature=temperature, context=self.context)

    @staticmethod
    def _asks(data: TensorDict, name: str) -> bool:
        value = tu.get(data, name)
        return bool(len(value)) if isinstance(value, Tensor | list) else bool(value)


def keep_prompts_together() -> None:
    """Have verl's v1 trainers send the rows of a prompt, of all its agents, to one process, where they share prefixes.

    By themselves these trainers balance tokens over processes row by row, and so scatter a prompt over all of them.
    """
    try:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    except ImportError:
        return  # a process without what these trainers need does not run one
    balance_rows = PPOTrainer._balance_batch

    @functools.wraps(balance_rows)
    def balance_batch(self: Any, batch: Any, metrics: dict, logging_prefix: str = "global_seqlen", **options: Any):
        batch = balance_rows(self, batch, metrics, logging_prefix, **options)
        if os.environ.get("VERL_ENGINE_VENDOR") == "treetrain":
            batch.reorder(sorted(range(len(batch)), key=batch.keys.__getitem__))  # prompt_session_index
            processes = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
            parts = [part.tolist() for part in np.array_split(np.arange(len(batch)), processes)]
            lengths = [tag["seq_len"] for tag in batch.tags]
            metrics.update(log_seqlen_unbalance(lengths, parts, prefix=logging_prefix))
        return batch

    PPOTrainer._balance_batch = balance_batch


keep_prompts_together()

COUNT = "TREETRAIN_COUNT"
"""The variable that says how often a token counts that several trajectories of an agent loop train."""
COUNTED = "tree_counted_once"
"""What a batch says once that is done."""
SUMS_OF_TOKENS = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "cispo")
"""The policy losses of verl in which each token's loss depends on that token alone."""


def counts_once() -> bool:
    """Whether each sampled token counts once. Raises ValueError for a value of the variable that is not known."""
    value = os.environ.get(COUNT) or "per trajectory"
    if value not in ("once", "per trajectory"):
        raise ValueError(f"{COUNT}={value} is neither 'once' nor 'per trajectory'")
    return value == "once" and os.environ.get("VERL_ENGINE_VENDOR") == "treetrain"


def count_tokens_once() -> None:
    """Have verl's v1 trainers leave out tokens that an earlier trajectory of the same agent loop trains.

    They do so after advantages are computed, in the whole batch, so neither processes nor mini-batches matter.
    """
    try:
        import transfer_queue
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    except ImportError:
        return
    compute_advantage = PPOTrainer._compute_advantage

    @functools.wraps(compute_advantage)
    def compute_and_count(self: Any, batch: Any, metrics: dict) -> Any:
        batch = compute_advantage(self, batch, metrics)
        if counts_once():
            check_sums_tokens(self.config)
            fields = ["input_ids", "response_mask", "loss_mask", "advantages", "old_log_probs", "rollout_log_probs"]
            if self.processor is not None:
                fields.append("multi_modal_inputs")
            if replays_experts(self.config):
                fields.append("routed_experts")
            data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            masks, numbers = once_masks(batch.keys, data, getattr(self.processor, "image_token_id", None))
            batch = transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=masks)
            metrics.update(numbers)
            batch.extra_info[COUNTED] = True
        return batch

    PPOTrainer._compute_advantage = compute_and_count


count_tokens_once()


def check_sums_tokens(config: Any) -> None:
    """Raise ValueError if verl's policy loss is no sum over tokens that is divided by their number."""
    actor = config.actor_rollout_ref.actor
    loss = (actor.get("policy_loss") or {}).get("loss_mode", "vanilla")
    correction = (config.get("algorithm") or {}).get("rollout_correction") or {}
    for name, value, allowed in (
        ("actor.loss_agg_mode", actor.loss_agg_mode, ("token-mean",)),
        ("actor.policy_loss.loss_mode", loss, SUMS_OF_TOKENS),
        ("algorithm.rollout_correction.rollout_is", correction.get("rollout_is"), ("token", None)),
    ):
        if value not in allowed:
            raise ValueError(
                f"{COUNT}=once counts tokens, so the loss must be a mean over tokens: {name}={value} is not; set "
                f"it to {' or '.join(map(str, allowed))}, or unset {COUNT}"
            )


def replays_experts(config: Any) -> bool:
    """Whether the actor uses the experts that the rollout recorded."""
    engine = config.actor_rollout_ref.actor.get("fsdp_config") or {}
    return (engine.get("router_replay") or {}).get("mode") == "R3"


def once_masks(
    keys: Sequence[str], data: TensorDict, image_token: int | None = None
) -> tuple[TensorDict, dict[str, float]]:
    """Masks of responses in which each sampled token is trained in the first trajectory of its agent loop alone.

    The advantages of a token must be equal in all its trajectories. Log-probabilities may differ by the numerics that
    computed them: those of the first count, and the largest difference is among the metrics.

    Args:
        keys: prompt_session_index of each row, as verl's v1 trainers name them.
        data: jagged input_ids [K, L_k], and response_mask, loss_mask and advantages [K, R_k] of its last tokens;
            old_log_probs and rollout_log_probs if there are any; multi_modal_inputs of each row if there are images;
            routed_experts [K, L_k, layers, k] if they are replayed.
        image_token: the id that stands for images.

    Returns:
        response_mask and loss_mask; metrics.

    Raises:
        DataError: two trajectories give one token different advantages; images without the id that stands for them.
    """
    order = sorted(range(len(keys)), key=lambda k: (keys[k].rpartition("_")[0], int(keys[k].rpartition("_")[2])))
    scores = [name for name in ("old_log_probs", "rollout_log_probs") if name in data]
    names = ("input_ids", "response_mask", "advantages", *scores)
    columns = {name: [row.detach().cpu().numpy() for row in data[name].unbind()] for name in names}
    rows, pictures, recorded = [], images_of(data), data.get("routed_experts", None)
    experts: list[Any] = [None] * len(keys)
    if recorded is not None:
        instead = "set router_replay.mode=disabled"
        experts = [without_fill(x.cpu().numpy(), "routed_experts of verl", instead) for x in recorded.unbind()]
    for k in order:
        ids, trained = columns["input_ids"][k], columns["response_mask"][k] != 0
        whole = [np.zeros(len(ids)) for _ in range(2)]
        whole[0][len(ids) - len(trained) :], whole[1][len(ids) - len(trained) :] = trained, columns["advantages"][k]
        episode = keys[k].rpartition("_")[0]
        facts = {"loss_weights": whole[0], "advantages": whole[1], "episode": episode, "id": keys[k]}
        rows.append(Trajectory(ids, **facts, experts=experts[k], images=pictures[k], image_token=image_token))
    counted, largest = count_once(rows), 0.0
    for number, other, at in repeats(rows):
        for name in scores:
            pair = []
            for one in (number, other):
                values = columns[name][order[one]]
                pair.append(values[at - (len(rows[one]) - len(values))])
            largest = max(largest, float(np.abs(pair[0] - pair[1]).max(initial=0.0)))
    trained, once = (sum(int((row.weights != 0).sum()) for row in own) for own in (rows, counted))
    keep = dict(zip(order, ((row.weights != 0) for row in counted)))
    masks = {}
    for name in ("response_mask", "loss_mask"):
        left = [
            row * torch.from_numpy(keep[k][len(keep[k]) - len(row) :]).to(row)
            for k, row in enumerate(data[name].unbind())
        ]
        masks[name] = torch.nested.as_nested_tensor(left, layout=torch.jagged)
    numbers = {"tree/repeated_tokens": 1 - once / max(trained, 1), "tree/repeated_logprob_difference": largest}
    return TensorDict(masks, batch_size=len(keys)), numbers


def check_settings(model_config: Any, engine_config: Any) -> None:
    """Raise ValueError for settings of verl that a tree cannot follow."""
    qat = getattr(engine_config, "qat", None)
    mixed = engine_config.mixed_precision or {}
    refused = {
        "strategy": (engine_config.strategy, engine_config.strategy != "fsdp2", "fsdp2"),
        "router_replay.mode": (
            engine_config.router_replay.mode,
            engine_config.router_replay.mode == "R2",
            "R3 with rollout.enable_rollout_routing_replay=True (the rollout records the experts), or disabled",
        ),
        "mixed_precision.param_dtype": (
            mixed.get("param_dtype"),
            mixed.get("param_dtype") in ("fp16", "float16"),
            "bf16 (scaled losses are not known to be exact)",
        ),
        "qat.enable": (True, bool(getattr(qat, "enable", False)), "false"),
        "use_fused_kernels": (True, bool(model_config.use_fused_kernels), "false (the head runs in chunks anyway)"),
        "use_liger": (True, bool(getattr(model_config, "use_liger", False)), "false (it replaces the model's layers)"),
        "tiled_mlp.enabled": (
            True,
            bool((getattr(model_config, "tiled_mlp", None) or {}).get("enabled")),
            "false (the budget bounds the memory of the MLP too)",
        ),
        "enable_activation_offload": (
            True,
            bool(getattr(model_config, "enable_activation_offload", False)),
            "false (a tree keeps the graphs of several passes; bound them by ppo_max_token_len_per_gpu)",
        ),
        "mtp.enable": (True, bool(getattr(getattr(model_config, "mtp", None), "enable", False)), "false"),
    }
    for name, (value, wrong, instead) in refused.items():
        if wrong:
            raise ValueError(f"treetrain's engine for verl: {name}={value} is not supported; set it to {instead}")


def check_batch(data: TensorDict) -> None:
    """Refuse what rows of a tree cannot follow.

    Raises:
        UnsupportedModel: rows of several temperatures; recorded sampling masks.
    """
    temperatures = torch.as_tensor(data["temperature"], dtype=torch.float64).unique().tolist()
    if len(temperatures) != 1:
        raise UnsupportedModel(
            f"the rows of a batch have temperatures from {temperatures[0]} to {temperatures[-1]}; rows of a tree "
            "share their logits, so sample all with one temperature, or unset VERL_ENGINE_VENDOR"
        )
    if masks := [name for name in map(str, data.keys()) if "sampling_mask" in name or "sample_support" in name]:
        raise UnsupportedModel(
            f"the batch has {masks[0]}, and verl's losses have no log-probabilities over the ids that a sampler kept: "
            "take it out if the sampler kept all ids, or train by TreeTrainer (Trajectory(sampling_mask=...))"
        )


def wanted(data: TensorDict) -> list[Tensor]:
    """Mark the predictions that verl's losses read, bool [L_k - 1] per row: the response's, or the loss mask's."""
    rows, lengths = data["input_ids"], data["input_ids"].offsets().diff().tolist()
    if "responses" in data:
        responses = data["responses"]
        if responses.is_nested:
            trained = responses.offsets().diff().tolist()
        else:
            trained = data["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()
        return [torch.arange(1, n) >= n - r for n, r in zip(lengths, trained)]
    mask = data["loss_mask"]
    if mask.is_nested and mask.offsets().equal(rows.offsets()):
        return [row[1:] != 0 for row in mask.unbind()]
    return [torch.ones(n - 1, dtype=torch.bool) for n in lengths]


def rows_of(data: TensorDict, model: nn.Module, *, replays: bool) -> list[Trajectory]:
    """The rows of a batch with their images, and with recorded experts if they are replayed.

    Args:
        data: jagged ``input_ids`` [K, L_k]; ``multi_modal_inputs`` of each row if there are images; to replay, jagged
            ``routed_experts`` [K, L_k, layers, k].
        model: reads the images.

    Raises:
        DataError: there are no recorded experts, or ones that `without_fill` refuses; videos, and
            images whose arrays do not fit together.
        UnsupportedModel: images for a model of text.
    """
    ids = [row.cpu().numpy() for row in data["input_ids"].unbind()]
    rows = [Trajectory(row, id=f"row {number} of verl's batch") for number, row in enumerate(ids)]
    if replays:
        recorded = data.get("routed_experts", None)
        if recorded is None:
            raise DataError(
                "router_replay.mode=R3, but the batch has no routed_experts; set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True, or the mode to disabled"
            )
        instead = "set router_replay.mode=disabled"
        for number, own in enumerate(recorded.unbind()):
            experts = without_fill(own.cpu().numpy(), f"routed_experts of row {number} of verl's batch", instead)
            rows[number] = rows[number].replace(experts=experts)
    return with_images(model, rows, images_of(data))


DERIVED = ("images_seqlens", IMAGE_TYPES)
"""What verl's agent loops keep beside the processor's output, and what a tree computes itself."""


def images_of(data: TensorDict) -> list[dict[str, Any] | None]:
    """Return the processor's output for the images of each row; None for text."""
    found = []
    for inputs in tu.get(data, "multi_modal_inputs") or [None] * len(data):
        own = {name: x for name, x in (inputs or {}).items() if x is not None and name not in DERIVED}
        found.append(own or None)
    return found


def check_positions(model: nn.Module, rows: Sequence[Trajectory], position_ids: Tensor) -> None:
    """Raise DataError if a row has other positions than its tokens have on a tree.

    Args:
        position_ids: jagged [K, L_k], or [K, 4, L_k]: the place in the row, and three of rotary embeddings.
    """
    encoder = image_encoder(model)
    for number, (row, given) in enumerate(zip(rows, position_ids.unbind(), strict=True)):
        given = given.cpu()
        own = torch.arange(len(row)).expand_as(given)
        if row.images and reads_token_types(encoder):
            own = torch.cat([own.reshape(-1, len(row))[:1], torch.from_numpy(rotary_positions(encoder, row))])
        if not own.equal(given):
            at = int((own != given).reshape(-1, len(row)).any(0).nonzero()[0])
            raise DataError(
                f"row {number} of verl's batch has position_ids {given[..., at].tolist()} at token {at}; the model "
                f"counts {own[..., at].tolist()}. On a tree positions are the model's: make the batch by the model's "
                "own processor, or unset VERL_ENGINE_VENDOR"
            )


def outputs(scored: Scored, offsets: Tensor) -> dict[str, Tensor]:
    """Arrange the scores as verl's losses take them: jagged [K, L_k], the last entry of each row 0."""
    found = {"log_probs": jagged(scored.logprobs, offsets)}
    if scored.entropies is not None:
        found["entropy"] = jagged(scored.entropies, offsets)
    if scored.log_sum_sq_probs is not None:
        found["sum_pi_squared"] = jagged([row.exp() for row in scored.log_sum_sq_probs], offsets)
    return found


def jagged(rows: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """Join rows [L_k - 1] as [K, L_k]; the last entry of each is 0."""
    values = torch.cat([torch.nn.functional.pad(row, (0, 1)) for row in rows])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def trained(data: TensorDict, read: Sequence[Tensor]) -> list[Tensor]:
    """Those of the predictions of responses, bool [L_k - 1] per row, that ``response_mask`` trains.

    A teacher's ids mean nothing at the others: verl's v1 trainers fill up a batch by rows whose ids are all the same.
    """
    found = []
    for own, mask in zip(read, data["response_mask"].unbind()):
        response = mask[: int(own.sum())].cpu() != 0
        found.append(own.cpu().masked_scatter(own.cpu(), response))
    return found


def distillation_of(loss_function: Callable | None) -> Any:
    """verl's configuration of distillation. Raises UnsupportedModel for another loss than verl's."""
    config = getattr(loss_function, "keywords", {}).get("distillation_config")
    if config is None:
        raise UnsupportedModel(
            f"the batch has distillation_use_topk, and its loss is {loss_function!r} instead of verl's "
            "distillation_ppo_loss; unset VERL_ENGINE_VENDOR"
        )
    return config


def teacher_ids(data: TensorDict, read: Sequence[Tensor], config: Any) -> list[Tensor]:
    """The ids of the teacher at each prediction of each row that a loss reads, [L_k - 1, k]; -1 elsewhere.

    Args:
        data: jagged ``teacher_ids`` and ``teacher_logprobs`` [K, L_k, k], whose entry t is about token t + 1.
        read: marks these predictions, bool [L_k - 1] per row.
        config: verl's, of distillation.

    Raises:
        DataError: there are none, or others than one list for each token; ids below 0 or twice, log-probabilities that
            are no numbers or above 0.
    """
    tables, rows = [], data["input_ids"]
    for name in ("teacher_ids", "teacher_logprobs"):
        table = data.get(name, None)
        if table is None or not table.is_nested or not table.offsets().equal(rows.offsets()):
            raise DataError(
                f"the batch has distillation_use_topk, and no {name} for each token of its rows: set "
                "distillation.enabled=True in the trainer that made the batch"
            )
        tables.append(table)
    if (sizes := [table.values().shape[1] for table in tables])[0] != sizes[1]:
        raise DataError(
            f"teacher_ids have {sizes[0]} ids for each token and teacher_logprobs {sizes[1]} log-probabilities; the "
            "teacher gives one for each id"
        )
    found = []
    for number, (ids, logprobs, own) in enumerate(zip(*(table.unbind() for table in tables), read)):
        ids, logprobs = ids[:-1].cpu().masked_fill(~own[:, None], -1), logprobs[:-1].cpu()
        wrong = (ids < 0) | ~(logprobs <= MOST_LOGPROB)
        if config.distillation_loss.log_prob_min_clamp is None:  # 0 * infinity
            wrong |= logprobs.isinf()
        if (wrong := wrong & own[:, None]).any():
            at, of = wrong.nonzero()[0].tolist()
            raise DataError(
                f"row {number} of verl's batch: of the teacher's ids for token {at + 1}, number {of} is {ids[at, of]} "
                f"with the log-probability {logprobs[at, of]:g}; a teacher gives every id of a trained token, from 0, "
                f"and finite log-probabilities in nats, at most 0 (to {MOST_LOGPROB:g}, for rounding)"
            )
        found.append(ids)
    return found


def distillation_outputs(scored: Scored, data: TensorDict, read: Sequence[Tensor], config: Any) -> dict[str, Tensor]:
    """Each token's divergence from the teacher, and the mass that both give to its ids, jagged [K, L_k].

    verl's loss on a teacher's ids reads them. Its own engine computes them in the same steps from all logits
    (``verl/trainer/distillation/fsdp/losses.py``).

    Args:
        read: marks the predictions whose log-probabilities at the teacher's ids were asked for.
        config: verl's, of distillation.
    """
    from verl.trainer.distillation.fsdp.losses import kl_divergence

    assert scored.id_logprobs is not None
    rows: dict[str, list[Tensor]] = {name: [] for name in ("distillation_losses", "student_mass", "teacher_mass")}
    least = config.distillation_loss.log_prob_min_clamp
    for found, teacher, own in zip(scored.id_logprobs, data["teacher_logprobs"].unbind(), read):
        own = own.to(teacher.device)
        p, q = teacher[:-1][own], found.reshape(-1, teacher.shape[-1])
        masses = [x.exp().sum(-1) for x in (q, p)]
        if least is not None:
            p, q = p.clamp_min(least), q.clamp_min(least)
        for name, values in zip(rows, (kl_divergence(log_q=q, log_p=p), *masses)):
            rows[name].append(values.new_zeros(len(own)).index_put((own.nonzero()[:, 0],), values))
    return {name: jagged(values, data["input_ids"].offsets()) for name, values in rows.items()}
