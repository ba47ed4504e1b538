"""mkdocs' hook: pages of the repository outside docs/ stand in the site too, and terms of the glossary have tooltips.

On GitHub a page links to `../../SECURITY.md`; in the site that file is the page `security.md`. A link to any other file
of the repository becomes its path in code type, since the site does not carry it. A link to a file that does not exist
stays as it is, and `mkdocs build --strict` refuses it.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {  # by path in the repository: its path in the site
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
}
GLOSSARY = "reference/glossary.md"
_TERM = re.compile(r"^- \*\*(?P<term>[^*]+)\*\*: (?P<meaning>.+(?:\n  .+)*)", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, address in PAGES.items():
        files.append(File.generated(config, address, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Return the page with its links as the site has them."""
    address = page.file.src_uri
    text = relinked(markdown, {at: source for source, at in PAGES.items()}.get(address, f"docs/{address}"), address)
    if address == GLOSSARY:
        return text
    return f"{text}\n\n" + "".join(f"*[{term}]: {meaning}\n" for term, meaning in terms().items())


@cache
def terms() -> dict[str, str]:
    """Return each term of the glossary with its meaning, in plain text."""
    text = (ROOT / "docs" / GLOSSARY).read_text(encoding="utf-8")
    return {found["term"]: " ".join(found["meaning"].replace("`", "").split()) for found in _TERM.finditer(text)}


def relinked(markdown: str, source: str, address: str) -> str:
    """Return a page's text with the links of the site.

    Args:
        markdown: The text, with links between files of the repository.
        source: The page's path in the repository.
        address: Its path in the site.

    >>> relinked("[who](../SECURITY.md) [all](../config.yaml)", "docs/status.md", "status.md")
    '[who](security.md) `config.yaml`'
    """

    def rewrite(link: re.Match[str]) -> str:
        target = link["target"]
        path = os.path.normpath(PurePosixPath(source).parent / target)
        if "://" in target or not (ROOT / path).exists():
            return link[0]
        if path in PAGES:
            place = PAGES[path]
        elif path.startswith("docs/") and path.endswith((".md", ".png", ".svg")):
            place = path.removeprefix("docs/")
        else:
            return link["text"] if "`" in link["text"] else f"`{path}`"
        return f"[{link['text']}]({os.path.relpath(place, PurePosixPath(address).parent)}{link['anchor'] or ''})"

    return _LINK.sub(rewrite, markdown)
