"""A report as a browser shows it: headless Chromium, on a desk and on a phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from nafi.experiments import report_of
from nafi.reports import sections, write_page
from tests.test_reports import demo_page, fusion_page, runs

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
# Says for each table and figure whether it is visible, and whether the page is too wide.
PROBE = """
<script>
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("table, figure svg, .scores svg")].map(e => {
    const box = e.getBoundingClientRect();
    return e.tagName + ":" + (box.width > 40 && box.height > 20);
  });
  document.title = seen.join(" ") + " overflow:" + (document.body.scrollWidth > innerWidth);
});
</script>
"""


def chromium(*arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "install chromium: apt-get install chromium"
    done = subprocess.run(
        [program, *FLAGS, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def seen_on(page: Path, width: int, height: int) -> list[str]:
    """What the probe says of a page in a window of this size."""
    page.write_text(page.read_text().replace("</head>", PROBE + "</head>"))
    size = f"--window-size={width},{height}"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    title = chromium(size, profile, "--dump-dom", page.as_uri()).split("<title>")[1]
    return title.split("</title>")[0].split()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 390])
def test_scores_are_visible(tmp_path: Path, width: int) -> None:
    page = tmp_path / "fused.html"
    fusion_page(page)
    seen = seen_on(page, width, 1600)
    assert seen.count("TABLE:true") == 2
    assert seen.count("svg:true") == 4 + 3
    assert seen[-1] == "overflow:false"


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 390])
def test_the_demo_is_visible(tmp_path: Path, width: int) -> None:
    page = tmp_path / "demo.html"
    demo_page(page)
    assert seen_on(page, width, 1600) == ["svg:true", "TABLE:true", "svg:true", "overflow:false"]


@pytest.mark.browser
@pytest.mark.parametrize(("width", "height"), [(1200, 2400), (390, 2400)])
def test_tables_and_figures_are_visible(tmp_path: Path, width: int, height: int) -> None:
    page = tmp_path / "report.html"
    found = sections(runs(), report_of)
    write_page(page, found)
    seen = seen_on(page, width, height)
    tables = sum(len(section.tables) for section in found)
    figures = sum(len(section.figures) for section in found)
    assert seen.count("TABLE:true") == tables
    assert seen.count("svg:true") == figures
    assert seen[-1] == "overflow:false"
    shot = tmp_path / "shot.png"
    size, profile = f"--window-size={width},{height}", f"--user-data-dir={tmp_path / 'profile'}"
    chromium(size, profile, f"--screenshot={shot}", page.as_uri())
    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (height, width)
    ink = (np.abs(pixels - 1).max(axis=2) > 0.2).mean(axis=1)
    assert (ink > 0).mean() > 0.2  # something is drawn on many of its lines
    colours = np.unique((pixels.reshape(-1, 3) * 15).astype(int), axis=0)
    assert len(colours) > 30  # the heat map among them
