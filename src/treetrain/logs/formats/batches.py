"""Batches of token ids that trainers write: Atropos' groups, NeMo RL's training data, prime-rl's exports."""

from treetrain.core.errors import DataError
from treetrain.logs.formats.tokens import IGNORED_LABEL, sets_of
from treetrain.logs.records import Json, Notes, Record, facts, field, look_up


def read_atropos(record: Record, notes: Notes) -> list[Record]:
    """A scored group of Atropos: rows of tokens, with `masks` that hold the token where it is trained, else -100."""
    rows = field(record, "tokens", list)
    columns = {"labels": "masks", "reward": "scores", "advantages": "advantages", "ref_logprobs": "ref_logprobs"}
    columns |= {"rollout_logprobs": "inference_logprobs"}
    if record.get("images"):
        raise DataError("`images` of a group are not read: give rows with the images that the processor prepared")
    found = {ours: _column(record, name, len(rows)) for ours, name in columns.items() if record.get(name) is not None}
    look_up(record, "messages")  # the texts of the rows
    known = {"group": notes.place} | facts(record)
    made = []
    for number, ids in enumerate(rows):
        row = known | {"id": f"{notes.place}/{number}", "input_ids": ids}
        row |= {name: values[number] for name, values in found.items()}
        made.append(row | _where_trained(row, ("ref_logprobs", "rollout_logprobs")))
    return made


def _where_trained(row: Record, names: tuple[str, ...]) -> dict[str, Json]:
    """These lists with 0 at tokens whose label is not trained: samplers write any number there."""
    labels: Json = row.get("labels")
    if not isinstance(labels, list):
        return {}
    found: dict[str, list[Json]] = {name: row[name] for name in names if isinstance(row.get(name), list)}
    return {
        name: [x if label != IGNORED_LABEL else 0.0 for x, label in zip(values, labels)]
        for name, values in found.items()
        if len(values) == len(labels)  # another length is an error, where the row is read
    }


def read_nemo_rl(record: Record, notes: Notes) -> list[Record]:
    """A row of NeMo RL's `train_data_step*.jsonl`: every value is a list of one, padded on the right."""
    made = []
    rows = field(record, "token_ids", list)
    names = {"loss_mask": "token_loss_mask", "advantages": "advantages", "old_logprobs": "prev_logprobs"}
    names |= {"rollout_logprobs": "generation_logprobs"}
    columns = {ours: _column(record, name, len(rows)) for ours, name in names.items() if record.get(name) is not None}
    each = {name: _column(record, name, len(rows)) for name in ("rewards", "sample_loss_mask") if record.get(name)}
    lengths = _column(record, "input_lengths", len(rows)) if record.get("input_lengths") else None
    for name in ("content", "idx", "filtered_rewards", "agent_ref"):  # the rows as text, and what is not of the model
        look_up(record, name)
    for number, ids in enumerate(rows):
        end = None if lengths is None else lengths[number]
        row = {name: one[:end] if isinstance(one := values[number], list) else one for name, values in columns.items()}
        if each.get("sample_loss_mask", [1] * len(rows))[number] == 0:
            notes.add("a row whose `sample_loss_mask` is 0 is not trained")
            row["loss_mask"] = [0] * len(ids[:end])
        reward = {"reward": each["rewards"][number]} if "rewards" in each else {}
        made.append(facts(record) | {"input_ids": ids[:end]} | row | reward)
    return made


def read_prime_rl(record: Record, notes: Notes) -> list[Record]:
    """A sequence of prime-rl's `token_exports`: what its trainer ran, token by token."""
    row = {"input_ids": field(record, "token_ids", list), "loss_mask": [int(one) for one in record["loss_mask"]]}
    names = {"advantages": "advantages", "rollout_logprobs": "inference_logprobs", "loss_weights": "rl_weights"}
    for ours, name in names.items():
        values = record.get(name)
        if isinstance(values, list) and any(one is not None for one in values):
            row[ours] = values
    for name in ("ce_weights", "ref_kl_weights"):
        if any(one for one in record.get(name) or []):
            raise DataError(f"`{name}` are given: this row is trained by another loss than its advantages; take it out")
    for name in _OF_EXPORTS:
        look_up(record, name)
    return [facts(record) | row | sets_of(record)]


_OF_EXPORTS = ("schema_version", "step", "rank", "micro_step", "micro_sequence_idx", "export_sequence_idx")
_OF_EXPORTS += (
    "position_ids",
    "trainer_logprobs",
    "entropy",
    "mismatch_kl",
    "log_importance_ratio",
    "importance_ratio",
    "prob_delta",
)
_OF_EXPORTS += ("is_masked", "is_masked_high", "is_masked_low")
"""Numbers of prime-rl's trainer, which a training computes anew."""


def _column(record: Record, name: str, rows: int) -> list[Json]:
    values = field(record, name, list)
    if len(values) != rows:
        raise DataError(f"`{name}` has {len(values)} entries for {rows} rows of tokens; give one for each")
    return values
