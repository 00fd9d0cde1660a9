"""Choose the files of the documentation site, rank its search results, and typeset formulas.

`mkdocs.yml` names this module as a hook.

The site has the same folders as the repository, so a relative link works in both. The site contains
README.md, all pages of docs/, and every file of the repository to which one of these pages links.
"""

import html
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LAB = ("docs/lab/", "docs/results/", "benchmarks/", "tests/", "CHANGELOG.md")
_FORMULA = re.compile(r'class="arithmatex">\\([(\[])(.*?)\\[)\]]<', re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a link to the repository, if the environment variable REPOSITORY_URL contains an address.

    The theme's own option `repo_url` would ask the host for the repository's number of stars.
    """
    if address := os.environ.get("REPOSITORY_URL"):
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages in `files` by README.md, all pages of docs/, and all files they link to."""
    root = Path(config.config_file_path).parent
    own = [file for file in files if file.src_dir == config.docs_dir]
    for file in [file for file in own if file.src_uri not in config.extra_css]:
        files.remove(file)
    for name in sorted(_reached(root) | {config.theme["logo"], config.theme["favicon"]}):
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rank pages about the project's development below the pages for users in search results.

    The page's text is returned unchanged.
    """
    if page.file.src_uri.startswith(_LAB):
        page.meta["search"] = {"boost": 0.0001}
    return markdown


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace TeX formulas by MathML, which browsers show without a script or a font."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "[" else "inline"
    return f'class="formula">{convert(html.unescape(found[2]).strip(), display=display)}<'


def _reached(root: Path) -> set[str]:
    """Return the paths of all pages, and of the files to which they link, relative to `root`."""
    found: set[str] = set()
    ahead = [root / "README.md", *(root / "docs").rglob("*.md")]
    while ahead:
        path = ahead.pop()
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        found.add(name)
        if path.suffix == ".md":
            ahead += _targets(path)
    return found


def _targets(page: Path) -> list[Path]:
    """Return the existing files to which a page links. MkDocs itself reports broken links."""
    links = _LINK.findall(page.read_text("utf-8"))
    targets = [(page.parent / link).resolve() for link in links if "://" not in link]
    return [target for target in targets if target.is_file()]
