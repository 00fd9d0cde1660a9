"""Test the documentation site: it builds strictly, asks no other host, and its search works."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

from megatron.config.fields import key_of
from megatron.config.neox.known_keys import KNOWN_KEYS
from megatron.config.schema import SECTIONS
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def site(repo_root, tmp_path_factory):
    """Build the site, in which every link and anchor must lead somewhere."""
    folder = tmp_path_factory.mktemp("site")
    code = "import sys, mkdocs.__main__ as m; m.cli(standalone_mode=False); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "build", "--strict", "--site-dir", folder],
        cwd=repo_root, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not {"torch", "deepspeed"} & set(done.stdout.split())
    return folder


@pytest.fixture(scope="module")
def search(site):
    from tests.pages.site_search import SiteSearch  # its library takes half a second to import

    return SiteSearch(site)


def test_the_site_has_every_page_and_its_files(repo_root, site):
    pages = [path.relative_to(repo_root) for path in (repo_root / "docs").rglob("*.md")]
    assert all((site / page.with_suffix("") / "index.html").is_file() for page in pages)
    home = (site / "index.html").read_text()
    assert 'src="docs/results/code/by_length.png"' in home
    assert (site / "docs/results/code/by_length.png").is_file()
    assert 'href="docs/figures/logo.svg"' in home and "<title>KERPLE-NeoX</title>" in home
    assert 'href="../../configs/"' in (site / "docs" / "training" / "index.html").read_text()
    assert (site / "tools" / "compiled_kernels.csv").is_file(), "linked, outside docs/"


def foreign(text: str) -> list[str]:
    """Return the addresses of other hosts that a browser loads for an HTML or CSS text."""
    tags = r"""<(?:script|img|link|source|iframe|video|object|embed)\b[^>]*?"""
    loaded = re.findall(tags + r"""(?:src|href|srcset|data)=["']?((?:https?:)?//[^"'\s>]+)""", text)
    return loaded + re.findall(r"""(?:url\(|@import )["']?((?:https?:)?//[^"')]+)""", text)


def test_pages_ask_no_foreign_host_for_anything(site):
    """`python -m tests.pages.browser` tries the same in a browser."""
    files = [path for kind in ("html", "css", "svg") for path in site.rglob(f"*.{kind}")]
    assert len(files) > 60
    assert {path.name: found for path in files if (found := foreign(path.read_text()))} == {}
    pages = [path.read_text() for path in site.rglob("*.html")]
    [script] = site.glob("assets/javascripts/bundle.*.js")
    addresses = set(re.findall(r"""[("`](https?://[^"`$]+)""", script.read_text()))
    assert addresses - {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"} <= {
        "https://api.github.com/repos/",  # the theme's link to a repository
        "https://api.github.com/users/",
        "https://unpkg.com/mermaid@11/dist/mermaid.min.js",  # for blocks of the class "mermaid"
        "https://unpkg.com/resize-observer-polyfill",  # for browsers before 2020
    }
    for page in pages:
        assert 'data-md-component="source"' not in page and 'class="mermaid"' not in page


@pytest.mark.parametrize(
    "text",
    [
        '<img alt="x" src="https://a.org/b.png">',
        '<link rel="stylesheet" href="//a.org/b.css">',
        "@import 'https://a.org/b.css';",
        "p { background: url(https://a.org/b.png) }",
    ],
)
def test_a_foreign_host_is_found(text):
    assert len(foreign(text)) == 1


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("resume", "docs/resuming/"),
        ("out of memory", "docs/memory_and_speed/#out-of-memory"),
        ("slurm", "docs/cluster/#slurm"),
        ("learning rate", "docs/training/#learning-rate"),
        ("tokenizer", "docs/data/#tokenizers"),
        ("export", "docs/huggingface/#export"),
        ("install", "docs/install/"),
        ("checkpoint", "docs/resuming/"),
        ("wandb", "docs/logs/#weights-biases-wandb"),
    ],
)
def test_the_search_shows_the_right_section_first(search, words, first):
    """The browser groups results by page, so the page's own entry may be above its section's."""
    found = search.results(words)
    sections = [each for each in found if "#" in each]
    assert found[0].partition("#")[0] == first.partition("#")[0]
    assert first in (found[0], *sections[:1]) and found.index(first) < 2
    assert not [place for place in found[:3] if place.startswith(("docs/lab/", "benchmarks/"))]


def test_formulas_are_mathml(site):
    page = (site / "docs" / "attention" / "index.html").read_text()
    assert page.count("<math ") > 40 and "<mfrac>" in page
    for path in site.rglob("*.html"):
        assert "arithmatex" not in path.read_text(), path


def test_the_api_page_has_the_docstrings(site):
    page = (site / "docs" / "api" / "index.html").read_text()
    names = (
        "attention.attend",
        "positional.load",
        "run_folder.RunFolder",
        "engine.open_run.open_run",
    )
    assert all(f'id="megatron.{name}"' in page for name in names)
    assert "Whether to return (output, lse)." in page and "Raises:" in page


def test_the_diagrams_are_those_of_the_script(repo_root):
    folder = repo_root / "docs" / "figures"
    drawn = runpy.run_path(str(folder / "diagrams.py"))["DRAWINGS"]
    assert {path.stem for path in folder.glob("*.svg")} == {*drawn, "logo"}
    for name, draw in drawn.items():
        assert (folder / f"{name}.svg").read_text() == draw(), "run docs/figures/diagrams.py"


def test_the_configuration_reference_is_current():
    reference = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))
    text = reference["PAGE"].read_text()
    assert text == reference["page"](), "run `python docs/site/reference.py`"
    assert {key for key in KNOWN_KEYS if f"`{key}`" not in text} == set()
    for section in SECTIONS.values():
        texts = reference["meanings"](section)
        keys = [name for name in section.model_fields if key_of(section, name)]
        assert [name for name in keys if not texts[name]] == [], "each needs a comment"


def test_the_messages_on_the_pages_of_errors_exist(repo_root):
    """Indented lines quote this project's messages, blocks marked `text` are examples."""
    pages = ("troubleshooting.md", "troubleshooting_runs.md")
    page = "".join((repo_root / "docs" / name).read_text() for name in pages)
    quoted = re.findall(r"^    (\S.+)$", page, re.MULTILINE)
    assert len(quoted) > 20
    parts = {part.strip(" .;") for line in quoted for part in line.split("...")}
    sources = [repo_root / "train.py", *(repo_root / "megatron").rglob("*.py")]
    product = "\n".join(path.read_text() for path in sources)
    product = re.sub(r'"\s+f?"', "", product)  # literals that Python joins
    assert sorted(part for part in parts if part not in product) == []
