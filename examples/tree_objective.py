"""Process rewards on a tree of samples: every step of the search is trained once, on the value of its outcomes.

    python -m examples.tree_objective --iterations 12

The model continues a prompt in several ways, each of these in several ways again, and so on. The value of a step is the
mean reward of the answers below it. Its advantage is its value relative to the prompt and to the step before it, as in
TreeRL (arXiv 2506.11902, section 3.3). A step shared by nine answers is one decision of the policy, so its tokens have
their loss weight in one of the nine rows, and do not count nine times as in a loss over answers.
"""

import argparse

import torch

import treetrain as tt

WANTED = 400
"""The environment is a toy: the reward of an answer is the share of its tokens whose id is below this."""


def grow(model, prompt: list[int], branches: int, depth: int, tokens: int) -> tuple[list[list[int]], list[int]]:
    """Sample a tree. Returns the token ids and the parent number (-1 at roots) of its nodes, level by level."""
    ids, parents, ends, level = [prompt], [-1], torch.tensor([prompt]), [0]
    for _ in range(depth):
        # All paths of a level have the same length, so nothing is padded.
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "top_k": 0}
        ends = model.generate(ends, num_return_sequences=branches, **options)
        parents += [node for node in level for _ in range(branches)]
        ids += ends[:, -tokens:].tolist()
        level = list(range(len(ids) - len(ends), len(ids)))
    return ids, parents


def advantages_of(ids: list[list[int]], parents: list[int]) -> tuple[list[float], list[int], float]:
    """The advantage of every node, the numbers of the leaves, and the mean reward."""
    leaves = sorted(set(range(len(ids))) - set(parents))
    below: list[list[float]] = [[] for _ in ids]
    for leaf in leaves:
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        answer = [token for inner in path if parents[inner] >= 0 for token in ids[inner]]
        reward = sum(token < WANTED for token in answer) / len(answer)
        for node in path:
            below[node].append(reward)
    value = [sum(rewards) / len(rewards) for rewards in below]
    gains = [2 * value[n] - value[0] - value[parents[n]] if parents[n] >= 0 else 0.0 for n in range(len(ids))]
    return gains, leaves, value[0]


def rows_of(ids: list[list[int]], parents: list[int], gains: list[float], leaves: list[int]) -> list[tt.Trajectory]:
    """A row for every leaf, with the advantages of its nodes. A node has its loss weight in the first row through it.

    `count="once"` would compare tokens. Here every node is a decision, also where two begin with the same tokens.
    """
    rows, counted = [], {0}  # the prompt is not trained
    for leaf in leaves:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        rows.append(
            tt.Trajectory(
                [token for node in path for token in ids[node]],
                loss_weights=[float(node not in counted) for node in path for _ in ids[node]],
                advantages=[gains[node] for node in path for _ in ids[node]],
            )
        )
        counted.update(path)
    return rows


def main(
    iterations: int = 12, branches: int = 3, depth: int = 3, tokens: int = 8, lr: float = 6e-3, seed: int = 0
) -> list[dict[str, float]]:
    """Sample and update; returns reward and counts of every iteration."""
    torch.manual_seed(seed)
    model, tokenizer = tt.load_model("tiny", seed=seed), tt.load_tokenizer("tiny")
    prompt = tokenizer("Solve it step by step.")["input_ids"]
    engine = tt.TreeEngine(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    loss_fn = tt.losses.reinforce()  # one update per tree, so the policy is still the one that sampled it

    history = []
    for iteration in range(iterations):
        ids, parents = grow(model, prompt, branches, depth, tokens)
        gains, leaves, reward = advantages_of(ids, parents)
        rows = rows_of(ids, parents, gains, leaves)
        result = engine.forward_backward(rows, loss_fn)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counted = tt.stats(rows).trained_flat
        history.append({"reward": reward, "loss": result.loss, "trained": counted, "flat": result.flat_tokens})
        print(
            f"iteration {iteration}: reward {reward:.3f}, {counted} tokens trained of {result.flat_tokens} in all rows"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Process rewards on a tree of samples, every step trained once.")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--branches", type=int, default=3, help="continuations of every step")
    parser.add_argument("--depth", type=int, default=3, help="steps of an answer")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
