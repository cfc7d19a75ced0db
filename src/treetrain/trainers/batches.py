"""Trainers' batches, padded [B, L] or packed, and the rows of their own length in them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer, Shaped
from torch import Tensor, nn

from treetrain.core.errors import DataError, expect
from treetrain.core.tree.token_tree import TokenTree, build_tree
from treetrain.layers.images.image_rows import IMAGE_INPUTS, IMAGE_TYPES, Image, places_of_images, split_images
from treetrain.layers.trajectory import Trajectory

ModelInputs = dict[str, Any]
"""The keyword arguments of a call of the model's forward: tensors, and options of other types."""
IGNORED = -100
"""The label of tokens that are not predicted."""
TREE_INDEX = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
"""Keyword arguments by which TRL's `AsyncGRPOTrainer` describes a packed tree to its model."""
ROUTED = "routed_experts"
"""The keyword argument, or entry of a batch, with the experts that the rollout recorded; see `experts_of_rows`."""
KEPT = "sampling_mask"
"""The same for the ids that its sampler kept (top-p, top-k): for each row a list for each of its tokens, or None."""
RECORDED = (ROUTED, KEPT)
ADAPTERS = "adapter_names"
"""The keyword argument, or entry of a batch, with the name of each row's adapter of peft."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Keyword arguments by which processors say which tokens are of an image; 0 is text."""


class Span(NamedTuple):
    """The place of a row in a batch: its tokens are [batch_row, start:stop]."""

    batch_row: int
    start: int
    stop: int


def from_padded(
    input_ids: Integer[Tensor, "B L"], attention_mask: Shaped[Tensor, "B L"], **facts: Tensor
) -> list[Trajectory]:
    """Rows of a padded batch as trajectories.

    Args:
        input_ids: B rows, padded to L tokens.
        attention_mask: True or 1 at real tokens; padding left, right or both.
        facts: per-token facts of `Trajectory` by name, [B, L]; entry t belongs to the prediction of token t. (What
            `to_padded` returns lacks the first column.)

    Raises:
        DataError: shapes that disagree, or a hole in a row's mask.
    """
    _check_same(input_ids, attention_mask=attention_mask, **facts)
    return _trajectories(input_ids, padded_spans(attention_mask), facts)


def to_padded(
    rows: Sequence[Shaped[Tensor, " _"]], attention_mask: Shaped[Tensor, "B L"], fill: float = 0.0
) -> Shaped[Tensor, "B L-1"]:
    """Pad per-prediction rows, as `logprobs` returns them, to a batch aligned with next-token logits.

    Args:
        rows: B of them, each one shorter than the real tokens of its row.
        attention_mask: as given to `from_padded`.
        fill: value at padding.

    Returns:
        Column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    return _from_spans(rows, padded_spans(attention_mask), attention_mask, "an attention_mask of", fill)


def from_packed(
    input_ids: Integer[Tensor, "B T"], position_ids: Integer[Tensor, "B T"], **facts: Tensor
) -> list[Trajectory]:
    """Rows of a packed (padding-free) batch as trajectories: a row begins wherever the positions return to 0.

    Args:
        input_ids: several rows one after another; B is usually 1.
        position_ids: counting from 0 within every row.
        facts: as for `from_padded`.

    Raises:
        DataError: shapes that disagree, or positions that do not count up from 0.
    """
    _check_same(input_ids, position_ids=position_ids, **facts)
    return _trajectories(input_ids, packed_spans(position_ids), facts)


def to_packed(
    rows: Sequence[Shaped[Tensor, " _"]], position_ids: Integer[Tensor, "B T"], fill: float = 0.0
) -> Shaped[Tensor, "B T-1"]:
    """Pack per-prediction rows, as `logprobs` returns them, into a batch aligned with next-token logits.

    Args:
        rows: those that `from_packed` finds, in its order, each one shorter than its tokens.
        position_ids: as given to `from_packed`.
        fill: value where the next token begins another row.

    Returns:
        Column t belongs to the prediction of the token in column t + 1. Differentiable.
    """
    return _from_spans(rows, packed_spans(position_ids), position_ids, "position_ids that hold", fill)


def _check_same(input_ids: Tensor, **others: Tensor) -> None:
    for name, other in ({"input_ids": input_ids} | others).items():
        expect(name, other, Tensor, "a tensor [B, L]")
        if input_ids.dim() != 2 or other.shape != input_ids.shape:
            raise DataError(
                f"input_ids has shape {tuple(input_ids.shape)} and {name} {tuple(other.shape)}; both must be [B, L]"
            )


def _trajectories(input_ids: Tensor, spans: Sequence[Span], facts: dict[str, Tensor]) -> list[Trajectory]:
    ids = input_ids.cpu().numpy()
    local: dict[str, Any] = {name: value.detach().cpu().double().numpy() for name, value in facts.items()}
    return [
        Trajectory(ids[b, start:stop], **{name: value[b, start:stop] for name, value in local.items()})
        for b, start, stop in spans
    ]


def padded_spans(attention_mask: Shaped[Tensor, "B L"]) -> list[Span]:
    """The real tokens of every row of a padded batch. Raises DataError for padding between real tokens, and for NaN."""
    spans = []
    mask = attention_mask.detach().cpu()
    for b, column in ((mask != 0) & (mask != 1)).nonzero()[:1].tolist():
        raise DataError(
            f"attention_mask[{b}, {column}] is {mask[b, column].item()}; give 1 for tokens and 0 for padding"
        )
    for b, row in enumerate(mask.bool()):
        real = row.nonzero().flatten()
        start, stop = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        if len(real) != stop - start:
            hole = start + int((~row[start:stop]).nonzero()[0])
            raise DataError(
                f"row {b}: attention_mask is 0 at column {hole} between real tokens; only padding at the ends is "
                "allowed, since a hole would shift positions"
            )
        spans.append(Span(b, start, stop))
    return spans


def packed_spans(position_ids: Integer[Tensor, "B T"]) -> list[Span]:
    """The rows of a packed batch, in order. Raises DataError for positions that do not count up from 0."""
    spans = []
    for b, row in enumerate(position_ids.detach().cpu()):
        columns = torch.arange(len(row))
        begins = row == 0
        # Column of the latest 0 at or before each column: positions must count from there.
        latest = torch.where(begins, columns, -1).cummax(0).values if len(row) else columns
        wrong = (row != columns - latest) | (latest < 0)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise DataError(
                f"row {b}: position_ids is {int(row[first])} at column {first}; positions must count up from 0 "
                "within every packed row"
            )
        starts = begins.nonzero().flatten().tolist()
        spans += [Span(b, start, stop) for start, stop in zip(starts, [*starts[1:], len(row)])]
    return spans


def _from_spans(
    rows: Sequence[Shaped[Tensor, " _"]], spans: Sequence[Span], like: Shaped[Tensor, "B L"], holder: str, fill: float
) -> Shaped[Tensor, "B L-1"]:
    if len(rows) != len(spans):
        raise DataError(f"{len(rows)} rows for {holder} {len(spans)}")
    for k, (row, (_, start, stop)) in enumerate(zip(rows, spans)):
        if len(row) != max(stop - start - 1, 0):
            raise DataError(
                f"row {k} has {len(row)} predictions and {stop - start} tokens; expected one less than tokens"
            )
    shape = like.shape[0], like.shape[1] - 1
    places = [b * shape[1] + start + np.arange(len(row)) for row, (b, start, _) in zip(rows, spans)]
    return _placed(rows, places, shape, fill)


def _placed(
    rows: Sequence[Shaped[Tensor, " _"]],
    places: Sequence[Integer[np.ndarray, " _"]],
    shape: Sequence[int],
    fill: float = 0.0,
) -> Tensor:
    """Rows of values at their places in a flattened batch; differentiable.

    Rows of a packed tree share places: the first row with a place gives its value and gets all of its gradient.
    """
    if not rows:
        return torch.full(shape, fill)
    numbers, first = np.unique(np.concatenate(places), return_index=True)
    values = torch.cat(list(rows))
    index, target = (torch.from_numpy(x).to(values.device) for x in (first, numbers))
    return values.new_full((int(np.prod(shape)),), fill).index_copy(0, target, values[index]).view(shape)


class Rows(NamedTuple):
    """The K rows of a batch."""

    ids: list[Integer[np.ndarray, " _"]]
    masks: list[Bool[np.ndarray, " _"]]
    """The wanted predictions, one less than tokens; an empty list for rewards."""
    places: list[Integer[np.ndarray, " _"]]
    """Where each prediction stands in the flattened `wanted`."""
    wanted: Bool[Tensor, "B _"]
    """[B, L - 1], or [1, N] for a packed tree of N tokens, on the device of the labels."""
    spans: Sequence[Span] = ()
    """Where each row lies in the batch; empty for a packed tree."""
    images: Sequence[tuple[Image, ...]] = ()
    """The images of each row; empty for a batch of text."""
    image_token: int | None = None
    """The id that stands for images."""
    asked: Sequence[Integer[np.ndarray, "_ k"]] = ()
    """Ids whose log-probabilities are asked for at each prediction, -1 for none; empty if there are none."""
    experts: Sequence[Integer[np.ndarray, "_ P k"] | None] = ()
    """The recorded experts of each row, -1 where the router chooses; empty if none were recorded."""
    kept: Sequence[Sequence[Any] | None] = ()
    """The ids that the sampler kept for each token of each row; empty if none were recorded."""

    def asking(self, ids: Integer[Tensor, "B _ k"]) -> "Rows":
        """The rows with ids that are given in the shape of `wanted`."""
        flat = ids.detach().cpu().numpy().reshape(-1, ids.shape[-1])
        return self._replace(asked=[flat[places] for places in self.places])

    def at_ids(self, rows: Sequence[Float[Tensor, " _"]]) -> Float[Tensor, "B _ k"]:
        """Log-probabilities of the asked ids, row by row, in the shape in which the ids were given; 0 at -1."""
        width, flat = self.asked[0].shape[-1], torch.cat([*rows])
        at = [(places[:, None] * width + np.arange(width))[ids != -1] for places, ids in zip(self.places, self.asked)]
        index = torch.from_numpy(np.concatenate(at)).to(flat.device)
        placed = flat.new_zeros(self.wanted.numel() * width).index_copy(0, index, flat)
        return placed.view(*self.wanted.shape, width).to(self.wanted.device)

    def only(self, numbers: Sequence[int]) -> "Rows":
        """Some of the rows, whose predictions have the places that they had."""
        by_row = ("ids", "masks", "places", "spans", "images", "asked", "experts", "kept")
        return self._replace(**{name: [x[k] for k in numbers] for name in by_row if len(x := getattr(self, name))})

    def batch(self, rows: Sequence[Shaped[Tensor, " _"]]) -> Shaped[Tensor, "B _"]:
        """Per-prediction rows in the shape of `wanted`, 0 where nothing is predicted; or rewards, one below another."""
        if self.ids and not self.places:
            return torch.stack(list(rows))
        if [len(row) for row in rows] != [len(places) for places in self.places]:
            raise DataError("the scores are those of other rows than the batch has")
        return _placed(rows, self.places, self.wanted.shape).to(self.wanted.device)


def rows_of(kwargs: ModelInputs, *, rewards: bool = False, model: nn.Module | None = None) -> Rows:
    """Recover the rows of a batch that is padded, packed, neither, or a packed tree.

    Args:
        kwargs: keyword arguments of the model's call. Without ``labels`` every token but a row's first is predicted.
        rewards: the model scores whole rows, so there are no token labels.
        model: what is called; None reads no images.

    Raises:
        DataError: recorded experts that do not fit the rows; a label that is not the next token of its row, or a mask
            with positions that do not fit it.
    """
    if "tree_kv_index" in kwargs:
        return _rows_of_packed_tree(kwargs)
    ids, mask, positions = kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids")
    for name, own in (("input_ids", ids), ("attention_mask", mask)):
        if own is not None and (not isinstance(own, Tensor) or own.dim() != 2):
            shape = f"shape {tuple(own.shape)}" if isinstance(own, Tensor) else f"type {type(own).__name__}"
            raise DataError(
                f"{name} of the batch has {shape}; rows are read from [B, L], with 0 in attention_mask at padding. "
                "Packed rows have position_ids that begin at 0 in each of them, in place of a mask that says which "
                "token sees which"
            )
    if mask is None and positions is None and (bounds := kwargs.get("cu_seq_lens_q")) is not None:
        positions = positions_between(bounds, ids)
    if mask is None and positions is not None:
        spans = packed_spans(positions.expand(ids.shape))
    else:
        spans = padded_spans(torch.ones_like(ids) if mask is None else mask)
    if mask is not None and positions is not None:
        for b, start, stop in spans:
            if positions.expand(ids.shape)[b, start:stop].tolist() != list(range(stop - start)):
                raise DataError(
                    f"row {b} of the batch has an attention_mask, and position_ids that do not count its tokens from "
                    "0; leave one of them out (packed batches have positions alone)"
                )
    host = ids.cpu()
    rows = [host[b, start:stop].numpy() for b, start, stop in spans]
    images, token = ([], None) if model is None else _images_of(kwargs, rows, model)
    if rewards:
        return Rows(rows, [], [], ids.new_zeros((0, 0), dtype=torch.bool), spans, images, token)
    inside = torch.zeros(ids[:, 1:].shape, dtype=torch.bool)
    columns = [(b, start, max(stop - 1, start)) for b, start, stop in spans]
    for b, start, stop in columns:
        inside[b, start:stop] = True
    if (labels := kwargs.get("labels")) is None:
        labels = ids[:, 1:].masked_fill(~inside.to(ids.device), IGNORED)
    elif labels.shape != ids.shape:
        raise DataError(f"labels has shape {tuple(labels.shape)} and input_ids {tuple(ids.shape)}; both must be [B, L]")
    else:
        labels = labels[:, 1:]
    wanted = (labels != IGNORED).cpu()
    for wrong, why in (
        (
            wanted & ~inside,
            "which is padding or the first token of a row: it would be predicted from padding or another row; set it "
            f"to {IGNORED}, or pad on the right",
        ),
        (wanted & (labels.cpu() != host[:, 1:]), f"where its token is another; set it to the row's token or {IGNORED}"),
    ):
        if bool(wrong.any()):
            b, t = wrong.nonzero()[0].tolist()
            label, token = int(labels[b, t]), int(host[b, t + 1])
            raise DataError(f"row {b} of the batch has label {label} at column {t + 1} (token {token}), {why}")
    return Rows(
        rows,
        masks=[wanted[b, start:stop].numpy() for b, start, stop in columns],
        places=[b * labels.shape[1] + np.arange(start, stop) for b, start, stop in columns],
        wanted=labels != IGNORED,
        spans=spans,
        images=images,
        image_token=token,
        experts=experts_of_rows(kwargs.get(ROUTED), spans, ids),
        kept=_kept_of_rows(kwargs.get(KEPT), spans),
    )


def _kept_of_rows(recorded: Any, spans: Sequence[Span]) -> list[Sequence[Any] | None]:
    """The ids that a sampler kept, by row.

    Args:
        recorded: a list for each row, or None: of a list of ids for each token from its first on, or None.
        spans: of the rows.

    Raises:
        DataError: another number of rows, or fewer lists than tokens.
    """
    if recorded is None:
        return []
    if not isinstance(recorded, list | tuple) or len(recorded) != len(spans):
        given = f"lists of {len(recorded)} rows" if isinstance(recorded, list | tuple) else type(recorded).__name__
        raise DataError(f"{KEPT} of the batch is {given}, and the batch has {len(spans)}; give a list for each")
    for number, (own, (_, start, stop)) in enumerate(zip(recorded, spans)):
        if own is not None and len(own) < stop - start:
            raise DataError(
                f"{KEPT} of row {number} of the batch has {len(own)} lists for {stop - start} tokens; give one for "
                "each from the first on, None where the sampler kept every id"
            )
    return [own if own is None else own[: stop - start] for own, (_, start, stop) in zip(recorded, spans)]


def experts_of_rows(
    recorded: Any, spans: Sequence[Span], input_ids: Integer[Tensor, "B L"]
) -> list[Integer[np.ndarray, "_ P k"] | None]:
    """The experts that a rollout recorded, by row; -1 where it recorded none.

    Args:
        recorded: [B, L, layers, k] as the ids are laid out; or a list with [tokens, layers, k] for each row, from its
            first token on, which may end early, or None.
        spans: of the rows.

    Raises:
        DataError: another number of rows or tokens; see `without_fill`.
    """
    if recorded is None:
        return []
    from treetrain.layers.experts.recorded import without_fill

    if isinstance(recorded, Tensor):
        if recorded.dim() != 4 or recorded.shape[:2] != input_ids.shape:
            raise DataError(
                f"{ROUTED} of the batch has shape {tuple(recorded.shape)} and input_ids {tuple(input_ids.shape)}; give "
                "[B, L, layers, k], padded as the ids are (with -1)"
            )
        recorded = [recorded[b, start:stop].cpu().numpy() for b, start, stop in spans]
    if len(recorded) != len(spans):
        raise DataError(f"{ROUTED} has records of {len(recorded)} rows, and the batch {len(spans)}; give one for each")
    found: list[Any] = []
    for own, (b, start, stop) in zip(recorded, spans):
        if own is None or not len(own):
            found.append(None)
            continue
        own = without_fill(np.asarray(own)[: stop - start], f"{ROUTED} of row {b}", "leave it out")
        found.append(np.concatenate([own, np.full((stop - start - len(own), *own.shape[1:]), -1)]))
    return found


def _images_of(
    kwargs: ModelInputs, rows: list[Integer[np.ndarray, " _"]], model: nn.Module
) -> tuple[list[tuple[Image, ...]], int | None]:
    """The images of each row of a batch, and the token that stands for them; nothing in a batch of text.

    Raises:
        DataError: the batch does not say which tokens are of images, though the model reads that, or has another
            number of images than the rows.
    """
    given = {name: kwargs[name] for name in IMAGE_INPUTS if kwargs.get(name) is not None}
    if not given:
        return [], None
    from treetrain.core.hf.capability import causal_lm
    from treetrain.layers.images.encoders import image_encoder, reads_token_types

    config: Any = causal_lm(model).config
    types, ids, token = kwargs.get(IMAGE_TYPES), kwargs["input_ids"], config.image_token_id
    if reads_token_types(image_encoder(model)):
        if types is None:
            raise DataError(
                f"the batch has {', '.join(given)} and no {IMAGE_TYPES}, without which positions around images are not "
                "known; make it by the model's own processor, which gives them"
            )
        if bool(((types != 0) != (ids == token)).any()):
            others = ids[types.expand(ids.shape) != 0].unique().tolist()
            raise DataError(
                f"the batch has {', '.join(given)}, and by {IMAGE_TYPES} the tokens {others} are of images or videos; "
                f"they must be those of images, {token}, and all of them. Videos are not computed on a tree. The types "
                "must be padded as the ids are (GRPO pads prompts on the left: "
                "processor.tokenizer.padding_side='left')"
            )
    try:
        images = split_images(given)
        counts = [len(places) for places in places_of_images(rows, token, images)]
    except DataError as error:
        raise DataError(
            f"{error}. A row that is cut within its images (max_length) loses them: set max_length=None"
        ) from error
    ends = np.cumsum(counts).tolist()
    return [images[end - count : end] for end, count in zip(ends, counts)], token


def with_labels(kwargs: ModelInputs) -> ModelInputs:
    """The arguments of a call with ``labels`` in place of ``shift_labels``, which models prefer if both are there.

    Raises:
        DataError: ``shift_labels`` of another shape than the ids, or with a label for the token after the last column.
    """
    shifted = kwargs.get("shift_labels")
    if shifted is None or TREE_INDEX[0] in kwargs:
        return kwargs
    ids = kwargs["input_ids"]
    if shifted.shape != ids.shape:
        raise DataError(
            f"shift_labels has shape {tuple(shifted.shape)} and input_ids {tuple(ids.shape)}; both must be [B, L]"
        )
    if bool((shifted[:, -1:] != IGNORED).any()):
        row = int((shifted[:, -1] != IGNORED).nonzero()[0])
        raise DataError(
            f"row {row} of the batch has {int(shifted[row, -1])} in the last column of shift_labels, whose next token "
            f"is not in the batch; set it to {IGNORED}"
        )
    others = {name: value for name, value in kwargs.items() if name != "shift_labels"}
    return others | {"labels": nn.functional.pad(shifted[:, :-1], (1, 0), value=IGNORED)}


def positions_between(bounds: Integer[Tensor, " _"], input_ids: Integer[Tensor, "B T"]) -> Integer[Tensor, "1 T"]:
    """The positions of packed rows whose bounds are given, as the cu_seq_lens of flash attention give them.

    Raises:
        DataError: bounds that do not run from 0 to the number of tokens, or more than one packed row of them.
    """
    ends, tokens = bounds.cpu().long(), input_ids.shape[1]
    if len(input_ids) != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or bool((ends.diff() <= 0).any()):
        raise DataError(
            f"cu_seq_lens_q is {ends.tolist()} for input_ids of shape {tuple(input_ids.shape)}; it must rise from 0 to "
            "the number of tokens of a batch [1, T]"
        )
    columns = torch.arange(tokens)
    return (columns - ends[torch.searchsorted(ends, columns, right=True) - 1])[None].to(input_ids.device)


def _rows_of_packed_tree(kwargs: ModelInputs) -> Rows:
    """Recover the samples that TRL's AsyncGRPO packed into a tree for its own kernel.

    As rows they run wherever the engine does, and together with the step's other micro-batches. See
    `TreeRow.pack` in trl/experimental/async_grpo/packing.py for the arguments.
    """
    tokens, labels = (kwargs[name][0].cpu().numpy() for name in ("input_ids", "shift_labels"))
    index, starts, path_starts = (kwargs[name].cpu().numpy().astype(np.int64) for name in TREE_INDEX)
    paths, own = np.split(index, path_starts[1:-1]), np.diff(starts)
    parents = {int(path[-length - 1]) for path, length in zip(paths, own) if len(path) > length}
    # A sample ends in a segment of its own, which no other segment continues.
    paths = [path for path in paths if int(path[-1]) not in parents]
    return Rows(
        ids=[tokens[path] for path in paths],
        masks=[labels[path[:-1]] != IGNORED for path in paths],
        places=[path[:-1] for path in paths],
        wanted=kwargs["shift_labels"] != IGNORED,
    )


def model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The keyword arguments with which a trainer calls its model for a micro-batch; None where they are not known."""
    if "tree_kv_index" in batch:  # AsyncGRPO
        real = batch["attention_mask"].bool()
        inputs = {name: batch[name][real][None] for name in ("input_ids", "shift_labels")}
        return inputs | {name: batch[name][batch[name] >= 0] for name in TREE_INDEX}
    images = {name: batch[name] for name in (*IMAGE_INPUTS, IMAGE_TYPES) if batch.get(name) is not None}
    recorded = {name: batch[name] for name in RECORDED if batch.get(name) is not None}
    if "completion_ids" in batch:  # GRPO and RLOO
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, : batch["prompt_ids"].shape[1]] = IGNORED
        return {"input_ids": ids, "attention_mask": mask, "labels": labels} | images | recorded
    if "input_ids" not in batch:
        return None
    names = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
    inputs = with_labels({name: batch[name] for name in names if name in batch})
    if "labels" not in inputs and "completion_mask" in batch:  # DPO and KTO
        inputs["labels"] = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
    return inputs | images | recorded


def tree_of(batches: Sequence[Rows]) -> TokenTree:
    """The rows of some batches as a tree whose trained tokens are the wanted ones; without masks all are trained."""
    made = []
    for rows in batches:
        columns = (rows.masks, rows.images, rows.experts, rows.kept)
        for row, mask, own, routed, kept in zip(rows.ids, *(x or [None] * len(rows.ids) for x in columns)):
            mask: Any
            weights = None if mask is None else np.concatenate([[0.0], mask])[: len(row)]
            facts = {"images": own, "image_token": rows.image_token, "experts": routed}
            facts["sampling_mask"] = kept
            made.append(Trajectory(row, loss_weights=weights, **facts))
    return build_tree(made)
