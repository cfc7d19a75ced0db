"""Nothing of size tokens x tokens or tokens x vocabulary is ever allocated on the fast path."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import treetrain as tt
from support.models import make_model
from treetrain.check.forests import bushy_rows
from treetrain.core.attention.reference import reference_attention
from treetrain.core.tree.token_tree import build_tree

TOKENS = 4000
VOCABULARY = 30_000


class LargestOutput(TorchDispatchMode):
    """Watches every tensor an operation gives, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements, self.name = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            # What is held, not what is shown: an expanded view holds one element.
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            if elements > self.elements:
                self.elements, self.name = elements, f"{func} {tuple(tensor.shape)}"
        return out


def deep_rows() -> list[list[int]]:
    trunk = [i % 36 for i in range(2000)]
    return [[*trunk[: 400 * (i + 1)], 36, *((i + j) % 36 for j in range(400))] for i in range(5)]


def rows_of(shape: str) -> list[list[int]]:
    rng = np.random.default_rng(0)
    if shape == "deep":
        return deep_rows()
    if shape == "bushy":
        return bushy_rows(rng, rows=400, segment=8, levels=6, branch=4)
    if shape == "star":
        return [[*range(30), i % 30, i // 30, *rng.integers(0, 37, 12).tolist()] for i in range(300)]
    return [[i, *rng.integers(0, 37, 99).tolist()] for i in range(37)] + [[5] * 400]


@pytest.fixture(scope="module")
def model():
    # Embedding and head are vocabulary x 8; MAX_ROWS of the head's chunk is far below the tokens.
    small = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    return make_model("qwen3", num_hidden_layers=1, intermediate_size=8, max_position_embeddings=8192, **small)


LOSSES = {
    "sft": tt.losses.sft(),
    "ppo": tt.losses.ppo(entropy=0.01, on_policy=True),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "loss"), [("deep", "sft"), ("bushy", "ppo"), ("star", "sft"), ("unrelated", "ppo")])
def test_nothing_of_tokens_times_tokens_is_allocated(model, shape, loss):
    rows = [tt.Trajectory(ids, advantages=1.0) for ids in rows_of(shape)]
    tokens = build_tree([row.ids for row in rows]).num_tokens
    assert tokens >= 3500
    engine = tt.TreeEngine(model)
    watch = LargestOutput()
    with watch:
        engine.forward_backward(rows, LOSSES[loss])
        tt.logprobs(model, rows)[0].sum().backward()
    # Far below N^2 = 16 million: a quarter leaves no room for a mask per head either.
    assert watch.elements < tokens * tokens / 4, watch.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora_like_head", "loss"),
    [
        (False, "ppo"),
        (True, "sft"),
        (False, "sft"),
        (True, "ppo"),
    ],
)
def test_nothing_of_tokens_times_vocabulary_is_allocated(loss, lora_like_head):
    model = make_model("llama", vocab_size=VOCABULARY, num_hidden_layers=1, hidden_size=8, intermediate_size=8)
    if lora_like_head:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    rows = [tt.Trajectory([1 + i, *range(400)], advantages=1.0) for i in range(5)]
    watch = LargestOutput()
    with watch:
        tt.TreeEngine(model).forward_backward(rows, LOSSES[loss])
        tt.logprobs(model, rows)[0].sum().backward()
    assert watch.elements < 2000 * VOCABULARY / 4, watch.name


def test_the_watch_sees_what_the_reference_allocates():
    ends = torch.arange(1, TOKENS + 1)
    q, k, v = torch.randn(3, 300, 1, 4)
    watch = LargestOutput()
    with watch:
        reference_attention(q, k, v, ends[:300], 1.0)
    assert watch.elements >= 300 * 300
