"""The start page of the site: README, with its links as the site has them."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README as the page ``index.md``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/", "](")
    # The site has pages of docs/ alone.
    text = re.sub(r"\[([^\]]*)\]\((?!http)[^)#]*CONTRIBUTING\.md\)", r"\1", text)
    files.append(File.generated(config, "index.md", content=text))
    return files
