import pytest

from treetrain.errors import UnsupportedModel
from treetrain.plan import ModelShape, ideal_speedup, step_flops
from treetrain.plan.cost import _FAMILIES
from treetrain.tree import build_tree

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


@pytest.mark.parametrize("family", sorted(_FAMILIES))
@pytest.mark.parametrize("left_out", [(), ("head_dim",), ("head_dim", "num_key_value_heads")], ids=str)
def test_every_family_has_the_matrices_that_transformers_builds(family, left_out):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in {**TINY, "head_dim": 32}.items() if k not in left_out}
    if "num_key_value_heads" in left_out and not _FAMILIES[family].kv_heads_may_be_left_out:
        with pytest.raises(UnsupportedModel, match="num_key_value_heads"):
            ModelShape.from_config({"model_type": family, **config})
        return
    shape = ModelShape.from_config({"model_type": family, **config})
    theirs = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    entries = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert entries == shape.parameters
    assert shape.tied == theirs.tie_word_embeddings
    assert getattr(theirs, "sliding_window", None) is None


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_a_window_that_transformers_adds_by_itself_is_known(family):
    transformers = pytest.importorskip("transformers")
    default = transformers.AutoConfig.for_model(family)
    used = getattr(default, "use_sliding_window", True)
    assert _FAMILIES[family].window == (getattr(default, "sliding_window", None) if used else None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": "qwen3_next"}, "model_type 'qwen3_next'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window of 4096"),
        ({"model_type": "phi3", "sliding_window": 2047, "max_position_embeddings": 4096}, "window of 2047"),
        ({"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True}, "sliding window of 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention layers"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"intermediate_size": "96"}, "intermediate is '96'"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 kv heads"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes, says):
    with pytest.raises(UnsupportedModel, match=says):
        ModelShape.from_config({"model_type": "llama", **TINY, **changes})


def test_a_missing_window_is_what_transformers_makes_of_it():
    config = {k: v for k, v in TINY.items() if k != "sliding_window"}
    with pytest.raises(UnsupportedModel, match="sliding window of 4096"):
        ModelShape.from_config({"model_type": "mistral", **config})
    assert ModelShape.from_config({"model_type": "llama", **config}).head_dim == 16


def test_a_window_that_no_position_exceeds_is_full_attention():
    config = {"model_type": "phi3", **TINY, "sliding_window": 262144, "max_position_embeddings": 131072}
    assert ModelShape.from_config(config).kv_heads == 2


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qwen9'; there are qwen3-0\.6b, "):
        ModelShape.named("qwen9")


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
    assert ideal_speedup(tree, shape) == step_flops(shape, 9, 18, 9) / ours == tree.stats(shape).flop_speedup
    dedup = step_flops(shape, 6, 12, 6) / ours
    assert ideal_speedup(tree, shape, dedup=True) == dedup == tree.stats(shape).flop_speedup_dedup
    assert ideal_speedup(build_tree([[1], []]), shape) == 1


def test_rows_that_share_nothing_gain_nothing():
    assert ideal_speedup(build_tree([[1, 2], [3, 4, 5]]), ModelShape.named("qwen3-8b")) == 1
