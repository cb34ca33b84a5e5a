"""HTML pages from templates.

Hides: jinja2. Promises: one self-contained file, written completely or not at all; everything that
a template is given is escaped, and a name that it is not given is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nafi.files import atomic_path
from nafi.version import __version__


def write_html(path: Path, template: str, **values: Any) -> None:
    """Fill a template in and write the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # tables need none

    environment = Environment(
        loader=PackageLoader("nafi.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template).render(version=__version__, **values)
    with atomic_path(path) as partial:
        partial.write_text(page, encoding="utf-8")
