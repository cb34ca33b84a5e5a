"""Tables, figures and pages: results in, files out; nothing here computes a result.

Hides: that names are imported when they are first used. Promises: the tables need no package of
`nafi[lab]`; what does says so.
"""

from typing import TYPE_CHECKING

from nafi.lazy import lazy_names

__all__ = [
    "Section",
    "TextTable",
    "check_picture",
    "check_views",
    "demo_notes",
    "demo_score",
    "demo_table",
    "draw_demo",
    "fits_table",
    "frontier_table",
    "fusion_table",
    "judgement_table",
    "metric_of",
    "score_table",
    "sections",
    "terminal_table",
    "write_demo_page",
    "write_fusion_page",
    "write_markdown",
    "write_page",
]

if TYPE_CHECKING:
    from nafi.reports.demo import (
        demo_notes,
        demo_score,
        demo_table,
        draw_demo,
        write_demo_page,
    )
    from nafi.reports.experiments import Section, sections, write_markdown, write_page
    from nafi.reports.figures import check_picture
    from nafi.reports.fusion import (
        fits_table,
        frontier_table,
        fusion_table,
        judgement_table,
        write_fusion_page,
    )
    from nafi.reports.records import TextTable, metric_of, score_table
    from nafi.reports.terminal import terminal_table
    from nafi.reports.views import check_views
else:  # `nafi fuse` prints a table without importing matplotlib
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "demo": ["demo_notes", "demo_score", "demo_table", "draw_demo", "write_demo_page"],
            "experiments": ["Section", "sections", "write_markdown", "write_page"],
            "figures": ["check_picture"],
            "fusion": [
                "fits_table",
                "frontier_table",
                "fusion_table",
                "judgement_table",
                "write_fusion_page",
            ],
            "records": ["TextTable", "metric_of", "score_table"],
            "terminal": ["terminal_table"],
            "views": ["check_views"],
        },
    )
