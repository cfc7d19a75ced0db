"""Reads a page as a browser would: elements that open and close, what each holds, what it would load."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}
FOREIGN_VOID = {"path", "line", "rect", "circle"}
LOADING = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")


class Page(HTMLParser):
    """What is in a page. Elements that close in another order than they opened fail at once."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in FOREIGN_VOID, f"<{tag}/> is no empty element"
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} in line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """All words, one space between them."""
        return " ".join(" ".join(self.words).split())

    @property
    def charts(self) -> set[str]:
        """Keys of the charts."""
        ids = {given.get("id") or "" for tag, given in self.attributes if tag == "figure"}
        return {name.removeprefix("chart-") for name in ids if name.startswith("chart-")}

    @property
    def loaded(self) -> list[str]:
        """Everything that a browser would fetch, anchors within the page aside."""
        links = [given[name] or "" for _, given in self.attributes for name in LOADING if name in given]
        return [link for link in links if link != "data:," and not link.startswith("#")]
