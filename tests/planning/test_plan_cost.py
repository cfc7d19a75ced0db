"""FLOPs and sizes of models by their configurations, against transformers' own classes and sums by hand."""

import dataclasses
import math

import numpy as np
import pytest

from treetrain.errors import UnsupportedModel
from treetrain.planning import ModelShape, ideal_speedup, step_flops
from treetrain.planning.blocks import Attention
from treetrain.planning.families import FAMILIES as KNOWN
from treetrain.tree import build_tree
from treetrain.tree.attention_range import FULL, AttentionRange
from treetrain.tree.stats import linear_work, tree_stats, tree_work

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from support import families  # noqa: E402
from support.hybrids import make_hybrid, make_hybrid_config  # noqa: E402

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "sliding_window": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN = [
    "cohere",
    "ernie4_5",
    "gemma",
    "glm",
    "glm4",
    "granite",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
]
COUNTED = [*(name for name in families.FAMILIES if name not in families.MAMBA), "olmo_hybrid", "lfm2"]
TOKENS = 64  # a chunk of the gated delta rule


@pytest.mark.parametrize(
    ("name", "published"),
    [  # parameter counts of the published checkpoints, norms included
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_named_shapes_have_the_published_number_of_parameters_but_for_the_norms(name, published):
    shape = ModelShape.named(name)
    norms = shape.layers * 2 * shape.hidden + shape.hidden
    if name.startswith("qwen3"):
        norms += shape.layers * 2 * shape.head_dim
    assert shape.parameters + norms == published


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("left_out", [(), ("head_dim",), ("head_dim", "num_key_value_heads")], ids=str)
def test_a_plain_family_has_the_matrices_that_transformers_builds(family, left_out):
    config = {k: v for k, v in {**TINY, "head_dim": 32}.items() if k not in left_out}
    if "num_key_value_heads" in left_out and "num_key_value_heads" not in KNOWN[family].defaults:
        with pytest.raises(UnsupportedModel, match="num_key_value_heads"):
            ModelShape.from_config({"model_type": family, **config})
        return
    shape = ModelShape.from_config({"model_type": family, **config})
    theirs = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    entries = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert entries == shape.parameters and (shape.blocks == ()) == (KNOWN[family].norms == 2)
    assert shape.tied == theirs.tie_word_embeddings
    assert getattr(theirs, "sliding_window", None) is None


def test_every_family_whose_cost_is_known_is_counted_here():
    named = {make_hybrid_config(name).model_type for name in COUNTED}
    assert set(KNOWN) == named | set(PLAIN)


@pytest.mark.parametrize("name", COUNTED)
def test_the_matrices_and_flops_of_a_family_are_those_that_run(name):
    model = make_hybrid(name)
    model.set_attn_implementation("eager")  # computes every pair, those it masks too, as products that are counted
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.parameters == sum(p.numel() for key, p in model.named_parameters() if is_matrix(key, p))
    assert shape.tied == model.config.tie_word_embeddings
    every_pair = dict.fromkeys(shape.attention_ranges, TOKENS * TOKENS)
    assert 3 * counted_flops(model, shape) == shape.flops(TOKENS, every_pair, TOKENS)


def is_matrix(key: str, parameter) -> bool:
    return (
        parameter.dim() > 1 and not key.endswith("bias") and not any(x in key for x in ("norm", "conv1d", "conv.conv"))
    )


def counted_flops(model, shape: ModelShape) -> int:
    """FLOPs of a forward as torch counts them, but for what is left out by intent."""
    from torch.utils.flop_counter import FlopCounterMode

    def triangular(system, right, *args, out_shape=None, **options):
        *batch, size, columns = right
        return math.prod(batch) * size * size * columns

    solve = {torch.ops.aten.linalg_solve_triangular: triangular}
    with FlopCounterMode(display=False, custom_mapping=solve) as counter:
        model(input_ids=torch.arange(TOKENS)[None] % model.config.vocab_size, use_cache=False)
    found = counter.get_total_flops()
    rotary = [sum(ops.values()) for key, ops in counter.get_flop_counts().items() if key.endswith("rotary_emb")]
    for kind in shape.kinds:
        if not isinstance(kind.mixer, Attention):  # the convolution runs over its padding, behind the last token, too
            found -= kind.count * 2 * kind.mixer.kernel * kind.mixer.channels * (kind.mixer.kernel - 1)
    return found - sum(rotary)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "deepseek_v3"])
def test_a_step_is_three_forwards(name):
    from torch.utils.flop_counter import FlopCounterMode

    model = families.make_family(name)
    model.set_attn_implementation("eager")
    shape = ModelShape.from_config(model.config.to_dict())
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None] % model.config.vocab_size, use_cache=False).logits.sum().backward()
    rotary = [ops for key, ops in counter.get_flop_counts().items() if key.endswith("rotary_emb")]
    step = counter.get_total_flops() - sum(sum(ops.values()) for ops in rotary)
    assert step == shape.flops(TOKENS, TOKENS * TOKENS, TOKENS)


@pytest.mark.parametrize("name", COUNTED)
def test_a_file_with_every_default_spelled_out_says_the_same(name):
    """config.json as save_pretrained writes it leaves out what is the default of all models."""
    config = make_hybrid_config(name)
    assert ModelShape.from_config(config.to_diff_dict()) == ModelShape.from_config(config.to_dict())


@pytest.mark.parametrize("family", sorted(KNOWN))
def test_what_a_family_takes_for_a_key_that_is_left_out_is_known(family):
    default = transformers.AutoConfig.for_model(family)
    assert KNOWN[family].defaults.get("tie_word_embeddings", False) == default.tie_word_embeddings
    if getattr(default, "use_sliding_window", True):
        assert KNOWN[family].defaults.get("sliding_window") == getattr(default, "sliding_window", None)
    for key in ("head_dim", "attention_chunk_size", "max_window_layers"):
        if key in KNOWN[family].defaults:
            assert KNOWN[family].defaults[key] == getattr(default, key)


@pytest.mark.parametrize("name", COUNTED)
def test_layers_see_as_far_as_transformers_masks_let_them(name):
    from transformers import masking_utils

    config = make_hybrid_config(name)
    shape = ModelShape.from_config(config.to_dict())
    assert sum(kind.count for kind in shape.kinds) == config.num_hidden_layers
    depth = np.arange(17)
    for reach in shape.attention_ranges:
        mask = masking_utils.causal_mask_function
        if reach.window is not None:
            assert reach.window == config.sliding_window
            mask = masking_utils.sliding_window_causal_mask_function(reach.window)
        if reach.chunk is not None:
            assert reach.chunk == config.attention_chunk_size
            mask = masking_utils.chunked_causal_mask_function(reach.chunk, torch.zeros(1, dtype=torch.int64))
        seen = [sum(bool(mask(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(17)) for q in range(17)]
        assert reach.seen(depth).tolist() == seen


@pytest.mark.parametrize(
    "reach",
    [FULL, AttentionRange(window=1), AttentionRange(window=5), AttentionRange(window=99), AttentionRange(chunk=4)],
    ids=str,
)
def test_pairs_of_tree_and_rows_are_counted_by_reach(reach):
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 9], [1, 2, 3, 8, 9], [5], list(range(30, 50))]
    depths = [n for row in rows for n in range(len(row) - 1)]
    by_hand = sum(int(reach.seen(np.array([d]))[0]) for d in depths)
    tree = build_tree(rows)
    assert linear_work(tree, (FULL, reach)).pairs[reach] == by_hand
    distinct = {tuple(row[: n + 1]) for row in rows for n in range(len(row) - 1)}
    assert tree_work(tree, (FULL, reach)).pairs[reach] == sum(
        int(reach.seen(np.array([len(prefix) - 1]))[0]) for prefix in distinct
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "codegen"}, "model_type 'codegen'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "bamba"}, "model_type 'bamba'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'llama' with sliding_attention layers"),
        ({"model_type": "qwen3_next", "layer_types": ["mamba", "full_attention"]}, "'qwen3_next' with mamba layers"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types has 1 entries .*=2"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe model has no num_experts"),
        ({"model_type": "gemma2"}, "gemma2 model has no sliding_window"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"intermediate_size": "96"}, "intermediate_size is '96'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 kv heads"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, says):
    with pytest.raises(UnsupportedModel, match=says):
        ModelShape.from_config({"model_type": "llama", **TINY, **changes})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("lfm2", {"full_attn_idxs": [1], "num_hidden_layers": 3}),
        ("lfm2", {"intermediate_size": 500, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}),
        ("lfm2", {"block_ff_dim": 300, "tie_embedding": False}),
        ("olmo_hybrid", {}),
        ("olmo_hybrid", {"num_hidden_layers": 9, "num_key_value_heads": 2}),
        ("olmo_hybrid", {"linear_num_key_heads": 2, "linear_num_value_heads": 6}),
        ("olmo_hybrid", {"linear_key_head_dim": 5, "linear_num_value_heads": 8}),
    ],
    ids=str,
)
def test_what_a_hybrid_makes_of_its_own_keys_is_known(family, changes):
    config = {k: v for k, v in TINY.items() if k != "num_key_value_heads" or family == "lfm2"} | changes
    shape = ModelShape.from_config({"model_type": family, **config})
    theirs = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert shape.parameters == sum(p.numel() for key, p in model.named_parameters() if is_matrix(key, p))
    assert shape.tied == theirs.tie_word_embeddings
    found = sum(kind.count for kind in shape.kinds if isinstance(kind.mixer, Attention))
    assert found == theirs.layer_types.count("full_attention")


def test_a_missing_window_is_what_transformers_makes_of_it():
    config = {k: v for k, v in TINY.items() if k != "sliding_window"}
    assert ModelShape.from_config({"model_type": "mistral", **config}).attention_ranges == (
        AttentionRange(window=4096),
    )
    assert ModelShape.from_config({"model_type": "llama", **config}).head_dim == 16


def test_a_window_that_no_position_exceeds_is_full_attention():
    config = {"model_type": "phi3", **TINY, "sliding_window": 262144, "max_position_embeddings": 131072}
    assert ModelShape.from_config(config).blocks == ()


def test_the_text_part_of_a_configuration_is_found():
    text = {"model_type": "llama", **TINY}
    assert ModelShape.from_config({"model_type": "other", "text_config": text}) == ModelShape.from_config(text)


def test_one_number_of_pairs_is_refused_where_layers_see_differently_far():
    shape = ModelShape.from_config(families.make_config("gemma2").to_dict())
    with pytest.raises(ValueError, match="a window of 5, the whole path"):
        shape.flops(10, 55, 10)
    assert shape.pairs_at(np.arange(10)) == {AttentionRange(window=5): 1 + 2 + 3 + 4 + 6 * 5, FULL: 55}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qwen9'; there are qwen3-0\.6b, "):
        ModelShape.named("qwen9")


def test_blocks_that_do_not_make_up_the_layers_are_refused():
    shape = ModelShape.from_config(families.make_config("gemma2").to_dict())
    with pytest.raises(UnsupportedModel, match="3 layers, but blocks for 2"):
        dataclasses.replace(shape, layers=3)


def test_step_flops_are_three_forwards_counted_by_hand():
    shape = ModelShape(layers=2, hidden=8, intermediate=12, heads=4, kv_heads=2, head_dim=3, vocab=50, tied=False)
    layer = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 12
    assert shape.layer_parameters == layer
    forward = 2 * (10 * 2 * layer + 55 * 4 * (2 * 3 + 2 * 3)) + 7 * 2 * 8 * 50
    assert step_flops(shape, tokens=10, pairs=55, head_rows=7) == 3 * forward


def test_the_ideal_of_a_tree_is_the_ratio_of_its_works():
    shape = ModelShape.named("qwen3-0.6b")
    tree = build_tree([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]])
    ours = step_flops(shape, 3, 6, 3)
    assert ideal_speedup(tree, shape) == step_flops(shape, 9, 18, 9) / ours == tree_stats(tree, shape).flop_speedup
    dedup = step_flops(shape, 6, 12, 6) / ours
    assert ideal_speedup(tree, shape, dedup=True) == dedup == tree_stats(tree, shape).flop_speedup_dedup
    assert ideal_speedup(build_tree([[1], []]), shape) == 1


def test_the_ideal_of_a_model_with_windows_counts_the_pairs_it_sees():
    shape = ModelShape.from_config(families.make_config("mistral_window").to_dict())
    trunk = list(range(20))
    tree = build_tree([[*trunk, 30, 31], [*trunk, 32, 33]])
    wide = dataclasses.replace(shape, blocks=())
    window = 5
    pairs = {d: min(d + 1, window) for d in range(21)}
    ours = step_flops(shape, 22, {AttentionRange(window=window): sum(pairs.values()) + pairs[20]}, 22)
    linear = step_flops(shape, 42, {AttentionRange(window=window): 2 * sum(pairs.values())}, 42)
    assert ideal_speedup(tree, shape) == linear / ours != ideal_speedup(tree, wide)


def test_rows_that_share_nothing_gain_nothing():
    assert ideal_speedup(build_tree([[1, 2], [3, 4, 5]]), ModelShape.named("qwen3-8b")) == 1
