"""Each cause of lost sharing is planted in clean rows: the diagnosis names it, counts it and predicts the gain."""

from itertools import pairwise

import numpy as np
import pytest

from treetrain.data.trajectory import Trajectory
from treetrain.inspection.diagnosis import CAUSES, RUN, diagnose
from treetrain.planning.cost import ModelShape
from treetrain.tree.build import build_tree
from treetrain.tree.stats import linear_work, tree_stats, tree_work

COUNTS = ModelShape.named("qwen3-0.6b").counts()
PAD, BOS, TURN, END, OPEN, CLOSE, SPACE, JOINED, NAME, QUOTE = range(10)
TEXT = {
    PAD: "<pad>", BOS: "<bos>", TURN: "<turn>", END: "<end>", OPEN: "<think>", CLOSE: "</think>", SPACE: " \n",
    NAME: '{"parameters": 0, "name": "', QUOTE: '"}',
}  # fmt: skip


class Words:
    """A tokenizer whose token n reads " wn", but for those of `TEXT`; JOINED reads as tokens 100 and 101 together."""

    pad_token_id = PAD

    def decode(self, ids):
        return "".join(" w100 w101" if i == JOINED else TEXT.get(i, f" w{i}") for i in np.asarray(ids).tolist())


def words(seed, count):
    return np.random.default_rng([7, *seed]).integers(102, 5000, count).tolist()


TOOLS = [[NAME, 10 + tool, QUOTE, *words((9, tool), 30)] for tool in range(6)]


def conversations(groups=5, trials=4, turns=4, **changes):
    """The calls of every conversation; `changes` alters how they are written.

    Args:
        system: tokens of the system prompt of a conversation.
        history: how an earlier turn (think tokens, answer) of a call is written.
        window: how many turns of history a call of a conversation keeps.
    """
    system = changes.get("system", lambda group, trial: words((1,), 40))
    tools = changes.get("tools", lambda group, trial: TOOLS)
    history = changes.get("history", lambda think, answer: think + answer)
    window = changes.get("window", lambda call: call)
    rows = []
    for group in range(groups):
        for trial in range(trials):
            prompt = [*system(group, trial), *(token for tool in tools(group, trial) for token in tool)]
            prompt += [*words((2,), 20), END, TURN, *words((3, group), 30), END]
            written = []
            for call in range(turns):
                think = [OPEN, *words((4, group, trial, call), 12), CLOSE]
                answer = [100, 101, *words((5, group, trial, call), 25), SPACE, END]
                context = prompt + [token for turn in written[call - window(call) :] for token in turn] + [TURN]
                sampled = think + answer
                rows.append(
                    Trajectory(
                        context + sampled,
                        loss_weights=[0] * len(context) + [1] * len(sampled),
                        group=group,
                        episode=trial,
                        id=f"{group}/{trial}/{call}",
                    )
                )
                user = [TURN, *words((6, group, trial, call), 20), END]
                written.append([TURN, *history(think, answer), *user])
    return rows


def bos(row):
    return row.replace(ids=[BOS, *row.ids], loss_weights=[0, *row.loss_weights])


def padded(row, width):
    missing = width - len(row)
    return row.replace(ids=[PAD] * missing + row.ids.tolist(), loss_weights=[0] * missing + row.loss_weights.tolist())


CLEAN = conversations()
LONGEST = max(map(len, CLEAN))
LATER = 60
EVERY = 80


def shuffled(group, trial):
    return [TOOLS[at] for at in np.random.default_rng([1, group, trial]).permutation(len(TOOLS))]


PLANTED = {
    "padding": ([padded(row, LONGEST) for row in CLEAN], sum(len(row) < LONGEST for row in CLEAN)),
    "front": ([bos(row) if row.episode == 1 else row for row in CLEAN], 20),
    "truncation": (conversations(turns=6, window=lambda call: min(call, 2)), 3 * 20),
    "think": (conversations(history=lambda think, answer: answer), LATER),
    "rewritten": (
        conversations(history=lambda think, answer: think + answer[:-2] + words((8,), 5) + answer[-2:]),
        LATER,
    ),
    "retokenised": (conversations(history=lambda think, answer: [*think, JOINED, *answer[2:]]), LATER),
    "whitespace": (conversations(history=lambda think, answer: think + answer[:-2] + answer[-1:]), LATER),
    "order": (conversations(tools=shuffled), EVERY - 4),
    "tool list": (conversations(tools=lambda group, trial: TOOLS if trial else TOOLS[:2] + TOOLS[3:]), 20),
    "values": (
        conversations(system=lambda group, trial: words((1,), 40)[:30] + words((group, trial, 11), 3)),
        EVERY - 4,
    ),
}  # fmt: skip
CLEAN_OF = {
    "truncation": conversations(turns=6),
    "values": conversations(system=lambda group, trial: words((1,), 40)[:30] + words((0, 0, 11), 3)),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_found_alone_counted_and_its_gain_is_the_one_measured_on_clean_rows(cause):
    rows, count = PLANTED[cause]
    found = diagnose(rows, COUNTS, Words())
    (lost,) = found.causes
    assert (lost.cause, lost.rows) == (cause, count)
    planted, clean = build_tree(rows), build_tree(CLEAN_OF.get(cause, CLEAN))
    assert found.unique == planted.num_tokens and lost.tokens == found.unique - found.repaired_unique
    tokens = planted.num_tokens - clean.num_tokens
    assert lost.tokens == pytest.approx(tokens, rel=0.02) and tokens >= 60
    linear, ours = (COUNTS.flops(*work) for work in (linear_work(planted), tree_work(clean)))
    assert lost.flop_speedup == pytest.approx(linear / ours, rel=0.01) == found.repaired_flop_speedup
    assert found.flop_speedup == pytest.approx(tree_stats(planted, COUNTS).flop_speedup)
    assert lost.title in found.explain() and lost.change in found.explain()
    assert "⟦" in lost.row_text and lost.row_text != lost.partner_text


@pytest.mark.parametrize("tokenizer", [Words(), None], ids=["text", "ids"])
def test_nothing_is_reported_where_nothing_is_lost(tokenizer):
    for rows in (
        CLEAN,
        [row.replace(episode=None) for row in CLEAN],
        [row.replace(episode=None, group=None) for row in CLEAN],
        [row.replace(episode=None, loss_weights=None) for row in CLEAN],
        CLEAN[::-1],
        CLEAN[:1],
        [],
    ):
        found = diagnose(rows, COUNTS, tokenizer)
        assert found.causes == () and found.repaired_unique == found.unique and "No sharing is lost" in found.explain()


SEEN = {"think": "changed", "retokenised": "changed"}


@pytest.mark.parametrize("cause", ["padding", "front", "truncation", "think", "retokenised", "values", "order"])
def test_token_ids_alone_show_what_is_lost_too(cause):
    rows, count = PLANTED[cause]
    with_text, without = (diagnose(rows, COUNTS, tokenizer) for tokenizer in (Words(), None))
    (lost,) = without.causes
    assert (lost.cause, lost.rows) == (
        SEEN.get(cause, cause),
        count,
    ) and without.repaired_unique == with_text.repaired_unique


@pytest.mark.parametrize("cause", ["think", "retokenised", "truncation"])
def test_calls_are_recognised_without_episodes_and_groups(cause):
    rows, count = PLANTED[cause]
    plain = [row.replace(episode=None, group=None) for row in rows]
    found, known = diagnose(plain, COUNTS, Words()), diagnose(rows, COUNTS, Words())
    assert [(lost.cause, lost.rows) for lost in found.causes] == [(cause, count)]
    assert found.repaired_unique == known.repaired_unique and found.broken == known.broken == count


def test_several_causes_are_repaired_from_the_front_and_their_costs_add_up():
    rows = conversations(
        system=lambda group, trial: words((1,), 40)[:30] + words((group, trial, 11), 3),
        history=lambda think, answer: answer[:-2] + answer[-1:],
    )
    rows = [padded(row, LONGEST) for row in rows]
    found = diagnose(rows, COUNTS, Words())
    assert [lost.cause for lost in found.causes] == ["padding", "values", "think", "whitespace"]
    assert sum(lost.tokens for lost in found.causes) == found.unique - found.repaired_unique
    assert found.repaired_unique == build_tree(CLEAN_OF["values"]).num_tokens
    speedups = [found.flop_speedup, *(lost.flop_speedup for lost in found.causes)]
    assert all(before < 1.01 * after for before, after in pairwise(speedups))


def test_sampled_answers_that_differ_are_no_loss_however_much_they_agree_later():
    same = words((20,), 60)
    rows = [
        Trajectory([1, 2, 3, 4, *words((21, k), 2), *same], loss_weights=[0] * 4 + [1] * 62, group="g")
        for k in range(8)
    ]
    assert diagnose(rows, COUNTS).causes == ()


def test_a_sub_agent_starts_a_new_context_and_its_caller_goes_on_from_its_own_last_call():
    calls = conversations(1, 1, 3)
    agent = calls[0].replace(ids=words((30,), 200), loss_weights=[0] * 150 + [1] * 50)
    found = diagnose([calls[0], agent, *calls[1:]], COUNTS, Words())
    assert (found.successive, found.broken, found.unrelated) == (3, 1, 1) and found.causes == ()


def test_a_call_with_a_token_in_front_is_compared_with_the_call_before_it_not_with_an_older_one_that_has_it_too():
    rows = [bos(row) if number % 3 else row for number, row in enumerate(PLANTED["think"][0])]
    found = diagnose(rows, COUNTS, Words())
    assert [lost.cause for lost in found.causes] == ["front", "think"]
    assert found.repaired_unique == build_tree(CLEAN).num_tokens + 1  # now all begin with the token


def test_different_questions_that_agree_in_some_words_are_no_loss():
    phrase = words((40,), 2 * RUN)
    rows = []
    for group in range(8):
        prompt = [*words((1,), 40), *words((41, group), 30), *phrase, *words((42, group), 10)]
        rows.append(Trajectory(prompt + words((43, group), 20), loss_weights=[0] * len(prompt) + [1] * 20))
    assert diagnose(rows, COUNTS, Words()).causes == diagnose(rows, COUNTS).causes == ()


def test_rows_of_different_keys_are_never_compared():
    rows = [row.replace(key=row.episode) for row in PLANTED["values"][0]]
    assert {lost.rows for lost in diagnose(rows, COUNTS, Words()).causes} == {
        64
    }  # the four calls of one conversation less for each of four keys


def test_every_cause_has_a_name_and_a_change():
    assert set(PLANTED) | {"changed"} == set(CAUSES)
