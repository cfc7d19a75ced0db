"""Log-probabilities of a trainer's batch, for a loss of one's own.

The same lines of a ``compute_loss`` run the plain model, and a tree where `share_prefixes` has been called.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from jaxtyping import Bool, Float, Integer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from treetrain.core.engine.engine import checked_temperature
from treetrain.core.errors import DataError, UnsupportedModel
from treetrain.core.head.lm_head import Edges, ScoreRequest, Scores, check_head, score_edges, scoring_head, zero_of
from treetrain.core.hf.capability import (
    Capabilities,
    LogitMap,
    causal_lm,
    is_plain_linear,
    text_config_of,
    vocabulary_of,
)
from treetrain.kernels.lm_head import DeviceHeadKernels
from treetrain.parallel.process_group import output_dtype
from treetrain.trainers.batches import (
    ADAPTERS,
    IGNORED,
    KEPT,
    RECORDED,
    ROUTED,
    TOKEN_TYPES,
    ModelInputs,
    Rows,
    rows_of,
    with_labels,
)
from treetrain.trainers.calls import KNOWN_ARGUMENTS, image_arguments
from treetrain.trainers.outputs import TreeOutput
from treetrain.trainers.patches import tree_forward

_OF_ROWS = (
    *("input_ids", "attention_mask", "position_ids", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
"""Entries of a batch that the plain model reads."""


def token_logprobs(
    model: nn.Module | Any,
    inputs: Mapping[str, object] | Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    ids: Integer[Tensor, "B _ k"] | None = None,
) -> Any:
    """Log-probabilities of the tokens of a batch, aligned with it, for a loss of your own; differentiable.

    In the ``compute_loss`` of a trainer with `share_prefixes`, every prefix that rows share is computed once, forward
    and backward. Otherwise the plain model runs, with rows padded on their right: packed rows, and rows that are padded
    on their left, are moved, since many models would mix them with what stands before them. Its head runs on the
    predictions that are wanted, a few at a time, so logits [B, L, vocabulary] do not exist. The numbers are the same.

    Args:
        model: a causal LM, plain, wrapped by peft or by `DistributedDataParallel`; or, in a ``compute_loss_func``, the
            outputs that it is given.
        inputs: the batch: ``input_ids`` [B, L], with an ``attention_mask`` if it is padded (on either side), with
            ``position_ids`` or ``cu_seq_lens_q`` if it is packed. ``labels`` [B, L] select predictions: those of tokens
            whose label is not -100; ``shift_labels`` do if they are there. Without labels every token but a row's first
            is predicted. With `share_prefixes`, ``adapter_names`` has the adapter of peft that each row goes through.
            Entries that no model reads, such as advantages, are ignored. For outputs: the labels alone.
        temperature: divides the logits before the softmax: the one that the rows were sampled with, in a policy loss.
        return_entropy: also give the entropies of the distributions that the tokens were drawn from.
        ids: [B, L - 1, k], further ids of every prediction whose log-probabilities are also given, such as those that a
            teacher finds most likely; -1 for none.

    Returns:
        [B, L - 1], in nats, float32 or wider. Column t belongs to the token in column t + 1; it is 0 where nothing is
        predicted. With ``return_entropy`` or ``ids`` a tuple: then such a tensor of entropies, and [B, L - 1, k] at the
        ids, 0 where there is none. The routers' auxiliary loss is not part of them.

    Raises:
        DataError: a label that is not the token, or that would be predicted from padding or another row; a mask or
            positions that do not describe rows; ids of another shape, outside the vocabulary, or twice at a prediction.
        UnsupportedModel: no head is found, or the model changes its logits in an unknown way after the head; with
            `share_prefixes`, the model would not be exact on a tree.
        ValueError: a temperature that is not above 0; an entry of the batch that the model reads and that is not known
            here, such as images of other models than `TreeEngine` takes.
    """
    temperature = checked_temperature(temperature)
    if not isinstance(model, nn.Module):
        if not (isinstance(inputs, Tensor) and inputs.dim() == 2):
            raise TypeError("with the outputs of a model, give the labels, a tensor [B, L]; with a model, the batch")
        if isinstance(model, TreeOutput):
            _check_ids(ids, inputs, model._forward.module)
            scores = model.token_logprobs(inputs, temperature, entropy=return_entropy, ids=ids)
        else:
            _check_ids(ids, inputs, model.logits.shape[-1])
            scores = _from_logits(model.logits, inputs, temperature, entropy=return_entropy, ids=ids)
    else:
        if not isinstance(inputs, Mapping):
            raise TypeError(f"inputs is a {type(inputs).__name__}; give the batch, a dictionary with input_ids")
        inner = extract_model_from_parallel(model)
        batch = _arguments(inner, inputs)
        _check_ids(ids, batch["input_ids"], inner)
        forward = tree_forward(inner)
        if forward is None:
            effects = {ROUTED: "replaces the routers' choices", KEPT: "is the support of each distribution"}
            for name, effect in {**effects, ADAPTERS: "chooses each row's adapter"}.items():
                if inputs.get(name) is not None:
                    raise ValueError(
                        f"the batch has {name}, which {effect} only in a trainer with tt.share_prefixes(trainer); "
                        "leave it out here"
                    )
            scores = _from_plain_model(model, inner, batch, temperature, entropy=return_entropy, ids=ids)
        else:
            scores = forward.answers.token_logprobs(forward, batch, temperature, entropy=return_entropy, ids=ids)
    first, *others = (x for x in scores if x is not None)
    return (first, *others) if others else first


def _check_ids(ids: object, tokens: Tensor, model: nn.Module | int) -> None:
    """Raise DataError unless these are ids for the predictions of a batch; `model`: or the size of its vocabulary."""
    if ids is None:
        return
    shape = [tokens.shape[0], tokens.shape[1] - 1]
    if not isinstance(ids, Tensor) or ids.dim() != 3 or [*ids.shape[:2]] != shape or ids.is_floating_point():
        given = f"a {ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise DataError(f"ids is {given}; give whole numbers [{shape[0]}, {shape[1]}, k], one set for each prediction")
    if isinstance(model, nn.Module):
        lm = causal_lm(model)
        model = vocabulary_of(lm, text_config_of(lm.config))
    ordered = ids.sort(-1).values
    twice = torch.zeros_like(ids, dtype=torch.bool)
    twice[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    for wrong, values, what in (
        ((ids < -1) | (ids >= model), ids, f"is outside the vocabulary of {model}; give ids from 0, and -1 for none"),
        (twice, ordered, "is there twice; give every id once"),
    ):
        if wrong.any():
            row, column, place = wrong.nonzero()[0].tolist()
            raise DataError(f"ids[{row}, {column}]: {int(values[row, column, place])} {what}")


def _arguments(model: nn.Module, inputs: Mapping[str, object]) -> ModelInputs:
    """The entries of a batch that describe its rows.

    Raises:
        DataError: there are no ids.
        ValueError: the model reads another one, which would change the log-probabilities.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    if "input_ids" not in given:
        raise DataError(f"the batch has no input_ids; it has {', '.join(sorted(map(str, inputs))) or 'nothing'}")
    reads = inspect.signature(type(causal_lm(model)).forward).parameters
    images = image_arguments(model, given)
    unknown = sorted(name for name in given if name in reads and name not in KNOWN_ARGUMENTS | images)
    if unknown:
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which {type(causal_lm(model)).__name__} reads and which is not known "
            "to be exact here; leave it out of the batch"
        )
    names = (*_OF_ROWS, *sorted(images), "labels", "shift_labels", ADAPTERS, *RECORDED)
    return with_labels({name: given[name] for name in names if name in given})


def _from_plain_model(
    model: nn.Module, inner: nn.Module, batch: ModelInputs, temperature: float, *, entropy: bool, ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores from the model's own forward, whose head scores the wanted predictions in the place of logits.

    Args:
        model: the model as it is called; it may be wrapped for several processes.
        inner: the model without this wrapper.
    """
    rows = rows_of(batch, model=inner)
    batch, predicted = _padded_on_the_right(batch, rows)
    tokens = batch["input_ids"]
    wanted, capabilities, seen = rows.wanted.to(tokens.device), _head_capabilities(inner), []
    asked = None if ids is None else ids.to(tokens.device)
    edges = _edges(tokens, predicted, None if asked is None else asked[wanted])
    # Every process must reach all weights, also one that predicts nothing.
    request = ScoreRequest(
        temperature=temperature,
        need_entropy=entropy,
        reaches_all_weights=True,
        carrier_dtype=output_dtype(inner),
        kernels=DeviceHeadKernels(),
    )
    hook = inner.register_forward_hook(lambda _module, _args, output: seen.append(output.logits))
    try:
        with scoring_head(capabilities, edges, request) as calls:
            outputs = model(
                **{name: x for name, x in batch.items() if name != "labels"}, use_cache=False, return_dict=True
            )
    finally:
        hook.remove()
    check_head(inner, capabilities, calls, seen[0])
    scores = calls[0].scores
    # The wrapper's own nodes are behind its output.
    scores = replace(scores, logprobs=scores.logprobs + zero_of(outputs.logits).to(scores.logprobs.dtype))
    return _placed(scores, wanted, asked)


def _padded_on_the_right(batch: ModelInputs, rows: Rows) -> tuple[ModelInputs, Bool[Tensor, "K _"]]:
    """The batch [K, L] with every row padded on its right, and its wanted predictions, in the order of `rows`.

    This is the layout in which no model sees anything but a row. Models whose positions count padding (GPT-2, OPT)
    change rows that are padded on their left, and layers with a state or a convolution run on from one packed row into
    the next.
    """
    ids = batch["input_ids"]
    packed = "attention_mask" not in batch and any(name in batch for name in ("position_ids", "cu_seq_lens_q"))
    if not packed and not any(start > 0 for _, start, _ in rows.spans):
        return batch, rows.wanted.to(ids.device)
    some = [k for k, span in enumerate(rows.spans) if span.stop > span.start]
    spans, masks = [rows.spans[k] for k in some], [torch.from_numpy(rows.masks[k]) for k in some]

    def padded(values: Sequence[Tensor]) -> Tensor:
        return pad_sequence(list(values), batch_first=True).to(ids.device)

    by_token = [name for name in ("input_ids", *TOKEN_TYPES) if name in batch]
    columns = {name: padded([batch[name][b, start:stop] for b, start, stop in spans]) for name in by_token}
    columns["attention_mask"] = padded([torch.ones(stop - start, dtype=torch.long) for _, start, stop in spans])
    wanted = padded(masks)
    others = {name: value for name, value in batch.items() if name not in (*_OF_ROWS, *TOKEN_TYPES, "labels")}
    return others | columns, wanted


def _from_logits(
    logits: Tensor, labels: Tensor, temperature: float, *, entropy: bool, ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores from logits [B, L, V] that exist already."""
    wanted = labels[:, 1:] != IGNORED
    request, same = ScoreRequest(temperature=temperature, need_entropy=entropy), nn.Identity()
    asked = None if ids is None else ids.to(logits.device)
    rows, edges = logits.flatten(0, 1), _edges(labels, wanted, None if asked is None else asked[wanted])
    scores = score_edges(rows, same, same, edges, request, fused=False, vocab_size=logits.shape[-1])
    return _placed(scores, wanted, asked)


def _edges(
    tokens: Integer[Tensor, "B L"], wanted: Bool[Tensor, "B _"], asked: Integer[Tensor, "T k"] | None = None
) -> Edges:
    """The wanted predictions, each by a state of its own, and the further ids of each (-1 for none).

    Args:
        tokens: those that are predicted.
    """
    row, column = wanted.nonzero(as_tuple=True)
    targets = tokens[:, 1:][wanted][:, None]
    if asked is not None:
        targets = torch.cat([targets, asked.to(targets.dtype)], dim=1)
    there = targets != -1
    there[:, 0] = True
    edge_row = there.nonzero(as_tuple=True)[0]
    host = np.arange(len(row)) if asked is None else edge_row.cpu().numpy()
    return Edges(rows=row * tokens.shape[1] + column, edge_row=edge_row, targets=targets[there], host_edge_row=host)


def _placed(
    scores: Scores, wanted: Bool[Tensor, "B _"], asked: Integer[Tensor, "B _ k"] | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores of the wanted predictions and of their further ids in their places."""

    def place(values: Float[Tensor, " n"], at: Bool[Tensor, "*places"]) -> Float[Tensor, "*places"]:
        return values.new_zeros(at.shape).masked_scatter(at, values)

    logprobs, of_ids = scores.logprobs, None
    if asked is not None:
        all_of = torch.cat([wanted[..., None], wanted[..., None] & (asked != -1)], dim=-1)
        placed = place(logprobs, all_of)
        placed, of_ids = placed[..., 0], placed[..., 1:]
    else:
        placed = place(logprobs, wanted)
    return placed, None if scores.entropies is None else place(scores.entropies, wanted), of_ids


def _head_capabilities(model: nn.Module) -> Capabilities:
    """The properties of a causal LM that matter to its head alone, which need not be exact on a tree.

    Raises:
        UnsupportedModel: a model without a language-model head, or with two soft-caps.
    """
    lm = causal_lm(model)
    head = lm.get_output_embeddings() if hasattr(lm, "get_output_embeddings") else None
    if head is None:
        raise UnsupportedModel(f"{type(lm).__name__} has no language-model head; pass a causal LM")
    text = text_config_of(lm.config)
    return Capabilities(
        layers=text.num_hidden_layers,
        vocab_size=vocabulary_of(lm, text),
        max_positions=None,
        head=head,
        head_is_linear=is_plain_linear(head),
        logit_map=LogitMap.from_config(text),
    )
