"""A page as a headless Chromium shows it."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")
FRAME = """<!DOCTYPE html><iframe src="looked_at.html" width="WIDTH" height="900"></iframe><script>
addEventListener("message", said => document.body.setAttribute("data-found", said.data))
</script>"""


def look(page: Path, script: str, *, width: int = 1240, dark: bool = False) -> dict[str, Any]:
    """Return the result of `script`, the body of an async function in the page; "errors" holds errors of the page."""
    added = (
        "<script>(async () => { const errors = []; onerror = e => errors.push(e);"
        f"const found = await (async () => {{ {script} }})().catch(e => ({{ failed: e.stack }}));"
        'parent.postMessage(JSON.stringify({ ...found, errors }), "*") })()</script></body>'
    )
    folder = page.parent
    (folder / "looked_at.html").write_text(page.read_text(encoding="utf-8").replace("</body>", added), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=6000"]
    flags += [
        "--disable-background-networking",
        "--force-prefers-reduced-motion",
        f"--user-data-dir={folder / 'profile'}",
    ]
    flags += ["--window-size=1400,1000"]
    flags += ["--blink-settings=preferredColorScheme=0"] * dark
    command = [str(BROWSER), *flags, "--dump-dom", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, f"the page's script did not come to its end\n{done.stdout[:2000]}"
    answer = json.loads(unescape(found[1]))
    assert "failed" not in answer, answer["failed"]
    return answer
