"""Checks of the built site.

    python docs/check_site.py docs/site

Every link within the site leads to a file and to an anchor of it. In headless Chromium, at 1280 and 390 pixels, no page
is wider than the screen, shows a placeholder or raises an error. At 1280 pixels every table fits into its page; at 390
a wider one can be scrolled. Without Chromium the script prints that it checked only the links.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from urllib.parse import unquote, urlsplit

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1280, 390)
SECONDS = 300  # for all pages
# Before everything else on a page: what fails to load, is raised or is printed as an error.
LISTEN = b"""<script>
window.faults = [];
const note = ({message, target}) => faults.push(message || `not loaded: ${target.src || target.href}`);
addEventListener("error", note, true);
addEventListener("unhandledrejection", event => faults.push(String(event.reason)));
console.error = (...words) => faults.push(words.join(" "));
</script>"""
LOOK = """<!doctype html><title>check</title><body style="margin:0"><script>
const wait = ms => new Promise(done => setTimeout(done, ms));
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px; height:900px; border:0`;
  frame.src = "/" + page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  await wait(150);  // the theme's script wraps the tables
  const view = frame.contentWindow, root = frame.contentDocument.documentElement, found = [...view.faults];
  if (root.scrollWidth > width) found.push(`the page is ${root.scrollWidth} px wide`);
  if (/klzzwxh|[\\u0002\\u0003]/.test(root.textContent)) found.push("a placeholder is shown");
  for (const table of root.querySelectorAll(".md-content table")) {
    const box = table.closest(".md-typeset__scrollwrap") || table.parentElement;
    if (box.scrollWidth <= box.clientWidth) continue;
    const title = [...table.querySelectorAll("th")].map(cell => cell.textContent).join(" | ").slice(0, 60);
    const words = `of ${box.scrollWidth} px in ${box.clientWidth}: ${title}`;
    const scrolls = ["auto", "scroll"].includes(view.getComputedStyle(box).overflowX);
    if (width > 1000 || !scrolls) found.push("a table " + words);
  }
  frame.remove();
  return found.map(fault => `${page} at ${width} px: ${fault}`);
}
(async () => {
  const faults = [];
  for (const page of PAGES) for (const width of WIDTHS) faults.push(...await look(page, width));
  fetch("/faults", {method: "POST", body: JSON.stringify(faults)});
})();
</script>"""


class Anchors(HTMLParser):
    """Names of a page's anchors, and addresses that it links to or loads."""

    def __init__(self, text: str):
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.names.add(value)
            elif key in ("href", "src") and value:
                self.targets.append(value)


def broken_links(site: Path) -> list[str]:
    """A sentence for each link within the site that leads nowhere."""
    site = site.resolve()
    pages = {path: Anchors(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are those of a site at the root of a server
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchor = unquote(parts.fragment)
            known = pages[file].names if file in pages else set()
            within = file.is_relative_to(site) and file.is_file()
            if not within or (anchor and file in pages and anchor not in known | {"__top"}):
                faults.append(f"{path.relative_to(site)}: the link {target} leads nowhere")
    return faults


class Handler(SimpleHTTPRequestHandler):
    """Serves the site with `LISTEN` on every page, and the page that looks at all others."""

    pages: Sequence[str]
    faults: Queue[list[str]]

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.path == "/look":
            text = LOOK.replace("PAGES", json.dumps(self.pages)).replace("WIDTHS", json.dumps(WIDTHS))
            self.send_page(text.encode())
        elif path.suffix == ".html" and path.is_file():
            self.send_page(path.read_bytes().replace(b"<head>", b"<head>" + LISTEN, 1))
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.faults.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_page(b"")

    def send_page(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def seen(site: Path, browser: str) -> list[str] | None:
    """A sentence for each fault that shows in the browser; None if the browser ends by itself."""
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    faults: Queue[list[str]] = Queue()
    handler = type("Here", (Handler,), {"pages": pages, "faults": faults})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",  # which is small in containers
            "--window-size=1300,950",
            f"--user-data-dir={profile}",
        ]
        address = f"http://127.0.0.1:{server.server_port}/look"
        process = subprocess.Popen(
            [browser, *options, "--remote-debugging-port=0", address],  # the port keeps it from ending at once
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + SECONDS
        try:
            while process.poll() is None:
                with suppress(Empty):
                    return faults.get(timeout=1)
                if time.monotonic() > end:
                    return [f"{browser} has not looked at {len(pages)} pages in {SECONDS} s"]
            return None
        finally:
            process.kill()
            process.wait()
            server.shutdown()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, metavar="DIR", help="what mkdocs has written")
    site = parser.parse_args(argv).site.resolve()
    if not (site / "index.html").is_file():
        parser.error(f"{site}: no index.html there")
    faults = broken_links(site)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    looked = seen(site, browser) if browser else None
    if looked is None:
        reason = f"{browser} does not run here" if browser else f"none of {', '.join(BROWSERS)} is installed"
        print(f"Only the links were checked: {reason}.")
    faults += looked or []
    if faults:
        sys.exit("\n".join(faults))
    print("The site has no faults.")


if __name__ == "__main__":
    main(sys.argv[1:])
