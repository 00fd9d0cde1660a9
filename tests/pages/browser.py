"""Open the built site in headless Chromium: which hosts does it ask, and how does it look?

    mkdocs build --site-dir runs/site
    python -m tests.pages.browser runs/site --shots runs/shots

The first lines name the hosts outside the site that a page asked; there should be none. Chromium
(Debian's package `chromium`) resolves no name but localhost. What it asks by itself, for updates
and the like, it asks for a page with a single text field, too: these hosts are left out. `--shots`
writes pictures of some pages, 1280 and 390 pixels wide, light and dark. The exit code is 1 if a
page asked another host.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGES = ("", "docs/quickstart/", "docs/attention/", "docs/training/", "docs/results/", "docs/api/")
SEARCH = "?q=learning+rate"
CHROMIUM = [
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
    "--disable-features=AutofillServerCommunication",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost",
]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def asked(address: str) -> set[str]:
    """Return the hosts that Chromium asks while it shows a page for some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "net.json"
        options = [f"--log-net-log={log}", f"--user-data-dir={folder}/user"]
        wait = ["--virtual-time-budget=8000", "--dump-dom"]
        command = [*CHROMIUM, *options, *wait, address]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
        return set(re.findall(r'"url":"https?://([^"/:]+)', log.read_text("utf-8", "replace")))


def shoot(address: str, width: int, dark: bool, picture: Path) -> None:
    """Write a picture of a page."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    size = [f"--window-size={width},1800", "--virtual-time-budget=4000", f"--screenshot={picture}"]
    subprocess.run(
        [*CHROMIUM, scheme, *size, address], capture_output=True, timeout=120, check=True
    )


def main() -> int:
    """Open all pages, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path)
    arguments = parser.parse_args()
    handler = functools.partial(Quiet, directory=str(arguments.site))
    server = ThreadingHTTPServer(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://localhost:{server.server_port}/"
    own = asked("data:text/html,<form><input></form>") | {"localhost"}
    foreign = {page: sorted(asked(home + page) - own) for page in (*PAGES, SEARCH)}
    foreign = {page: hosts for page, hosts in foreign.items() if hosts}
    print(json.dumps({"pages": len(PAGES) + 1, "asked of other hosts": foreign}, indent=1))
    if arguments.shots:
        arguments.shots.mkdir(parents=True, exist_ok=True)
        for page in PAGES:
            for width in (1280, 390):
                for dark in (False, True):
                    name = f"{page.strip('/').replace('/', '_') or 'home'}_{width}"
                    picture = arguments.shots / f"{name}{'_dark' if dark else ''}.png"
                    shoot(home + page, width, dark, picture)
    return 1 if foreign else 0


if __name__ == "__main__":
    sys.exit(main())
