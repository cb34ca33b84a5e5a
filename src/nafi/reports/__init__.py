"""Tables, figures and pages from plain data.

Hides: that names are imported when they are first used: tables of a fusion need nothing of
`nafi[lab]`. Promises: a clear error where a package of the laboratory is missing.
"""

from typing import TYPE_CHECKING

from nafi.errors import require
from nafi.lazy import lazy_names

__all__ = [
    "Section",
    "TextTable",
    "check_picture",
    "check_views",
    "draw_demo",
    "fusion_table",
    "metric_of",
    "score_table",
    "sections",
    "write_fusion_page",
    "write_markdown",
    "write_page",
]

if TYPE_CHECKING:
    from nafi.reports.experiments import Section, sections, write_markdown, write_page
    from nafi.reports.figures import check_picture, draw_demo
    from nafi.reports.fusion import fusion_table, write_fusion_page
    from nafi.reports.records import TextTable, metric_of, score_table
    from nafi.reports.views import check_views
else:
    _PLAIN = {"fusion": ["fusion_table", "write_fusion_page"]}
    _LAB = {
        "experiments": ["Section", "sections", "write_markdown", "write_page"],
        "figures": ["check_picture", "draw_demo"],
        "records": ["TextTable", "metric_of", "score_table"],
        "views": ["check_views"],
    }
    _get_name, __dir__ = lazy_names(__name__, _PLAIN | _LAB)

    def __getattr__(name: str) -> object:
        if any(name == module or name in names for module, names in _LAB.items()):
            require("lab", "matplotlib", "jinja2")
        return _get_name(name)
