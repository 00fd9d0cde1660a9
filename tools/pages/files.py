"""Choose the files of the documentation site; `mkdocs.yml` names this module as a hook.

The site has the same folders as the repository, so a relative link works in both. The site contains
README.md, all pages of docs/, and every file of the repository that one of these pages links to.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Choose the pages of the site: README.md, all pages of docs/, and all files they link to."""
    # They replace the pages in `files`.
    root = Path(config.config_file_path).parent
    own = [file for file in files if file.src_dir == config.docs_dir]
    for file in [file for file in own if file.src_uri not in config.extra_css]:
        files.remove(file)
    for name in sorted(_reached(root)):
        files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def _reached(root: Path) -> set[str]:
    """Return the paths, relative to `root`, of all pages and of the files that they link to."""
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
    """Return the files that a page links to. Links to missing files are left to MkDocs."""
    links = _LINK.findall(page.read_text("utf-8"))
    targets = [(page.parent / link).resolve() for link in links if "://" not in link]
    return [target for target in targets if target.is_file()]
