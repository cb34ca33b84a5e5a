"""Reports and the site as a browser shows them: headless Chromium, on a desk and on a phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from matplotlib.image import imread

from nafi.experiments import read_runs, report_of
from nafi.reports import sections, write_page
from tests.test_reports import demo_page, fusion_page, runs
from tests.test_site import build

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
# Chromium has no window narrower than 500 pixels: a page is seen within a frame of the right width,
# and tells it how wide it found itself and what its probe found.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><title></title>
<script>addEventListener("message", event => document.title = event.data)</script>
<iframe src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe>
"""
SAY = '<script>const say = text => parent.postMessage(innerWidth + " " + text, "*")</script>'
# Says for each table and figure whether it is visible, and whether the page is too wide.
PROBE = """
<script>
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("table, figure svg, .scores svg")].map(e => {
    const box = e.getBoundingClientRect();
    return e.tagName + ":" + (box.width > 40 && box.height > 20);
  });
  say(seen.join(" ") + " overflow:" + (document.body.scrollWidth > innerWidth));
});
</script>
"""
# Says of a page of the site how many pictures it shows and which are broken, whether a table or the
# page is too wide, and whether it is dark. Its own script puts tables into boxes that scroll.
SITE_PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const all = selector => [...document.querySelectorAll(".md-content " + selector)];
  const out = e => e.closest(".md-typeset__scrollwrap, pre, .highlight") === null
    && e.getBoundingClientRect().right > innerWidth + 1;
  const light = getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 127;
  say([
    "pictures:" + all("img").filter(e => e.naturalWidth > 0 && e.width > 100).length,
    "broken:" + all("img").filter(e => !e.naturalWidth).length,
    "outside:" + all("*").filter(out).length,
    "scheme:" + (light ? "light" : "dark"),
    "overflow:" + (document.documentElement.scrollWidth > innerWidth),
  ].join(" "));
}, 800));
</script>
"""
# Says how many rows have a name, how many names take more than a line, and how many tables are cut.
NAMES_PROBE = """
<script>
addEventListener("load", () => {
  const names = [...document.querySelectorAll("td:first-child")];
  const line = parseFloat(getComputedStyle(document.body).lineHeight);
  const text = document.createRange();
  const height = e => { text.selectNodeContents(e); return text.getBoundingClientRect().height; };
  const cut = [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth);
  say(`names:${names.length} broken:${names.filter(e => height(e) > 1.5 * line).length} `
    + `cut:${cut.length}`);
});
</script>
"""
RESULTS = Path(__file__).parents[1] / "results"


def chromium(*arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "install chromium: apt-get install chromium"
    done = subprocess.run(
        [program, *FLAGS, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def seen_on(page: Path, width: int, height: int, probe: str = PROBE, *flags: str) -> list[str]:
    """What the probe says of a page in a window of this size."""
    copy, frame = page.with_name(f"probed-{page.name}"), page.with_name(f"frame-{page.name}")
    copy.write_text(page.read_text("utf-8").replace("</head>", SAY + probe + "</head>"), "utf-8")
    frame.write_text(FRAME.format(page=copy.name, width=width, height=height))
    size = f"--window-size={max(width, 500) + 20},{height + 20}"
    with TemporaryDirectory() as profile:
        folder = f"--user-data-dir={profile}"
        budget = "--virtual-time-budget=4000"
        shown = chromium(size, folder, budget, *flags, "--dump-dom", frame.as_uri())
    found, *words = shown.split("<title>")[1].split("</title>")[0].split()
    assert int(found) == width
    return words


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


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 390])
def test_names_stay_whole_beside_long_lists(tmp_path: Path, width: int) -> None:
    """Nine methods with the widths of 18 layers, for 8 and for 16 clients."""
    name = "carvana-scaled"
    records = read_runs(RESULTS / f"{name}.jsonl")[name]
    page = tmp_path / "report.html"
    write_page(page, sections({name: [{**r, "report": {"views": ["widths"]}} for r in records]}))
    assert seen_on(page, width, 1600, NAMES_PROBE) == ["names:9", "broken:0", "cut:0"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


PICTURES = {  # pages of the site, and how many pictures each of them has
    "index": 1,
    "tutorial": 0,
    "concepts": 4,
    "howto/own-network": 0,
    "operations": 0,
    "results": 3,
    "support": 0,
    "faq": 0,
    "commands": 0,
    "api/nafi": 0,
    "api/federated": 0,
    "changelog": 0,
}


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark"), (390, "light")])
@pytest.mark.parametrize("name", PICTURES)
def test_a_page_of_the_site_fits(site: Path, name: str, width: int, scheme: str) -> None:
    """Pictures are there, nothing is wider than the window, and the reader's scheme is used."""
    settings = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    seen = seen_on(site / f"{name}.html", width, 1600, SITE_PROBE, settings)
    expected = [f"pictures:{PICTURES[name]}", "broken:0", "outside:0", f"scheme:{scheme}"]
    assert seen == [*expected, "overflow:false"]
