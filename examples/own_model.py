"""Tree training of a model of your own, in plain PyTorch: `tt.pack`, `tt.attention`, `tt.prediction_logprobs`.

    python -m examples.own_model --steps 20 --budget 512     # at most 512 tokens are alive at once

The decoder is no Hugging Face model: its attention calls `tt.attention`. Before it trains, the program compares the
gradients with those of one row at a time by PyTorch's own attention.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import treetrain as tt
from examples.countdown.agent import RECORDED, TEMPLATE


class Layer(nn.Module):
    """A decoder layer with rotary positions, grouped queries and perhaps a window."""

    def __init__(self, number: int, width: int, heads: int, groups: int, window: int | None):
        super().__init__()
        self.number, self.window, self.split = number, window, [heads, groups, groups]
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, sum(self.split) * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, angles: Tensor, tree) -> Tensor:
        """[N, width] -> [N, width]; without a tree, x is one row."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (sum(self.split), -1)).split(self.split, dim=1)
        q, k = rotated(q, angles), rotated(k, angles)
        attend = one_row if tree is None else tt.attention
        x = x + self.out(attend(q, k, v, tree, window=self.window, layer=self.number).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Token ids [N] -> hidden states [N, width]; `head` gives the logits."""

    def __init__(self, vocab: int, width: int = 64, heads: int = 4, groups: int = 2, windows: tuple = (None, 64)):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.layers = nn.ModuleList([Layer(n, width, heads, groups, window) for n, window in enumerate(windows)])
        self.norm = nn.RMSNorm(width)
        self.register_buffer("frequencies", 1e4 ** -torch.linspace(0, 1, width // heads // 2))

    def forward(self, input_ids: Tensor, positions: Tensor, tree=None) -> Tensor:
        x, angles = self.embedding(input_ids), positions[:, None, None] * self.frequencies
        for layer in self.layers:
            x = layer(x, angles, tree)
        return self.norm(x)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, size]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def one_row(q: Tensor, k: Tensor, v: Tensor, tree: None, *, window: int | None, layer: int) -> Tensor:
    """Causal attention in a single row: what `tt.attention` takes the place of."""
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = (back >= 0) & (back < (window or len(back)))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def tree_step(model: Decoder, rows: list, weights: list[Tensor], budget: int | None = None) -> Tensor:
    """Forward and backward of minus sum(weight * log-probability) over all rows; returns the loss."""
    packed, weight = tt.pack(rows), torch.cat(weights)

    def loss_of(part) -> Tensor:
        hidden = model(part.input_ids, part.positions, part.tree)
        return -(tt.prediction_logprobs(hidden, model.head, part) * weight[part.predictions]).sum()

    return packed.forward_backward(loss_of, budget)  # or loss_of(packed).backward(), all tokens in one forward


def row_step(model: Decoder, rows: list, weights: list[Tensor]) -> None:
    """The gradients of the same loss, one row at a time."""
    for row, weight in zip(rows, weights):
        ids = torch.as_tensor(row, dtype=torch.int64)
        logits = model.head(model(ids, torch.arange(len(ids))))
        (cross_entropy(logits[:-1], ids[1:], reduction="none") * weight).sum().backward()


def main(steps: int = 20, rows: int = 24, budget: int | None = None) -> list[float]:
    """Compare one step with rows by themselves, then train; returns the loss of every step."""
    torch.manual_seed(0)
    tokenizer = tt.load_tokenizer("tiny")
    found = tt.load(RECORDED, tokenizer=tokenizer, chat_template=TEMPLATE, tools="none", limit=rows).trajectories
    ids, weights = [row.ids for row in found], [torch.as_tensor(row.weights[1:]).float() for row in found]
    weights = [weight / sum(map(torch.sum, weights)) for weight in weights]
    model, gradients, losses = Decoder(vocab=len(tokenizer)), [], []
    for step in row_step, tree_step:
        model.zero_grad()
        step(model, ids, weights)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    print(f"{sum(map(len, ids))} tokens in rows, {tt.pack(ids).num_tokens} in the tree")
    print(f"gradients differ by {float((gradients[0] - gradients[1]).norm() / gradients[0].norm()):.1e}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(tree_step(model, ids, weights, budget)))
        optimizer.step()
    print("losses:", *(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tree training of a model of your own.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", type=int, help="most tokens alive at once")
    main(**vars(parser.parse_args()))
