"""What looks like lost sharing and is none, and causes that the text of a prompt shows; a token is a letter."""

import json

import numpy as np
import pytest

from treetrain.core.tree.token_tree import build_tree
from treetrain.layers.trajectory import Trajectory
from treetrain.logs.inspection.diagnosis import diagnose
from treetrain.logs.load import load
from treetrain.models.loading import load_tokenizer
from treetrain.shapes import ModelShape

COUNTS = ModelShape.named("qwen3-0.6b").counts()
BOS, END = "\x01", "\x02"
TREES = [
    "oak",
    "ash",
    "elm",
    "fir",
    "yew",
    "pine",
    "larch",
    "maple",
    "rowan",
    "birch",
    "hazel",
    "alder",
    "cedar",
    "lime",
]


class Letters:
    """A tokenizer whose token n is the letter n."""

    def __init__(self, pad: str | None = None) -> None:
        self.pad_token_id = None if pad is None else ord(pad)

    def decode(self, ids):
        return "".join(map(chr, np.asarray(ids).tolist()))


def words(*seed, count=20):
    return " ".join(np.random.default_rng(seed).choice(TREES, count))


def row(*messages, **facts):
    """A row of messages, of which the last is trained."""
    *context, answer = (f"\n{message}{END}" for message in messages)
    ids, trained = (list(map(ord, text)) for text in ("".join(context), answer))
    return Trajectory(ids + trained, loss_weights=[0] * len(ids) + [1] * len(trained), **facts)


def found(rows, pad=None):
    return diagnose(rows, COUNTS, Letters(pad))


def causes(rows, pad=None):
    return [lost.cause for lost in found(rows, pad).causes]


SYSTEM = "You keep a calendar. " + words(1, count=60)
DONE = "It is added to your calendar as you asked."


@pytest.mark.parametrize("greeting", [(), ("Hello", "Hello, how can I help you today with your calendar?")])
def test_customers_who_share_a_short_answer_are_no_rewritten_history(greeting):
    rows = []
    for customer in range(5):
        said = [SYSTEM, *greeting]
        for turn in range(customer + 1):
            said += [f"Hey, could you add {words(2, customer, turn)}?", DONE]
        rows.append(row(*said))
    assert causes(rows) == []


def test_answers_that_only_begin_alike_are_not_written_differently():
    rows = []
    for trial in range(4):
        said = [SYSTEM, words(3), f"I will look for {words(4, trial)}", words(5, trial), words(6, trial)]
        rows.append(row(*said[: 3 if trial % 2 == 0 else 5]))
    assert causes(rows) == []


def test_a_result_that_is_cleared_is_rewritten_history_without_episodes_too():
    rows = []
    for group in range(4):
        said = [SYSTEM, words(7, group), words(8, group), words(9, group, count=80), words(10, group)]
        rows += [row(*said), row(*said[:3], "(cleared)", said[4], words(11, group), words(12, group))]
    assert causes(rows) == ["history"]


def tool(name, order=("type", "function"), inner=("name", "description", "parameters")):
    inside = {"name": name, "description": words(20, len(name)), "parameters": {"type": "object", "properties": {}}}
    schema = {"type": "function", "function": {key: inside[key] for key in inner}}
    return json.dumps({key: schema[key] for key in order})


ORDERS = [
    {},
    {"order": ("function", "type")},
    {"inner": ("parameters", "name", "description")},
    {"order": ("function", "type"), "inner": ("description", "parameters", "name")},
]


@pytest.mark.parametrize("orders", [2, 4])
def test_tool_schemas_with_their_keys_in_several_orders_are_tools_in_another_order(orders):
    def rows(written):
        found = []
        for number in range(8):
            tools = "\n".join(tool(name, **written[number % len(written)]) for name in ("find", "fetch", "delete"))
            found.append(row(f"{SYSTEM}\n{tools}\nThat is all.", words(21, number // 4), words(22, number)))
        return found

    planted, clean = rows(ORDERS[:orders]), build_tree(rows(ORDERS[:1])).num_tokens
    (lost,) = found(planted).causes
    assert lost.cause == "order" and "keys" in lost.title and lost.rows == 8 - 8 // orders
    assert found(planted).repaired_unique == pytest.approx(clean, rel=0.02)


@pytest.mark.parametrize("pad", [None, BOS])
def test_a_doubled_first_token_is_one_token_at_the_front_even_if_it_pads(pad):
    rows = [row(SYSTEM, words(30, number // 4), words(31, number)) for number in range(8)]
    clean = [each.replace(ids=[ord(BOS), *each.ids], loss_weights=[0, *each.weights]) for each in rows]
    doubled = [each.replace(ids=[ord(BOS), *each.ids], loss_weights=[0, *each.weights]) for each in clean]
    seen = found([*doubled[:3], *clean[3:]], pad)
    (lost,) = seen.causes
    assert (lost.cause, lost.rows) == ("front", 3)
    assert seen.repaired_unique == build_tree(clean).num_tokens
    assert causes(doubled, pad) == causes(clean, pad) == []


CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Bern", "days": 3}}\n</tool_call>'
SAID = "I look for the weather in that city:"


@pytest.mark.parametrize("episode", [0, None])
@pytest.mark.parametrize(
    ("sampled", "written", "cause"),
    [
        (f"{SAID}\n\n{CALL}", f"{SAID}\n{CALL}", "whitespace"),
        (f"\n\n{CALL}", CALL, "whitespace"),
        (f"{CALL}\n\n{CALL}", f"{CALL}\n{CALL}", "whitespace"),
        (f"{SAID}  {CALL[12:]}", f"{SAID} {CALL[12:]}", "whitespace"),
        (CALL, CALL.replace(": ", ":"), "history"),
        (CALL, CALL.replace('": {', '":  {'), "history"),
    ],
)
def test_white_space_in_front_of_a_call_is_told_from_arguments_that_are_written_anew(sampled, written, cause, episode):
    rows = []
    for group in range(4):
        facts = {"group": group, "episode": episode}
        rows.append(row(SYSTEM, words(40, group), sampled, **facts))
        rows.append(row(SYSTEM, words(40, group), written, words(41, group), words(42, group), **facts))
    assert causes(rows) == [cause]


@pytest.mark.parametrize(
    "clock", ["14:05:{:02}", "2026-11-27T14:05:{:02}.250Z", "{} pm", "{}:30 PM", "14h{:02}", "{} o'clock"]
)
def test_a_time_of_day_in_the_prompt_is_a_time(clock):
    rows = [
        row(
            f"You help. It is {clock.format(10 + number)}. {words(50, count=80)}", words(51), words(52, number), group=0
        )
        for number in range(6)
    ]
    assert causes(rows) == ["dates"]


def test_different_tools_of_different_agents_are_by_nature():
    def rows(*agents):
        found = []
        for number in range(8):
            name, names = agents[number % 2]
            tools = "\n".join(map(tool, names))
            prompt = f"You are the {name} of a parcel service.\n{tools}\n{words(60, count=80)}"
            found.append(row(prompt, words(61, number), words(62, number)))
        return found

    planner, coder = ("planner", ["plan", "split", "order"]), ("coder", ["open", "write", "run"])
    assert causes(rows(planner, coder)) == []
    assert "tool list" in causes(rows(planner, ("planner", planner[1][:2])))


def test_repairs_that_make_sharing_worse_are_not_counted_and_the_reported_costs_add_up():
    for seed in range(60):
        drawn = np.random.default_rng([70, seed])
        blocks = drawn.integers(0, 50, (3, 40))
        rows = []
        for _ in range(int(drawn.integers(3, 12))):
            ids = []
            for block in blocks:
                ids += [*drawn.integers(0, 50, drawn.integers(0, 4)), *block[: drawn.integers(10, 40)]]
            rows.append(Trajectory([*ids, 99], loss_weights=[0] * len(ids) + [1], group=int(drawn.integers(0, 2))))
        seen = diagnose(rows, COUNTS)
        assert seen.repaired_unique <= seen.unique and seen.repaired_flop_speedup >= seen.flop_speedup
        assert sum(lost.tokens for lost in seen.causes) == seen.unique - seen.repaired_unique


@pytest.fixture
def faults(shared_data):
    """Small logs in the shared data."""
    return shared_data / "log_faults"


def logged(path, faults):
    tokenizer = load_tokenizer(str(faults.parent / "tokenizer-qwen3"))
    rows = load(path, tokenizer=tokenizer, chat_template="chatml", view="calls").trajectories
    return diagnose(rows, COUNTS, tokenizer)


def test_the_log_of_different_customers_has_no_cause(faults):
    assert logged(faults / "d1_false_history.jsonl", faults).causes == ()


def test_the_log_with_tool_keys_in_two_orders_names_them_and_what_sorting_saves(faults, tmp_path):
    seen = logged(faults / "d2_tool_keys.jsonl", faults)
    assert [lost.cause for lost in seen.causes] == ["order"]
    # The first record has the order that most have, and the others are written in it.
    records = [json.loads(line) for line in (faults / "d2_tool_keys.jsonl").read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["request"]["tools"] = records[0]["request"]["tools"]
    (tmp_path / "one_order.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    repaired = logged(tmp_path / "one_order.jsonl", faults)
    assert repaired.causes == () and repaired.unique < 0.6 * seen.unique
    assert seen.repaired_unique == pytest.approx(repaired.unique, rel=0.02)
