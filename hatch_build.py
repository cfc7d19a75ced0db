"""Metadata of the packages that depends on the address of the repository: links, and the text for the package index.

The address is `repository` in pyproject.toml, below [tool.hatch.metadata.hooks.custom]. The index shows the README by
itself, so links to files become links to the repository, and without an address they become text.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:|#)[^)\s]+)\)")
PAPERS = {
    "Paper: Tree Training": "https://arxiv.org/abs/2511.00413",
    "Paper: AReaL-DTA": "https://arxiv.org/abs/2602.00482",
}


class CustomMetadataHook(MetadataHookInterface):
    """Fills `readme` and `urls` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """See `MetadataHookInterface.update`."""
        address = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, address)}
        metadata["urls"] = urls(address)


def with_absolute_links(text: str, address: str) -> str:
    """Markdown whose links and images lead to files of the repository at `address`; without one they are text."""

    def absolute(link: re.Match[str]) -> str:
        if not address:
            return "" if link["image"] else link["text"]
        return f"{link['image']}[{link['text']}]({address}/{'raw' if link['image'] else 'blob'}/main/{link['target']})"

    return LINK.sub(absolute, text)


def urls(address: str) -> dict[str, str]:
    """The links that the index shows beside the text."""
    own = {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
    }
    return (own if address else {}) | PAPERS
