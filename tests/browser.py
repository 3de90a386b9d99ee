"""A page in a headless browser: how wide its content is, and what the browser complains of."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PROBE = """
<script>
addEventListener("load", () => {
  const outside = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll")
    && e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + ": " + e.textContent.slice(0, 60));
  const blank = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
  const told = {width: innerWidth, content: document.documentElement.scrollWidth, outside, blank};
  const box = parent.document.createElement("pre");
  box.textContent = JSON.stringify(told);
  parent.document.body.append(box);
});
</script>
"""


def measured(page: Path, widths: Sequence[int], work: Path) -> dict[int, dict[str, Any]]:
    """The page at several widths: its inner width, the content's, and what stands outside.

    It lies in frames, because the window itself is never narrower than 500 pixels. Skips the test
    where there is no browser.
    """
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser ({', '.join(NAMES)}) to look at the page with")
    inside = html.escape(page.read_text().replace("</body>", f"{PROBE}</body>"), quote=True)
    frames = (f'<iframe srcdoc="{inside}" width="{w}" height="900"></iframe>' for w in widths)
    host = work / "frames.html"
    host.write_text(f"<!DOCTYPE html><title>frames</title><body>{''.join(frames)}</body>")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             f"--user-data-dir={work / 'profile'}", "--hide-scrollbars", "--window-size=2000,1000",
             "--dump-dom", host.as_uri()]  # fmt: skip
    found = subprocess.run([browser, *words], capture_output=True, text=True, timeout=120)
    boxes = re.findall(r"<pre>(\{.*?\})</pre>", found.stdout)
    told = [json.loads(html.unescape(box)) for box in boxes]
    complaints = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert len(told) == len(widths) and not complaints, found.stderr[-2000:]
    return {one["width"]: one for one in told}
