"""Test which figures of a page are changed to look for those that no test holds."""

from tests.pages.unheld_figures import figures

PAGE = """1. It takes 3.5 s for 1,024 tokens, see [page 9](page9.md) and arXiv 2205.09921.
2. `--steps 7` gives 1e-9, and <img width=300> 20%.

```
step 8
```
"""


def test_only_the_figures_of_sentences_are_changed():
    found = [PAGE[begin:end] for begin, end in figures(PAGE)]
    assert found == ["3.5", "1,024", "9", "1e-9", "20"]
