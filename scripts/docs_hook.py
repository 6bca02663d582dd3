"""What mkdocs does not do by itself: pages may link to any file of the repository, as on GitHub.

`[the loop](../examples/plain_loop.py)` is a link that leaves docs/. The file it names becomes part
of the site: pictures and Markdown as they are, other texts as a page that shows them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = "repository"
LINK = re.compile(r"(?<=\]\()(?:\.\./)+(?P<path>[^)#\s]+)")
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md")  # in the navigation
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}


def address(path: str) -> str:
    """Where a file of the repository is in the site, as a source of mkdocs."""
    shown = Path(path).suffix in LANGUAGES or not Path(path).suffix
    return f"{FOLDER}/{path}.md" if shown else f"{FOLDER}/{path}"


def _file(root: Path, path: str, config: Any) -> File:
    suffix = Path(path).suffix
    if suffix in LANGUAGES or not suffix:
        text = (root / path).read_text()
        page = f"# {path}\n\n````{LANGUAGES.get(suffix, 'text')}\n{text}````\n"
        return File.generated(config, address(path), content=page)
    return File.generated(config, address(path), abs_src_path=str(root / path))


def on_files(files: Files, config: Any) -> Files:
    """Adds what the pages link to; a link to nothing stays, for mkdocs to complain about."""
    root = Path(config.config_file_path).parent
    linked = set(ALWAYS)
    for page in files.documentation_pages():
        linked |= {match["path"] for match in LINK.finditer(page.content_string)}
    for path in sorted(linked):
        if (root / path).is_file():
            files.append(_file(root, path, config))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")

    def inside(match: re.Match[str]) -> str:
        target = address(match["path"])
        return up + target if files.get_file_from_path(target) else match[0]

    return LINK.sub(inside, markdown)
