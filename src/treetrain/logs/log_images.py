"""Images in logs: read from the record itself, and prepared by a checkpoint's processor.

A chat template writes a placeholder where a message has an image, and a processor repeats it once for each feature of
the image. Here an image's place in a message becomes that text, so the row is rendered and tokenised as text, and the
processor's arrays go with it.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from treetrain.core.errors import DataError, quoted, shortened
from treetrain.layers.images.image_rows import Image, split_images

if TYPE_CHECKING:
    import PIL.Image

SOURCES = ("image_url", "url", "image", "source", "bytes", "data", "content")
"""Fields that hold an image, or an object that does, in the APIs of OpenAI, Anthropic, Google and AWS, and datasets."""
BESIDE = {
    "type",
    "text",
    "detail",
    "format",
    "media_type",
    "mediaType",
    "mime_type",
    "mimeType",
    "cache_control",
    "path",
}
"""Fields of an image's part that say nothing on where the image is, if one of the others does."""
TYPES = ("attention_mask", "token_type_ids", "mm_token_type_ids")
"""A processor's facts of tokens."""


class PlacedImage(NamedTuple):
    """An image of a conversation, and the text of its tokens."""

    text: str
    tiles: tuple[Image, ...]
    """The images that `Trajectory` takes for it: one image, or its tiles where the processor cuts it."""


class Renders(Protocol):
    """Renders messages by a chat template: `chat.Renderer`."""

    def render(self, messages: Sequence[dict[str, object]], tools: None) -> str: ...


class ImageReader:
    """Prepares images with a processor, each content once.

    Args:
        processor: a transformers processor, with a tokenizer and an image processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        own = getattr(processor, "image_token_id", None)
        self.token = int(self._tokenizer.convert_tokens_to_ids(processor.image_token) if own is None else own)
        """The id that stands for images in rows."""
        self._placeholder: str | None = None
        self._prepared: dict[bytes, PlacedImage] = {}

    def place(self, part: object, listed: list[object], renderer: Renders, here: str) -> PlacedImage:
        """The image of a content part; a part of which only the type is given takes the first of the images `listed`.

        Raises:
            DataError: an image that is not in the record, or that cannot be read.
        """
        if isinstance(part, Mapping) and not {name for name, x in part.items() if x is not None} - {"type", "text"}:
            if not listed:
                raise DataError(f"{here} stands for an image of the record's `images`, which has no more of them")
            return self.prepare(listed.pop(0), renderer, here)
        return self.prepare(part, renderer, here)

    def prepare(self, held: object, renderer: Renders, here: str) -> PlacedImage:
        """The image that an object of a log holds."""
        import PIL.Image

        found = _found(held, here)
        try:
            picture = PIL.Image.open(io.BytesIO(found)) if isinstance(found, bytes) else found
            pixels = picture.tobytes()
        except Exception as error:  # decoders raise many kinds
            raise DataError(f"{here}: the image cannot be read ({type(error).__name__}: {shortened(error)})") from error
        key = blake2b(f"{picture.mode} {picture.size} ".encode() + pixels, digest_size=16).digest()
        if key not in self._prepared:
            self._prepared[key] = self._made(picture, renderer)
        return self._prepared[key]

    def _made(self, picture: "PIL.Image.Image", renderer: Renders) -> PlacedImage:
        if self._placeholder is None:
            self._placeholder = _placeholder(renderer)
        made = dict(
            self._processor(text=[self._placeholder], images=[[picture]], add_special_tokens=False, return_tensors="pt")
        )
        ids = made.pop("input_ids")[0].tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise DataError(
                f"the tokens that {type(self._processor).__name__} writes for an image are not those of their text "
                f"{quoted(text)}; prepare the rows yourself: tt.Trajectory(ids, images=...)"
            )
        return PlacedImage(text, split_images({name: value for name, value in made.items() if name not in TYPES}))


def _placeholder(renderer: Renders) -> str:
    """The text that the template writes for an image; raises DataError unless it writes it where the image stands."""

    def rendered(*content: str | None) -> str:
        parts = [{"type": "image"} if one is None else {"type": "text", "text": one} for one in content]
        return renderer.render([{"role": "user", "content": parts}], None)

    word, other = "Xa", "Yb"
    bare, whole = rendered(word), rendered(None, word)
    start = next((at for at, (x, y) in enumerate(zip(bare, whole)) if x != y), len(bare))
    text = whole[start : start + len(whole) - len(bare)]
    as_text = renderer.render([{"role": "user", "content": f"{word}{text}{other}{text}"}], None)
    if not text or rendered(word, None, other, None) != as_text:
        raise DataError(
            "the chat template does not write an image as one text at its place in the message, so images of logs "
            "cannot be prepared; prepare the rows yourself: tt.Trajectory(ids, images=...)"
        )
    return text


def _found(held: object, here: str) -> Any:
    """The bytes of an image file, or a PIL image."""
    if isinstance(held, bytes) or (hasattr(held, "tobytes") and hasattr(held, "mode")):
        return held
    if isinstance(held, Mapping):
        name = next((name for name in SOURCES if held.get(name) is not None), None)
        others = [other for other, x in held.items() if x is not None and other not in BESIDE]
        if name is not None:
            return _found(held[name], here)
        raise DataError(
            f"{here} is an image without its content ({', '.join(map(quoted, others or held))}); put it into the "
            "record as a data: URL, data:image/png;base64,..."
        )
    if not isinstance(held, str):
        raise DataError(f"{here}: the image is {quoted(held)}, expected a data: URL, base64, bytes or a PIL image")
    if held.startswith(("http://", "https://")):
        raise DataError(
            f"{here} is the image at {quoted(held)}; images are not downloaded: put it into the record as a data: URL, "
            "data:image/png;base64,..."
        )
    content = held.partition(",")[2] if held.startswith("data:") else held
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{here}: the image is {quoted(held)}, neither a data: URL nor base64; put its content into the record as "
            "a data: URL, data:image/png;base64,..."
        ) from error


def listed_images(record: Mapping[str, object]) -> list[object]:
    """The images that a record has beside its messages."""
    if isinstance(media := record.get("multi_modal_data"), Mapping):
        if others := [name for name, x in media.items() if x and name != "image"]:
            raise DataError(
                f"the record has {', '.join(map(quoted, others))} in `multi_modal_data`; only images are read"
            )
        record = {"images": media.get("image")}
    images = record.get("images") or record.get("image") or []
    return list(images) if isinstance(images, list | tuple) else [images]


def images_in(messages: Sequence[Mapping[str, Any]], placed: Sequence[PlacedImage]) -> int:
    """How many of a conversation's images, which come in order, stand in its first messages.

    Raises:
        DataError: an assistant message has one.
    """
    number = 0
    for message in messages:
        at = 0
        while number < len(placed) and (found := message["content"].find(placed[number].text, at)) >= 0:
            if message["role"] == "assistant":
                raise DataError("an assistant message has an image; images of the user, the system and tools are read")
            at, number = found + len(placed[number].text), number + 1
    return number
