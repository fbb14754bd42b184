"""The report in a browser that reaches no network: what is seen, and what a click does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gradwire_bench.suite import page
from suite_records import of_every_kind

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
ALONE = ["--proxy-server=127.0.0.1:9", "--proxy-bypass-list=<-loopback>", "--disable-background-networking"]
"""Whatever the page asked a network for would go to a port where nobody listens."""
WINDOW = (1400, 3000)

LOOK = """
<script>
addEventListener("load", () => {
  const box = each => { const {x, y, width, height} = each.getBoundingClientRect(); return {x, y, width, height}; };
  const table = document.querySelector("table"), heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex(each => each.textContent === "ms a step");
  const values = () => [...table.tBodies[0].rows].map(row => row.cells[column].textContent);
  const before = values(), sorted = [];
  for (let click = 0; click < 2; click++) { heads[column].click(); sorted.push(values()); }
  const marks = heads[column].getAttribute("aria-sort");
  const search = document.querySelector("input");
  search.value = "acpsgd"; search.dispatchEvent(new Event("input"));
  const left = [...table.tBodies[0].rows].filter(row => box(row).height > 0).length;
  const seen = {
    plots: [...document.querySelectorAll("figure svg")].map(box),
    tables: [...document.querySelectorAll("table")].map(box),
    drawn: [...document.querySelectorAll("figure svg")].map(each => each.querySelectorAll("path, text").length),
    words: [...document.querySelectorAll("figure svg")].map(each => each.textContent.replace(/\\n/g, "")),
    wide: document.documentElement.scrollWidth,
    loaded: performance.getEntriesByType("resource").map(each => each.name),
    before, sorted, marks, left,
  };
  const told = document.createElement("pre");
  told.id = "seen"; told.textContent = JSON.stringify(seen);
  document.body.append(told);
});
</script>
"""


def browse(path: Path, *options: str) -> str:
    assert BROWSER is not None
    size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", size, *ALONE, *options, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is on this machine")
def test_a_browser_shows_every_plot_and_table_and_a_click_sorts(tmp_path: Path) -> None:
    html = page.html(of_every_kind(), "A title", "About.")
    report = tmp_path / "report.html"
    report.write_text(html.replace("</body>", f"{LOOK}</body>"))
    found = re.search(r'<pre id="seen">(.*?)</pre>', browse(report, "--dump-dom"), re.S)
    assert found is not None
    seen: dict[str, Any] = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["loaded"] == []
    assert (len(seen["plots"]), len(seen["tables"])) == (6, 5)
    for box in seen["plots"]:
        assert box["width"] > 200
        assert box["height"] > 100
        assert 0 <= box["x"] < box["x"] + box["width"] <= WINDOW[0]
    for box in seen["tables"]:
        assert box["width"] > 100
        assert box["height"] > 40
    tops = [box["y"] for box in (*seen["plots"], *seen["tables"])]
    assert tops == sorted(tops)  # one below the other
    assert min(seen["drawn"]) > 12
    for words in seen["words"]:
        assert "topk" in words
    assert "CNN100mbit4 workers" in seen["words"][0]  # a head of three lines
    assert seen["wide"] <= WINDOW[0]  # nothing sticks out of the page
    times = [float(each) for each in seen["before"]]
    assert len(set(times)) == 4
    assert [[float(each) for each in order] for order in seen["sorted"]] == [sorted(times), sorted(times)[::-1]]
    assert seen["marks"] == "descending"
    assert seen["left"] == 1


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is on this machine")
def test_a_screenshot_is_not_empty(tmp_path: Path) -> None:
    from matplotlib.image import imread

    (tmp_path / "report.html").write_text(page.html(of_every_kind(), "A title", "About."))
    shot = tmp_path / "shot.png"
    browse(tmp_path / "report.html", f"--screenshot={shot}")
    pixels = imread(shot)
    assert pixels.shape[:2] == WINDOW[::-1]
    rows = pixels[:, :, :3].reshape(30, -1, 3)
    assert sum(band.std() > 0.01 for band in rows) > 15  # there is something on most of it
