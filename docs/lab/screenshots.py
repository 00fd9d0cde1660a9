"""Take screenshots of HTML pages in headless Chromium: wide and narrow, light and dark.

    apt-get install chromium && pip install playwright==1.65.2
    python docs/lab/screenshots.py docs/results/code/report.html --out docs/lab/screenshots

    pip install cmarkgfm==2025.10.22
    npm pack github-markdown-css@5.9.0 && tar xzf github-markdown-css-5.9.0.tgz
    python docs/lab/screenshots.py README.md --css package/github-markdown.css --out shots

A Markdown file is shown as GitHub shows it: rendered by cmarkgfm, with GitHub's style sheet. The
PNG files have at most 256 colours.

Each page gives four PNG files of its full height, at most LONGEST pixels, such as
`report-390-dark.png`. A page may also be an address such as `http://localhost:6006`. Chromium
reaches no other host: a file that asks for one is named, as is a page that scrolls sideways. Then
the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
LONGEST = 6000


def main() -> int:
    parser = argparse.ArgumentParser(description="Screenshots of pages in headless Chromium")
    parser.add_argument("pages", nargs="+", help="HTML files, or addresses on this machine")
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG files")
    parser.add_argument("--css", type=Path, help="style sheet of Markdown files")
    parser.add_argument("--wait", type=float, default=0.3, help="seconds before each picture")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    faults: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        for width in WIDTHS:
            for scheme in SCHEMES:
                context = browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme=scheme
                )
                for given in args.pages:
                    page, picture = context.new_page(), f"{name(given)}-{width}-{scheme}.png"
                    if given.endswith(".md"):
                        with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
                            file.write(rendered(Path(given), args.css.read_text()))
                            file.flush()
                            faults += taken(page, file.name, args.out / picture, args.wait)
                    else:
                        faults += taken(page, given, args.out / picture, args.wait)
                    page.close()
                context.close()
        browser.close()
    print("\n".join(dict.fromkeys(faults)) or "no faults")
    return bool(faults)


def name(given: str) -> str:
    """Return the name of a page's pictures: that of its file, or of its folder for index.html."""
    path = Path(given)
    found = path.parent.name if path.stem == "index" else path.stem
    return found.replace(":", "_").removeprefix("#")


def rendered(path: Path, css: str) -> str:
    """Return a Markdown file as an HTML page like GitHub's."""
    import cmarkgfm

    head = f'<base href="{path.resolve().parent.as_uri()}/"><style>{css}</style>'
    head += "<style>@media (prefers-color-scheme: dark) { body { background: #0d1117 } }</style>"
    head += '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    style = "max-width: 1012px; margin: auto; padding: 16px; box-sizing: border-box"
    body = cmarkgfm.github_flavored_markdown_to_html(path.read_text())
    return f'<!doctype html>{head}<article class="markdown-body" style="{style}">{body}</article>'


def taken(page: Page, given: str, path: Path, wait: float) -> list[str]:
    """Take a screenshot of a page, and return the faults of the page."""
    local, origin = "://" in given, "/".join(given.split("/")[:3]) + "/"
    asked: list[str] = []

    def reach(route) -> None:
        url = route.request.url
        if url.startswith(("file:", "data:", "blob:")) or (local and url.startswith(origin)):
            route.continue_()
        else:
            asked.append(f"{given}: asks for {url}")
            route.abort()

    page.route("**/*", reach)
    page.goto(given if local else Path(given).resolve().as_uri())
    page.wait_for_timeout(1000 * wait)
    wide, height = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    )
    width = page.viewport_size["width"]
    page.set_viewport_size({"width": width, "height": min(height, LONGEST)})
    page.screenshot(path=path)
    picture = Image.open(path).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    print(f"{path}: {width} x {height} pixels")
    return asked + ([f"{given}: {wide} pixels wide at {width}"] if wide > width else [])


if __name__ == "__main__":
    raise SystemExit(main())
