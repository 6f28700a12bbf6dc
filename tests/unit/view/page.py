"""What a page of `spmdflow.view` holds, read from its file."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Elements in order, and the text of those that have an id."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open] = self.texts.get(self._open, "") + data

    @property
    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.texts["summary"])["runs"]
        return found

    def part(self, name: str) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.texts[name])))

    def samples(self, run: dict[str, Any], step: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.part(run["samples"][str(step)])[str(step)]
        return found
