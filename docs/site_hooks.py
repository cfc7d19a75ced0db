"""Hooks of the docs site: pages of the repository's root join it, and links to source files lead to the repository.

The pages in docs/ are written for GitHub too, where `../CHANGELOG.md` and `../examples/own_model.py` are links. On the
site the first is a page. The second leads to the repository if pyproject.toml names its address; else it is text.
"""

import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OF_ROOT = ("BENCHMARKS.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^):#\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the address of the repository from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if address := project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]:
        config.repo_url, config.repo_name = address, "repository"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for name in OF_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/."""
    own = page.file.src_uri
    folder = ROOT if own in OF_ROOT else (ROOT / "docs" / own).parent

    def rewritten(link: re.Match[str]) -> str:
        path = (folder / link["target"]).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return link[0]  # the strict build reports it
        name = str(path.relative_to(ROOT))
        target = name.removeprefix("docs/")
        if name in OF_ROOT or name.startswith("docs/"):
            up = "../" * own.count("/")
            return f"[{link['text']}]({up}{target}{link['anchor'] or ''})"
        address = (config.repo_url or "").rstrip("/")
        return f"[{link['text']}]({address}/blob/main/{name})" if address else link["text"]

    return LINK.sub(rewritten, markdown)
