"""Test the documentation site: it builds without a warning, and its generated page is current."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron.config.fields import key_of
from megatron.config.neox.known_keys import KNOWN_KEYS
from megatron.config.schema import SECTIONS
from tools.pages import reference


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


def test_the_site_has_every_page_and_its_files(repo_root, site):
    pages = [path.relative_to(repo_root) for path in (repo_root / "docs").rglob("*.md")]
    assert all((site / page.with_suffix("") / "index.html").is_file() for page in pages)
    home = (site / "index.html").read_text()
    assert 'src="docs/results/code/by_length.png"' in home
    assert (site / "docs/results/code/by_length.png").is_file()
    assert 'href="../../configs/"' in (site / "docs" / "training" / "index.html").read_text()
    assert (site / "tools" / "compiled_kernels.csv").is_file(), "linked, outside docs/"


def test_pages_ask_no_foreign_host_for_anything(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]*)"', page.read_text()), page


def test_the_configuration_reference_is_current():
    text = reference.PAGE.read_text()
    assert text == reference.page(), "run `python tools/pages/reference.py`"
    assert {key for key in KNOWN_KEYS if f"`{key}`" not in text} == set()
    for section in SECTIONS.values():
        texts = reference.meanings(section)
        keys = [name for name in section.model_fields if key_of(section, name)]
        assert [name for name in keys if not texts[name]] == [], "each needs a comment"


def test_the_messages_on_the_page_of_errors_exist(repo_root):
    """Indented lines quote this project's messages, blocks marked `text` are examples."""
    page = (repo_root / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^    (\S.+)$", page, re.MULTILINE)
    assert len(quoted) > 20
    parts = {part.strip(" .;") for line in quoted for part in line.split("...")}
    sources = [repo_root / "train.py", *(repo_root / "megatron").rglob("*.py")]
    product = "\n".join(path.read_text() for path in sources)
    product = re.sub(r'"\s+f?"', "", product)  # literals that Python joins
    assert sorted(part for part in parts if part not in product) == []
