"""What tests ask of HTML pages."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Counts tags, and collects what a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        addresses = [str(value) for name, value in attrs if name in ("src", "href")]
        self.fetched += [address for address in addresses if not address.startswith("#")]
