"""A real browser lays the page out; skipped where there is none."""

import json
import re
import shutil
import subprocess

import pytest
from recorded import policy_facts

from treetrain.report.page import run_page
from treetrain.report.records import read_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
LOOK = """<script>
var line = document.querySelector("#chart-loss path.line:not(.raw)"), charts = document.querySelectorAll("figure svg");
var shown = Array.prototype.filter.call(charts, function (chart) { return chart.getBoundingClientRect().width > 0; });
parent.postMessage(JSON.stringify({
  window: innerWidth,
  width: document.documentElement.scrollWidth,
  back: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
  stroke: getComputedStyle(line).stroke,
  charts: shown.length,
  letters: Math.min.apply(null, shown.map(function (chart) {
    return chart.querySelector("text").getBoundingClientRect().height;
  }))
}), "*");
</script></body>"""
FRAME = """<!DOCTYPE html><iframe src="page.html" width="WIDTH" height="900" style="border:0"></iframe><script>
addEventListener("message", function (said) { document.body.setAttribute("data-found", said.data); });
</script>"""
"""A window of a browser may not be as narrow as a phone; a frame may."""


def look(text: str, folder, width: int, *options: str) -> dict:
    """What the browser says of the page."""
    page, frame = folder / "page.html", folder / "frame.html"
    page.write_text(text.replace("</body>", LOOK), encoding="utf-8")
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    own = (f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=3000")
    command = [str(BROWSER), *FLAGS, *own, *options, "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:]
    return json.loads(found[1].replace("&quot;", '"'))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")
@pytest.mark.parametrize("width", [360, 1240])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_a_phone_and_a_desk_and_is_dark_where_that_is_wanted(make_run, tmp_path, width, dark) -> None:
    text = run_page(read_run(make_run(config={"loss": "grpo"}, change=policy_facts, stop={"kind": "end"})))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found = look(text, tmp_path, width, scheme)
    assert found["window"] == width and found["width"] <= width  # nothing sticks out at the right
    assert found["charts"] == text.count('id="chart-')  # of a chart that is drawn in two sizes one is seen
    assert found["letters"] >= 9
    assert found["back"] == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 249)")
    assert found["stroke"] == ("rgb(92, 179, 242)" if dark else "rgb(11, 111, 184)")
