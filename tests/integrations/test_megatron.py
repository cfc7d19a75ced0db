"""The arrays for Megatron's tree packing against `tt.pack` and against rows one by one; Megatron is not needed."""

import pytest
import torch

import treetrain as tt
from treetrain.integrations.megatron import TreePacking, tree_packing

ROWS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [8, 9], [1, 2, 3, 5], [8, 9, 2, 4, 4, 1]]
MASK = [[0, 0, 1], [1, 0, 1, 1], [1, 1], [1], [0, 0, 0], [0, 1, 1, 0, 1]]


def path(forest: TreePacking, segment: int) -> list[int]:
    """The tokens from the root to the end of a segment, by the segments alone."""
    own = list(range(forest.starts[segment], forest.starts[segment] + forest.lengths[segment]))
    above = forest.parents[segment]
    return (path(forest, above) if above >= 0 else []) + own


@pytest.mark.parametrize("mask", [None, MASK], ids=["all predictions", "a mask"])
def test_every_row_is_a_path_of_segments_and_its_predictions_are_edges_on_it(mask) -> None:
    packed = tt.pack(ROWS, mask=mask)
    forest = tree_packing(packed)
    assert torch.equal(forest.input_ids, packed.input_ids) and torch.equal(forest.position_ids, packed.positions)
    assert sum(forest.lengths) == len(forest.input_ids) == packed.num_tokens
    wanted = mask or [[1] * (len(row) - 1) for row in ROWS]
    # Each edge has a number of its own; by `split` every row gets those of its predictions.
    numbers = packed.split(forest.edge_of_prediction + 1)
    for row, kept, edges in zip(ROWS, wanted, numbers):
        assert [bool(edge) for edge in edges] == [bool(x) for x in kept]
        for position, edge in enumerate(edges.tolist()):
            if edge:
                source = int(forest.sources[edge - 1])
                tokens = [token for token in path(forest, int(forest.segment_ids[source])) if token <= source]
                assert forest.input_ids[tokens].tolist() == row[: position + 1]
                assert forest.position_ids[tokens].tolist() == list(range(position + 1))
                assert int(forest.targets[edge - 1]) == row[position + 1]


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention [L, H, D] of one row."""
    heads = (x.transpose(0, 1)[None] for x in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)


@pytest.mark.parametrize(("size", "multiple"), [(1, 1), (1, 8), (2, 1), (3, 4)])
def test_the_runs_of_all_ranks_give_the_attention_of_tt_attention_and_gradients(size, multiple) -> None:
    packed = tt.pack(ROWS)
    ranks = [tree_packing(packed, context_rank=r, context_size=size, multiple_of=multiple) for r in range(size)]
    count = len(ranks[0].input_ids)
    assert count % multiple == 0 and (size == 1 or count % (2 * size) == 0) and count - packed.num_tokens < 24
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(packed.num_tokens, 2, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    weights = torch.randn(packed.num_tokens, 2, 4, generator=draw, dtype=torch.float64)
    given, ours = ([x.clone().requires_grad_() for x in whole] for _ in range(2))
    expected = tt.attention(*given, packed.tree, layer=0)
    (expected * weights).sum().backward()
    padded = [torch.cat([x, x.new_zeros(count - len(x), 2, 4)]) for x in ours]
    parts = []
    for forest in ranks:  # as Megatron does: keys and values gathered, queries local, a run at a time
        gathered = torch.cat([torch.arange(count)[each.local] for each in ranks])[forest.gathered]
        assert gathered.tolist() == list(range(count))
        output = torch.zeros(len(forest.local), 2, 4, dtype=torch.float64)
        for run in forest.runs:
            assert forest.local[run.local].tolist() == list(range(run.start, run.stop))
            tokens = [token for token in path(forest, run.segment) if token < run.stop]
            output[run.local] = attention(*(x[tokens] for x in padded))[run.start - run.stop :]
        parts.append(output)
    found = torch.cat(parts)[ranks[0].gathered][: packed.num_tokens]
    (found * weights).sum().backward()
    assert (found - expected).abs().max() < 1e-14
    assert all((a.grad - b.grad).abs().max() < 1e-13 for a, b in zip(given, ours))
    # Every edge is on one rank, with the place of its source there.
    edges = torch.cat([forest.local_edges for forest in ranks])
    assert sorted(edges.tolist()) == list(range(len(ranks[0].sources)))
    for forest in ranks:
        assert torch.equal(forest.local[forest.local_sources], forest.sources[forest.local_edges])


def test_the_tree_of_megatrons_own_test() -> None:
    """48 tokens with 48 and 32 below, over two ranks of context parallel (tests/unit_tests of pull request 7387)."""
    rows = [[*range(96), 7], [*range(48), *range(96, 128), 7]]
    given = [tree_packing(tt.pack(rows), context_rank=rank, context_size=2).arguments() for rank in (0, 1)]
    assert given[0]["tree_segment_starts"] == (0, 48, 96) and given[0]["tree_segment_lengths"] == (48, 48, 32)
    assert given[0]["tree_segment_parents"] == (-1, 0, 0) and given[0]["tree_segment_depths"] == (0, 48, 48)
    runs = [[run[:3] for run in each["tree_query_runs"]] for each in given]
    assert runs == [[(0, 0, 32), (2, 96, 128)], [(0, 32, 48), (1, 48, 96)]]
    assert given[0]["tree_local_position_ids"].tolist() == [*range(32), *range(48, 80)]
    assert given[1]["tree_cp_local_token_count"] == 64 and given[1]["max_seqlen_q"] == 128
    assert given[1]["cu_seqlens_q"].tolist() == [0, 128] and given[1]["cu_seqlens_q"].dtype == torch.int32


def test_what_cannot_be_is_said() -> None:
    packed = tt.pack(ROWS)
    with pytest.raises(ValueError, match="context_rank is 2 of 2; give a rank from 0 to 1"):
        tree_packing(packed, context_rank=2, context_size=2)
    with pytest.raises(ValueError, match="multiple_of is 0"):
        tree_packing(packed, multiple_of=0)
