"""Each cause of lost sharing is planted in clean rows: the diagnosis names it, counts it and predicts the gain."""

from functools import reduce
from itertools import combinations, pairwise

import numpy as np
import pytest

from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.alignment import RUN
from treetrain.logs.inspection.causes import CAUSES
from treetrain.logs.inspection.diagnosis import diagnose
from treetrain.logs.inspection.prepared import Prepared
from treetrain.models.work import linear_work, tree_stats, tree_work
from treetrain.shapes import ModelShape

COUNTS = ModelShape.named("qwen3-0.6b").counts()
PAD, BOS, TURN, END, OPEN, CLOSE, SPACE, JOINED, NAME, QUOTE = range(10)
LETTERS, DATES, IDS = 5900, 6000, 7000
TEXT = {
    PAD: "<pad>", BOS: "<bos>", TURN: "<turn>", END: "<end>", OPEN: "<think>", CLOSE: "</think>", SPACE: " \n",
    NAME: '{"parameters": 0, "name": "', QUOTE: '"}\n',
}  # fmt: skip


class Words:
    """A tokenizer whose token n reads " wn", but for those of `TEXT`.

    JOINED reads as tokens 100 and 101 together, and so do those from LETTERS on, a letter each.
    """

    pad_token_id = PAD

    def decode(self, ids):
        return "".join(self.word(i) for i in np.asarray(ids).tolist())

    def word(self, i):
        if LETTERS <= i < DATES:
            return " w100 w101"[i - LETTERS]
        if i >= DATES:
            return f" 2024-05-{i - DATES:02}" if i < IDS else f" 7f3a9c{i - IDS:04x}"
        return " w100 w101" if i == JOINED else TEXT.get(i, f" w{i}")


def words(seed, count):
    return np.random.default_rng([7, *seed]).integers(102, 5000, count).tolist()


SYSTEM = words((1,), 40)
TOOLS = [[NAME, 10 + tool, *words((9, tool), 30), QUOTE] for tool in range(6)]


def conversations(groups=5, trials=4, turns=4, **changes):
    """The calls of every conversation; `changes` alters how they are written.

    Args:
        system: tokens of the system prompt of a conversation.
        tools: its tools.
        history: how an earlier turn (think tokens, answer) of a call is written.
        result: how the message after an earlier answer is written, so many messages before the last.
        window: how many turns of history a call of a conversation keeps.
    """
    system = changes.get("system", lambda group, trial: SYSTEM)
    tools = changes.get("tools", lambda group, trial: TOOLS)
    history = changes.get("history", lambda think, answer: (think, answer))
    result = changes.get("result", lambda user, age: user)
    window = changes.get("window", lambda call: call)
    rows = []
    for group in range(groups):
        for trial in range(trials):
            prompt = [*system(group, trial), *(token for tool in tools(group, trial) for token in tool)]
            prompt += [*words((2,), 20), END, TURN, *words((3, group), 30), END]
            written = []
            for call in range(turns):
                think = [OPEN, *words((4, group, trial, call), 12), CLOSE]
                answer = [
                    100,
                    101,
                    *words((5, group, trial, call), 10),
                    SPACE,
                    *words((12, group, trial, call), 15),
                    END,
                ]
                context = list(prompt)
                for earlier, (thought, said, user) in enumerate(written[call - window(call) :], call - window(call)):
                    context += [TURN, *(token for part in history(thought, said) for token in part), TURN]
                    context += [*result(user, call - 1 - earlier), END]
                context.append(TURN)
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
                written.append((think, answer, words((6, group, trial, call), 20)))
    return rows


def bos(row):
    return row.replace(ids=[BOS, *row.ids], loss_weights=[0, *row.loss_weights])


def padded(rows):
    width = max(map(len, rows))
    return [
        row.replace(ids=[PAD] * missing + row.ids.tolist(), loss_weights=[0] * missing + row.loss_weights.tolist())
        for row in rows
        for missing in [width - len(row)]
    ]


def shuffled(group, trial, tools):
    return [tools[at] for at in np.random.default_rng([1, group, trial]).permutation(len(tools))]


def inserted(at, varying, *seed):
    """Three tokens in the system prompt at a place, the same in every conversation unless they vary."""

    def change(group, trial, system):
        made = [token + (1 + 4 * group + trial if varying else 0) for token in seed]
        return system[:at] + made + system[at:]

    return change


# Each cause: what it changes (system, tools, history, ...), planted and, where that is not to leave it out, repaired.
PLANTS = {
    "padding": ("rows", padded, None),
    "front": ("rows", lambda rows: [bos(row) if row.episode == 1 else row for row in rows], None),
    "truncation": ("window", lambda call: min(call, 2), None),
    "think": ("history", lambda think, answer: ([], answer), None),
    "rewritten": ("history", lambda think, answer: (think, answer[:-1] + words((8,), 5) + answer[-1:]), None),
    "history": ("result", lambda user, age: user if age == 0 else words((13,), 3), None),
    "retokenised": ("history", lambda think, answer: (think, [JOINED, *answer[2:]]), None),
    "whitespace": ("history", lambda think, answer: (think, [token for token in answer if token != SPACE]), None),
    "order": ("tools", shuffled, None),
    "tool list": ("tools", lambda group, trial, tools: tools if trial else [t for t in tools if t != TOOLS[2]], None),
    "dates": ("system", inserted(22, True, 20, DATES, 21), inserted(22, False, 20, DATES, 21)),
    "ids": ("system", inserted(12, True, 22, IDS, 23), inserted(12, False, 22, IDS, 23)),
    "values": ("system", inserted(32, True, 2000, 3000, 4000), inserted(32, False, 2000, 3000, 4000)),
}  # fmt: skip


def planted(*causes, repaired=()):
    """The conversations with these causes; for a repaired one, as they are without the difference."""
    parts = {"system": [], "tools": [], "history": [], "rows": []}
    changes = {}
    for cause in sorted(causes, key=list(PLANTS).index, reverse=True):
        kind, plant, clean = PLANTS[cause]
        made = clean if cause in repaired else plant
        if made is None:
            continue
        if kind in parts:
            parts[kind].append(made)
        else:
            changes[kind] = made

    def chain(kind, first):
        return lambda group, trial: reduce(lambda made, change: change(group, trial, made), parts[kind], first)

    def history(think, answer):
        for change in parts["history"]:
            think, answer = change(think, answer)
        return think, answer

    rows = conversations(system=chain("system", SYSTEM), tools=chain("tools", TOOLS), history=history, **changes)
    for change in parts["rows"]:
        rows = change(rows)
    return rows


CLEAN = conversations()
LATER, EVERY = 60, 80
LONGEST = max(map(len, CLEAN))
ROWS = {
    "padding": sum(len(row) < LONGEST for row in CLEAN), "front": 20, "truncation": 20, "history": 40,
    "order": EVERY - 4, "tool list": 20, "dates": EVERY - 4, "ids": EVERY - 4, "values": EVERY - 4,
}  # fmt: skip
PLANTED = {cause: (planted(cause), ROWS.get(cause, LATER)) for cause in PLANTS}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_found_alone_counted_and_its_gain_is_the_one_measured_on_clean_rows(cause):
    rows, count = PLANTED[cause]
    found = diagnose(rows, COUNTS, Words())
    (lost,) = found.causes
    assert (lost.cause, lost.rows) == (cause, count)
    tree, clean = build_tree(rows), build_tree(planted(cause, repaired=[cause]))
    assert found.unique == tree.num_tokens and lost.tokens == found.unique - found.repaired_unique
    tokens = tree.num_tokens - clean.num_tokens
    assert lost.tokens == pytest.approx(tokens, rel=0.02) and tokens >= 60
    linear, ours = (COUNTS.flops(*work) for work in (linear_work(tree), tree_work(clean)))
    assert lost.flop_speedup == pytest.approx(linear / ours, rel=0.01) == found.repaired_flop_speedup
    assert found.flop_speedup == pytest.approx(tree_stats(tree, COUNTS).flop_speedup)
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


@pytest.mark.parametrize("cause", ["padding", "front", "truncation", "think", "retokenised", "values"])
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


NEIGHBOURS = set(pairwise(PLANTS))
PAIRS = [pair if pair in NEIGHBOURS else pytest.param(pair, marks=pytest.mark.slow) for pair in combinations(PLANTS, 2)]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_planted_causes_are_both_found_each_with_its_share(pair):
    rows = planted(*pair)
    found = diagnose(rows, COUNTS, Words())
    assert sorted(lost.cause for lost in found.causes) == sorted(pair)
    unique = [found.unique, build_tree(planted(*pair, repaired=[found.causes[0].cause])).num_tokens]
    unique.append(build_tree(planted(*pair, repaired=pair)).num_tokens)
    for lost, before, after in zip(found.causes, unique, unique[1:]):
        assert lost.tokens == pytest.approx(before - after, rel=0.1, abs=8)
    assert sum(lost.tokens for lost in found.causes) == found.unique - found.repaired_unique
    speedups = [found.flop_speedup, *(lost.flop_speedup for lost in found.causes)]
    assert all(before < 1.01 * after for before, after in pairwise(speedups))


def test_text_that_is_tokenised_again_just_before_a_change_has_its_own_share():
    letters = range(LETTERS, LETTERS + 10)

    def changed(answer):
        return [answer[2], 5001, *answer[4:]]

    both = conversations(history=lambda think, answer: (think, [*letters, *changed(answer)]))
    one = conversations(history=lambda think, answer: (think, [*answer[:2], *changed(answer)]))
    first, second = diagnose(both, COUNTS, Words()).causes
    assert (first.cause, second.cause) == ("retokenised", "rewritten")
    assert first.tokens == build_tree(both).num_tokens - build_tree(one).num_tokens > 0
    assert second.tokens == build_tree(one).num_tokens - build_tree(CLEAN).num_tokens


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
    assert found.repaired_unique == build_tree(CLEAN).num_tokens


def masked(context, answer, **facts):
    return Trajectory(context + answer, loss_weights=[0] * len(context) + [1] * len(answer), **facts)


@pytest.mark.parametrize("named", [True, False])
def test_sub_agents_with_a_system_prompt_of_their_own_are_no_value_that_varies(named):
    tools, rows = [token for tool in TOOLS for token in tool], []
    for group in range(6):
        facts = {"group": group, "episode": 0} if named else {}
        main = [*words((50,), 10), 200, *words((51,), 5), *tools, END, TURN, *words((52, group), 20), END, TURN]
        said = [*words((53, group), 15), END]
        rows.append(masked(main, said, **facts))
        for agent in range(2):
            task = [END, TURN, *words((54, group, agent), 20), END, TURN]
            own = [*words((50,), 10), 201 + agent * named, *words((51,), 5), *tools, *task]
            rows.append(masked(own, [*words((55, group, agent), 15), END], **facts))
        rows.append(
            masked([*main, *said, TURN, *words((56, group), 30), END, TURN], [*words((57, group), 15), END], **facts)
        )
    found = diagnose(rows, COUNTS, Words())
    assert not named or (found.unrelated, found.causes) == (12, ())
    assert found.broken == 12 * named


def test_swapped_results_of_parallel_tools_are_rewritten_history_and_no_order_of_tools():
    rows = []
    for group in range(6):
        results = [[TURN, *words((60, group, tool), 20), END] for tool in range(2)]
        prompt = [*SYSTEM, *(token for tool in TOOLS for token in tool), END, TURN, *words((61, group), 20), END]
        call, said = [TURN, *words((62, group), 20), END], [*words((63, group), 40), END]
        first = [*prompt, *call, *results[0], *results[1], TURN]
        second = [*prompt, *call, *results[1], *results[0], TURN, *said, TURN, *words((64, group), 9), END, TURN]
        rows += [masked(first, said, group=group, episode=0)]
        rows += [masked(second, [*words((65, group), 9), END], group=group, episode=0)]
    (lost,) = diagnose(rows, COUNTS, Words()).causes
    assert (lost.cause, lost.rows) == ("history", 6)


def test_interleaved_calls_without_episodes_are_linked_by_their_answers_or_asked_for():
    rows = [row for call in range(4) for trial in range(4) for row in planted("think")[4 * trial + call : 16 : 16]]
    plain = [row.replace(episode=None, group=None) for row in rows]
    found = diagnose(plain, COUNTS, Words())
    assert [(lost.cause, lost.rows) for lost in found.causes] == [("think", 12)] and found.unclear == 0
    # Without the first calls of three conversations, nobody knows what their second calls continue.
    found = diagnose([row for row in plain if row.id not in ("0/1/0", "0/2/0", "0/3/0")], COUNTS, Words())
    assert found.unclear == 3 and "--map episode=KEY" in found.explain()
    assert [(lost.cause, lost.rows) for lost in found.causes] == [("think", 9)]


def test_a_cause_that_gains_nothing_is_none():
    drawn = np.random.default_rng(0)
    rows = [Trajectory(drawn.integers(0, 9, 2)) for _ in range(2000)]
    assert diagnose(rows, COUNTS, Words()).causes == ()


@pytest.mark.parametrize("other", ["order", "tool list", "history", "front"])
def test_rows_cut_off_inside_their_tools_are_told_apart_from_another_cause(other):
    def cut(rows):
        return [row.replace(ids=row.ids[-420:], loss_weights=row.loss_weights[-420:]) for row in rows]

    rows = [bos(row) if row.episode == 1 else row for row in cut(CLEAN)] if other == "front" else cut(planted(other))
    assert any(len(row) < 420 for row in rows) and sum(len(row) >= 420 for row in rows) >= 20
    found = diagnose(rows, COUNTS, Words())
    assert sorted(lost.cause for lost in found.causes) == sorted(["truncation", other])
    assert found.repaired_unique == pytest.approx(build_tree(CLEAN).num_tokens, rel=0.1)


def test_rows_too_short_to_agree_behind_a_difference_are_not_compared():
    short = [Trajectory([number, 1, 2]) for number in range(50)]
    rows = [*short[:20], *PLANTED["think"][0], *short[20:]]
    prepared = Prepared(rows, Words())
    assert prepared.numbers == list(range(20, 100)) and Prepared(short, Words()).rows == []
    (lost,) = diagnose(rows, COUNTS, Words()).causes
    assert (lost.cause, lost.rows, lost.row) == ("think", LATER, "0/0/1")


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
