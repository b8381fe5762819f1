"""Headless Chromium: what a script finds in a page, and what the console complains of, as of refused requests."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needed = pytest.mark.skipif(FOUND is None, reason="no Chromium on this machine")

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
_FLAGS += ["--virtual-time-budget=20000"]  # timers of a page do not wait

# The page lies in a frame, which may be narrower than any window, and whose own policy lets no script run but its own.
_AROUND = """<!doctype html><iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe><pre></pre>
<script>onload = async () => {{
  const {{contentDocument: document, contentWindow: {{innerWidth}}}} = window.document.querySelector("iframe");
  window.document.querySelector("pre").textContent = JSON.stringify(await ({script}));
}}</script>"""


def look(page: Path, script: str, *, width: int, dark: bool = False, paper: bool = False) -> tuple[Any, list[str]]:
    """What an expression over a page's ``document`` and ``innerWidth`` gives, and complaints. paper: as printed.

    The expression may be a promise.
    """
    assert FOUND is not None
    text = page.read_text()
    text = text.replace("@media print", "@media all") if paper else text
    text = text.replace("(prefers-color-scheme: dark)", "all") if dark else text
    with tempfile.TemporaryDirectory() as folder:
        around = Path(folder) / "around.html"
        around.write_text(_AROUND.format(width=width, page=html.escape(text), script=script))
        command = [FOUND, *_FLAGS, f"--user-data-dir={folder}/profile", "--dump-dom", around.as_uri()]
        run = subprocess.run(command, capture_output=True, text=True)
    (found,) = re.findall(r"<pre>(.*?)</pre>", run.stdout.split("</iframe>")[1], re.DOTALL)
    return json.loads(html.unescape(found)), re.findall(r"CONSOLE.*", run.stderr)
