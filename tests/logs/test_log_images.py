"""Images of logs: a processor prepares those that a record holds; none is dropped, and none is fetched."""

import base64
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import treetrain as tt
from support.models import needs_transformers
from treetrain.layers.images.image_rows import tree_images
from treetrain.logs.log_images import _placeholder

needs_transformers("5.16", "processors have other classes")
sys.path.append(str(Path(__file__).parents[1] / "trainers"))
from test_rows_with_images import PAD, picture, processor  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
"""As Qwen's."""
CAT, DOG = picture(1), picture(2)  # 4 tokens, and 2


def checkpoint() -> Any:
    """A processor with a chat template."""
    made = processor()
    made.chat_template = made.tokenizer.chat_template = TEMPLATE
    return made


def png(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "png")
    return base64.b64encode(data.getvalue()).decode()


URL = f"data:image/png;base64,{png(CAT)}"
PARTS: dict[str, Any] = {
    "OpenAI's chat": {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    "OpenAI's responses": {"type": "input_image", "image_url": URL},
    "Anthropic's": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png(CAT)}},
    "Google's": {"inlineData": {"mimeType": "image/png", "data": png(CAT)}},
    "Bedrock's": {"image": {"format": "png", "source": {"bytes": base64.b64decode(png(CAT))}}},
    "OpenTelemetry's": {"type": "blob", "modality": "image", "mime_type": "image/png", "content": png(CAT)},
    "a picture": {"type": "image", "image": CAT},
    "a file of a data set": {"type": "image", "image": {"bytes": base64.b64decode(png(CAT)), "path": None}},
}


def asked(*content: Any, answer: str = "w1 w2") -> list[dict[str, Any]]:
    """A question and its answer."""
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": answer}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def own(messages: list[dict[str, Any]], images: list[Image.Image]) -> dict[str, Any]:
    """What the processor makes of messages itself."""
    made = checkpoint()
    clean = [
        {
            "role": one["role"],
            "content": [part if part["type"] == "text" else {"type": "image"} for part in one["content"]],
        }
        if isinstance(one["content"], list)
        else one
        for one in messages
    ]
    return dict(made(text=[made.apply_chat_template(clean)], images=[images], return_tensors="np"))


def check(row: tt.Trajectory, expected: dict[str, Any]) -> None:
    assert row.ids.tolist() == expected["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        np.testing.assert_array_equal(np.concatenate([one.inputs[name] for one in row.images]), expected[name])


@pytest.mark.parametrize("kind", PARTS)
def test_an_image_of_any_api_is_prepared_as_the_processor_does(kind):
    (row,) = tt.from_messages([asked(text("w3"), PARTS[kind], text("w4"))], tokenizer=checkpoint()).trajectories
    check(row, own(asked(text("w3"), {"type": "image"}, text("w4")), [CAT]))
    assert row.image_token == PAD and row.loss_weights is not None
    assert not row.loss_weights[row.ids >= PAD].any() and row.loss_weights.sum() >= 2


def test_images_listed_beside_messages_take_their_places_in_order():
    place = {"type": "image"}
    messages = asked(text("w3"), place, text("w4"), place)
    (row,) = tt.from_messages([{"messages": messages, "images": [CAT, DOG]}], tokenizer=checkpoint()).trajectories
    check(row, own(messages, [CAT, DOG]))
    first = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w1 w2"}]
    (row,) = tt.from_messages([{"messages": first, "images": [CAT, DOG]}], tokenizer=checkpoint()).trajectories
    check(row, own(asked(place, place, text("w3")), [CAT, DOG]))  # as TRL places them
    data = {"prompt": first[:1], "completion": first[1:], "image": CAT}
    (row,) = tt.from_messages([data], tokenizer=checkpoint()).trajectories
    check(row, own(asked(place, text("w3")), [CAT]))


def test_each_call_has_the_images_before_its_answer_and_equal_images_are_one():
    talk = [
        *asked(text("w3"), PARTS["OpenAI's chat"]),
        *asked(text("w4"), {"type": "image", "image": DOG}, answer="w5"),
        *asked(text("w6"), answer="w7"),
    ]
    other = asked(text("w3"), PARTS["a picture"], answer="w8")
    rows = tt.from_messages([talk, other], tokenizer=checkpoint(), view="calls").trajectories
    assert [len(row.images) for row in rows] == [1, 2, 2, 1]
    assert rows[0].images[0] is rows[3].images[0]
    tree = tt.build_tree(rows)
    images = tree_images(tree)
    assert images is not None and len(images.distinct) == 2
    check(rows[2], own(talk, [CAT, DOG]) | {"input_ids": rows[2].ids[None]})


def test_files_of_conversations_with_images_are_loaded(write_rows):
    path = write_rows({"messages": asked(PARTS["Anthropic's"], text("w3"))}, name="images")
    (row,) = tt.load(path, tokenizer=checkpoint()).trajectories
    check(row, own(asked({"type": "image"}, text("w3")), [CAT]))
    (row,) = tt.load(path, tokenizer=checkpoint(), images="key").trajectories
    assert row.images == () and row.key is not None


REFUSED: dict[str, tuple[Any, str]] = {
    "a link": ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, "not downloaded.*data: URL"),
    "a link of Anthropic's": (
        {"type": "image", "source": {"type": "url", "url": "http://example.com/cat.png"}},
        "not downloaded",
    ),
    "a file's id": ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "without its content.*file_id"),
    "a path": ({"type": "image", "image": "pictures/cat.png"}, "neither a data: URL nor base64"),
    "no image": ({"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="}, "the image cannot be read"),
    "no list": ({"type": "image"}, "has no more of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_images_that_are_not_in_the_record_are_refused_by_name(case):
    part, message = REFUSED[case]
    with pytest.raises(tt.DataError, match=rf"message 0: content part 1.*{message}"):
        tt.from_messages([asked(text("w3"), part)], tokenizer=checkpoint())


def test_images_without_a_place_or_a_reader_are_refused_by_name():
    messages = asked({"type": "image"}, text("w3"))
    with pytest.raises(tt.DataError, match="lists 2 images, and its messages have places for 1"):
        tt.from_messages([{"messages": messages, "images": [CAT, DOG]}], tokenizer=checkpoint())
    with pytest.raises(tt.DataError, match="a processor as the tokenizer prepares images"):
        tt.from_messages([asked(PARTS["a picture"])], tokenizer=checkpoint().tokenizer)
    with pytest.raises(tt.DataError, match="an assistant message has an image"):
        said = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": [PARTS["a picture"], text("w1")]}]
        tt.from_messages([said], tokenizer=checkpoint())
    with pytest.raises(tt.DataError, match="'video' in `multi_modal_data`; only images"):
        rows = [{"messages": asked(text("w3")), "multi_modal_data": {"video": [1]}}]
        tt.from_messages(rows, tokenizer=checkpoint())
    with pytest.raises(tt.DataError, match="a processor as the tokenizer prepares in conversations"):
        tt.from_messages([{"input_ids": [3, PAD], "images": [CAT]}], tokenizer=checkpoint())


def test_a_template_that_moves_images_is_refused():
    class Moves:
        def render(self, messages: Any, _tools: None) -> str:
            content = messages[0]["content"]
            parts = [text(content)] if isinstance(content, str) else content
            images = "<image>" * sum(part["type"] == "image" for part in parts)
            return images + "".join(part["text"] for part in parts if part["type"] == "text")

    with pytest.raises(tt.DataError, match="does not write an image as one text at its place"):
        _placeholder(Moves())
