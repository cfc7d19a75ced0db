# pyright: reportMissingImports=false
"""SkyRL: its FSDP policy worker with every shared prefix of a mini-batch computed once.

Give SkyRL this worker in place of its own, in the process that builds the trainer, before it does::

    import ray
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from treetrain.integrations.skyrl import TreePolicyWorker

    fsdp_worker.PolicyWorker = ray.remote(num_gpus=1)(TreePolicyWorker)

All rows that a process gets in a call of `forward_backward` or `forward` are scored as one tree. SkyRL's own code then
runs over its micro-batches as always: losses, metrics and their order are its own. Only the model that it calls is
replaced, by one that looks the scores up. After the last micro-batch the tree runs backward once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from torch import Tensor

from treetrain.core.engine.score import Scored
from treetrain.core.errors import UnsupportedModel
from treetrain.engine import TreeEngine

NOT_ON_A_TREE = ("pixel_values", "image_grid_thw", "rollout_expert_indices", "sub_seq_lengths")
"""Contents of SkyRL's batches that a tree does not support."""


class TreePolicyWorker(FSDPPolicyWorkerBase):
    """SkyRL's FSDP policy worker; log-probabilities, entropies and gradients come from a prefix tree.

    ``max_tokens_per_microbatch`` (or the longest row times the rows of a micro-batch) is the budget of tokens whose
    graph is alive at once. What does not fit is recomputed; no row is left out, however long.

    Raises:
        ValueError: a setting of SkyRL's configuration that cannot be exact on a tree, before the model is loaded.
        UnsupportedModel: the model, or a batch with images, recorded experts or packed rows.
    """

    def init_model(self, *args: object, **kwargs: object) -> None:
        check_settings(self.cfg)
        super().init_model(*args, **kwargs)

    def forward_backward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a mini-batch's gradients, as SkyRL does, with one backward through the tree of all its rows."""
        with self._model_from_tree(data, self.cfg.micro_train_batch_size_per_gpu) as scored:
            output = super().forward_backward(data, *args, **kwargs)
        scored.backward()  # averages over the ranks, as FSDP2 does
        output.metrics["tree/overlap"] = 1 - scored.unique_tokens / scored.flat_tokens
        return output

    def forward(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities, or a loss without gradient, as SkyRL does."""
        with torch.no_grad(), self._model_from_tree(data, self.cfg.micro_forward_batch_size_per_gpu):
            return super().forward(data, *args, **kwargs)

    @contextmanager
    def _model_from_tree(self, data: Any, rows_at_once: int) -> Iterator[Scored]:
        """Score the batch; inside the block SkyRL's calls of the model get these scores."""
        for name in NOT_ON_A_TREE:
            if data.get(name) is not None:
                raise UnsupportedModel(
                    f"the batch has {name}, which no tree of SkyRL's rows supports yet; use PolicyWorker"
                )
        model: Any = self.model
        lengths = data["attention_mask"].sum(1)
        budget = self.cfg.max_tokens_per_microbatch
        budget = budget if budget > 0 else rows_at_once * int(lengths.max())
        engine = TreeEngine(model.model, budget=budget, temperature=self.cfg.algorithm.temperature)
        model.train(torch.is_grad_enabled())
        scores = ScoresOfRows(engine, data, entropies=torch.is_grad_enabled())
        self.model = scores
        try:
            yield scores.scored
        finally:
            self.model = model


class ScoresOfRows:
    """Takes the place of SkyRL's model: called with rows of a batch, it returns the scores that a tree gave them.

    Args:
        data: sequences and attention_mask [B, S], and response_length in its metadata.
        entropies: whether to score these too.
    """

    def __init__(self, engine: TreeEngine, data: Any, *, entropies: bool):
        actions = data.metadata["response_length"]
        rows = []
        masks = []
        self._places = {}
        for ids, real in zip(data["sequences"].cpu(), data["attention_mask"].cpu().bool()):
            # Equal rows have equal scores, so they may share a leaf: it gets the sum of their gradients.
            key = row_key(ids, real)
            if key not in self._places:
                self._places[key] = len(rows)
                rows.append(ids[real])
                masks.append(torch.nonzero(real)[1:, 0] >= len(ids) - actions)
        device = engine.prepared.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):  # as around SkyRL's own calls
            self.scored = engine.score(rows, entropies=entropies, mask=masks)

    def train(self) -> None:
        """Do nothing: the model is in the mode that it was scored in."""

    eval = train

    def __call__(
        self,
        sequences: Tensor,
        num_actions: int,
        attention_mask: Tensor,
        temperature: float = 1.0,
        return_output: bool = False,
        compute_entropy: bool = False,
        **_: object,
    ) -> Any:
        """Return log-probabilities of the last tokens [B, num_actions]; with them, on request, entropies [B, S].

        Padding, and tokens outside of the response, have 0.
        """
        logprobs = self._arranged(self.scored.logprobs, sequences, attention_mask)[:, -num_actions - 1 : -1]
        if not return_output:
            return logprobs
        output = {}
        if compute_entropy and self.scored.entropies is not None:
            output["entropy"] = self._arranged(self.scored.entropies, sequences, attention_mask)
        return logprobs, output

    def _arranged(self, scores: tuple[Tensor, ...], sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """Arrange scores as [B, S]: entry t of a row is about token t + 1."""
        own = sequences.cpu()
        rows = []
        for ids, real in zip(own, attention_mask.cpu().bool()):
            whole = torch.zeros(len(ids), dtype=torch.float32, device=sequences.device)
            if real.sum() > 1:
                places = torch.nonzero(real)[:-1, 0].to(sequences.device)
                whole = whole.index_copy(0, places, scores[self._places[row_key(ids, real)]].float())
            else:  # SkyRL's filler, which evens out the micro-batches of processes
                whole.requires_grad_(torch.is_grad_enabled())
            rows.append(whole)
        return torch.stack(rows)


def row_key(ids: Tensor, real: Tensor) -> bytes:
    """The tokens of a row and where they stand."""
    return ids[real].numpy().tobytes() + real.numpy().tobytes()


def check_settings(config: Any) -> None:
    """Raise ValueError for settings of SkyRL that a tree cannot follow."""
    refused = {
        "policy.sequence_parallel_size": (config.policy.sequence_parallel_size, 1),
        "strategy": (config.strategy, "fsdp"),
    }
    for name, (value, instead) in refused.items():
        if value != instead:
            raise ValueError(f"treetrain's worker for SkyRL: {name}={value} is not supported; set it to {instead}")
