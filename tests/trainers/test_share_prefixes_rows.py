"""Which rows a trainer's batch holds, and what of a batch is refused."""

import pytest
import torch

import treetrain as tt
from treetrain.trainers.batches import rows_of

PACKED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 3, 0]]),
    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 0]]),
    "labels": torch.tensor([[-100, 6, 7, -100, 9, -100, -100, 3, -100]]),
}


def test_packed_rows_are_cut_where_positions_return_to_0_and_go_back():
    rows = tt.from_packed(PACKED["input_ids"], PACKED["position_ids"], advantages=torch.arange(9.0)[None])
    assert [row.ids.tolist() for row in rows] == [[5, 6, 7], [8, 9], [5, 6, 3], [0]]
    assert rows[2].advantages.tolist() == [5, 6, 7]
    scores = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0]), torch.tensor([4.0, 5.0])]
    found = tt.to_packed([*scores, torch.zeros(0)], PACKED["position_ids"], fill=-7.0)
    assert found.tolist() == [[1, 2, -7, 3, -7, 4, 5, -7]]
    found.sum().backward()
    assert scores[0].grad.tolist() == [1, 1]


@pytest.mark.parametrize("positions", [[[0, 1, 3]], [[1, 2, 3]], [[0, 0, 2]]])
def test_positions_that_do_not_count_up_from_0_are_refused(positions):
    with pytest.raises(tt.DataError, match="count up from 0"):
        tt.from_packed(torch.ones(1, 3, dtype=torch.long), torch.tensor(positions))


def test_packed_batches_of_other_shapes_are_refused():
    ids, positions = torch.ones(1, 3, dtype=torch.long), torch.tensor([[0, 1, 2]])
    with pytest.raises(tt.DataError, match=r"\(1, 3\) and advantages \(1, 5\); both must be"):
        tt.from_packed(ids, positions, advantages=torch.zeros(1, 5))
    with pytest.raises(tt.DataError, match="2 rows for position_ids that hold 1"):
        tt.to_packed([torch.zeros(2), torch.zeros(2)], positions)


def test_labels_say_which_predictions_of_packed_rows_are_wanted():
    rows = rows_of(PACKED)
    assert [mask.tolist() for mask in rows.masks] == [[True, True], [True], [False, True], []]
    found = rows.batch([torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([0.0, 5.0]), torch.zeros(0)])
    assert found.tolist() == [[1, 2, 0, 3, 0, 0, 5, 0]]


def test_rows_padded_on_both_sides_keep_their_places():
    ids = torch.tensor([[0, 0, 5, 6, 7, 0], [5, 6, 7, 8, 9, 3]])
    labels = torch.tensor([[-100, -100, -100, 6, 7, -100], [-100, -100, -100, 8, 9, 3]])
    rows = rows_of({"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()})
    assert [row.tolist() for row in rows.ids] == [[5, 6, 7], [5, 6, 7, 8, 9, 3]]
    found = rows.batch([torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0, 3.0, 4.0, 5.0])])
    assert found.tolist() == [[0, 0, 1, 2, 0], [0, 0, 3, 4, 5]]
    assert (found != 0).equal(rows.wanted)


@pytest.mark.parametrize(
    "labels, mask",
    [
        ([[-100, 4, 5, -100]], [[0, 1, 1, 1]]),  # its token is the first of the row
        ([[-100, -100, -100, 6]], [[1, 1, 1, 0]]),  # its token is padding
    ],
)
def test_a_label_that_would_be_predicted_from_padding_is_refused(labels, mask):
    ids = torch.tensor([[3, 4, 5, 6]])
    with pytest.raises(tt.DataError, match="predicted from padding"):
        rows_of({"input_ids": ids, "labels": torch.tensor(labels), "attention_mask": torch.tensor(mask)})


def test_the_first_label_of_a_packed_row_is_refused():
    labels = PACKED["labels"].clone()
    labels[0, 3] = 8
    with pytest.raises(tt.DataError, match="column 3"):
        rows_of({**PACKED, "labels": labels})


def test_a_label_that_is_not_the_token_is_refused():
    with pytest.raises(tt.DataError, match=r"label 9 at column 1 \(token 4\)"):
        rows_of({"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[-100, 9]])})


def test_positions_beside_a_mask_must_be_those_of_the_rows():
    batch = {**PACKED, "attention_mask": torch.ones(1, 9)}
    with pytest.raises(tt.DataError, match="attention_mask, and position_ids"):
        rows_of(batch)
