"""Look at every page of the built site in a browser, at the width of a desktop and of a phone.

scripts/site FOLDER
python bench/site_pages.py FOLDER                         # fails if a page is wider than its window
python bench/site_pages.py FOLDER --pictures PICTURES     # also writes a picture of each page

Needs Chromium. A page with frames is added to FOLDER while the browser reads it, because the smallest window of
Chromium is wider than a phone.
"""

from __future__ import annotations

import argparse
import functools
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTHS = (1280, 390)
HARNESS = "harness.html"
QUERY = "preemption"
SCRIPT = """
<!doctype html><body><div id=frames></div><pre id=out></pre><script>
const pages = PAGES, widths = WIDTHS, query = QUERY;
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:800px;border:0`;
  frame.src = page;
  const loaded = new Promise(done => frame.onload = done);
  document.getElementById("frames").append(frame);
  await loaded;
  const root = frame.contentDocument.documentElement, wide = [];
  if (root.scrollWidth > width)
    for (const element of frame.contentDocument.querySelectorAll("article *"))
      if (element.getBoundingClientRect().right > width + 1) wide.push(element.tagName + "." + element.className);
  const broken = [...frame.contentDocument.images].filter(image => image.complete && !image.naturalWidth).length;
  const found = {page, width, scroll: root.scrollWidth, wide: wide.slice(0, 5), broken};
  frame.remove();
  return found;
}
async function search() {
  const frame = document.createElement("iframe");
  frame.style = "width:1280px;height:800px";
  frame.src = "index.html";
  const loaded = new Promise(done => frame.onload = done);
  document.getElementById("frames").append(frame);
  await loaded;
  const page = frame.contentDocument;
  await fetch("wait");
  page.querySelector(".md-search__button").click();
  for (let tries = 0; tries < 40; tries++) {
    await fetch("wait");
    const root = [...page.querySelectorAll("*")].map(each => each.shadowRoot).find(Boolean);
    const box = root?.querySelector("input");
    if (!box) continue;
    const links = [...root.querySelectorAll("a")].map(each => each.href);
    if (box.value && links.length) return links;
    box.value = query;
    box.dispatchEvent(new frame.contentWindow.Event("input", {bubbles: true, composed: true}));
  }
  return [];
}
(async () => {
  const results = [];
  for (const width of widths) for (const page of pages) results.push(await look(page, width));
  const text = JSON.stringify({results, search: await search()});
  document.getElementById("out").textContent = text;
})();
</script>
"""


class QuietHandler(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer `/wait` late: the browser's clock is virtual and ahead of its workers, except during a request."""
        if self.path == "/wait":
            time.sleep(0.2)
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address under which the folder is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def chromium(*words: str) -> str:
    """Run Chromium without a window and return its standard output."""
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout


def looked_at(site: Path, pages: list[str]) -> dict[str, Any]:
    """Return the width of each page in each window, and what the search finds."""
    text = SCRIPT.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / HARNESS).write_text(text.replace("QUERY", json.dumps(QUERY)), "utf-8")
    try:
        with served(site) as address:
            dom = chromium("--virtual-time-budget=600000", "--dump-dom", f"{address}/{HARNESS}")
    finally:
        (site / HARNESS).unlink()
    found = re.search(r'<pre id="out">(.*?)</pre>', dom, re.S)
    if found is None or not found[1]:
        raise SystemExit("the browser did not finish")
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


def draw(site: Path, pages: list[str], pictures: Path) -> None:
    """Write a picture of each page at each width."""
    pictures.mkdir(parents=True, exist_ok=True)
    with served(site) as address:
        for width in WIDTHS:
            for page in pages:
                name = f"{width}-{page.removesuffix('.html').replace('/', '-')}.png"
                style = f"width:{width}px;height:2400px;border:0"
                frame = f"<!doctype html><body style='margin:0'><iframe src='{page}' style='{style}'>"
                (site / HARNESS).write_text(frame, "utf-8")
                url = f"{address}/{HARNESS}"
                chromium(f"--window-size={max(width, 500)},2400", f"--screenshot={pictures / name}", url)
        (site / HARNESS).unlink()


def main() -> int:
    """Check all pages, and draw them if asked. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is not on PATH")
    pages = sorted(str(path.relative_to(args.folder)) for path in args.folder.rglob("*.html"))
    pages = [page for page in pages if page not in ("404.html", HARNESS)]
    seen = looked_at(args.folder, pages)
    bad = [row for row in seen["results"] if row["scroll"] > row["width"] or row["broken"]]
    for row in bad:
        wide = f"{row['scroll']} px wide {row['wide']}"
        print(f"{row['page']} at {row['width']} px: {wide}, {row['broken']} broken pictures")
    links = sorted(set(seen["search"]))
    print(
        f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px; the search for {QUERY!r} finds {len(links)} pages"
    )
    if args.pictures:
        draw(args.folder, pages, args.pictures)
    return int(bool(bad) or not links)


if __name__ == "__main__":
    sys.exit(main())
