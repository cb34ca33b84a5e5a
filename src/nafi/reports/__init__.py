"""Tables, figures and pages: results in, files out; nothing here computes a result."""

from typing import TYPE_CHECKING

from nafi.lazy import lazy_names

__all__ = ["fusion_table", "write_fusion_page"]

if TYPE_CHECKING:
    from nafi.reports.fusion import fusion_table, write_fusion_page
else:  # `nafi fuse` prints a table without importing matplotlib
    __getattr__, __dir__ = lazy_names(__name__, {"fusion": ["fusion_table", "write_fusion_page"]})
