import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetrain.data.chat import clean_messages, read_tools
from treetrain.data.records import Notes
from treetrain.errors import DataError


def clean(**message):
    return clean_messages([message], Notes())[0]


def with_arguments(arguments):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return clean(role="assistant", content=None, tool_calls=[call])["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("given_arguments", "expected"),
    [
        ('{"a": [1, null]}', {"a": [1, None]}),
        ({"a": 1}, {"a": 1}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("", {}),
        (None, {}),
    ],
)
def test_tool_arguments_become_objects_where_they_are_objects(given_arguments, expected):
    assert with_arguments(given_arguments) == expected


@given(st.text())
def test_no_tool_argument_string_is_refused_or_changed_unless_it_is_an_object(text):
    result = with_arguments(text)
    assert isinstance(result, dict) or result == text


def test_null_fields_are_dropped_and_null_content_is_empty_text():
    message = clean(role="assistant", content=None, refusal=None, audio=None, tool_calls=None, function_call=None)
    assert message == {"role": "assistant", "content": ""}
    assert clean(role="user")["content"] == ""


def test_text_parts_are_joined():
    assert clean(role="user", content=[{"type": "text", "text": "a"}, "b"])["content"] == "ab"


def test_older_and_newer_names_of_roles_and_calls_are_read_and_noted():
    notes = Notes()
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    cleaned = clean_messages(messages, notes)
    assert [m["role"] for m in cleaned] == ["system", "assistant", "tool"]
    assert cleaned[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert len(notes.lines()) == 2


def test_the_users_rows_are_not_changed():
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    clean_messages([message], Notes())
    assert message["content"] is None and call["function"]["arguments"] == "{}"


@pytest.mark.parametrize("text", ["", "3", '{"a": 1}', "[1]", "[broken"])
def test_a_tools_file_that_is_no_list_of_schemas_is_refused(tmp_path, text):
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"tools.json"):
        read_tools(path)
