"""The documentation site builds strictly, its links and pictures are there, nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parent.parent


def build(target: Path) -> None:
    """The site as `make docs` builds it: a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", target],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Links(HTMLParser):
    """The names of a page's places, what it links to, and what a browser would fetch for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("img", "script", "link", "source", "iframe"):
            self.fetched += [found[name] for name in ("src", "href") if name in found]


@pytest.mark.slow
def test_the_site_builds_and_is_whole(tmp_path: Path) -> None:
    build(tmp_path)
    pages = {page: Links(page.read_text("utf-8")) for page in sorted(tmp_path.rglob("*.html"))}
    assert len(pages) > 40
    for page, found in pages.items():
        where = page.relative_to(tmp_path)
        assert [link for link in found.fetched if re.match(r"(https?:)?//", link)] == [], where
        for link in [*found.links, *found.fetched]:
            path, place = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", path) or where.name == "404.html":
                continue
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{where}: {link} leads nowhere"
            if place and target in pages and place != "__top":
                assert place in pages[target].places, f"{where}: {link} has no such place"
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text("utf-8")), style
