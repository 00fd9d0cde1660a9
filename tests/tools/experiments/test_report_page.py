"""The report of many runs, as one page: what it says, in which order, without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd

from tools import table
from tools.experiments import grid_report
from tools.experiments.claims import Verdict
from tools.experiments.description import Description
from tools.experiments.grid import Grid
from tools.experiments.report_head import head_of


def test_run_folders_are_tabulated_without_a_grid(tmp_path, capsys):
    rows_of = {"a": ("rotary", 1, 9.0), "b": ("rotary", 2, 11.0), "c": ("alibi", 1, 5.0)}
    for name, (embedding, seed, value) in rows_of.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yml").write_text(f"pos_emb: {embedding}\nseed: {seed}\n")
        lines = ["length,perplexity,stderr", f"64,{value},0.1", f"128,{2 * value},0.1"]
        (folder / "extrapolation.csv").write_text("\n".join(lines))
        (folder / "other.csv").write_text("length,depth,perplexity\n64,1,7\n64,2,8\n")
        (folder / "suite").mkdir()
        for curve in ("by_position", "receptive_field"):
            (folder / "suite" / f"{curve}.csv").write_text("context,value,low\n1,5,4\n2,4,3\n")
    folders = [str(tmp_path / name) for name in rows_of]
    assert table.main([*folders, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "| rotary | 2 | 10.00 ± 1.41 | 20.00 ± 2.83 |" in out
    assert "| alibi | 1 | 5.000 | 10.00 |" in out
    html = (tmp_path / "out" / "report.html").read_text()
    for curve in ("perplexity", "loss by position", "loss by context"):
        assert (
            html.count(f"<figcaption>{curve[:1].upper() + curve[1:]} by length</figcaption>") == 1
        )
    latex = (tmp_path / "out" / "tables.tex").read_text()
    assert r"rotary & 2 & 10.00 $\pm$ 1.41 & 20.00 $\pm$ 2.83 \\" in latex


def test_names_with_underscores_can_be_set_by_latex(tmp_path):
    lines = pd.DataFrame({"pos_emb": ["kerple_log"], "64": ["10.00"]})
    section = grid_report.Section("small_copy", lines, "differs from kerple_log", lines)
    grid_report.write(tmp_path, HEAD, [section], [], [], {})
    latex = (tmp_path / "tables.tex").read_text()
    assert r"\caption{small\_copy: differs from kerple\_log.}" in latex
    assert re.search(r"(?<!\\)_", latex) is None


def test_runs_whose_folders_have_the_same_last_name_are_rows_of_their_own(
    tmp_path, capsys, monkeypatch
):
    for name, value in (("x/a", 9), ("y/a", 11), ("y/b", 5)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yml").write_text("pos_emb: rotary\nseed: 1\n")
        (tmp_path / name / "extrapolation.csv").write_text(f"length,perplexity\n64,{value}\n")
    monkeypatch.chdir(tmp_path / "y" / "b")
    assert table.main([".", "../a", "../../x/a", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for row in ("| b | 1 | 5.000 |", "| ../a | 1 | 11.00 |", "| ../../x/a | 1 | 9.000 |"):
        assert row in out
    assert table.main([".", "../a", "../b", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "error: ../b is given twice; name each run once\n"


HEAD = {
    "title": "A <title>", "question": "Why?", "methods": "Two sentences.", "models": "models",
    "rebuild": "python a\npython b", "origin": "commit 1",
}  # fmt: skip


def page(verdicts=(), remarks=()) -> str:
    rows = [
        {"embedding": name, "seed": 1, "length": n, "metric": "perplexity", "value": 9.0 + n,
         "folder": "none"}
        for name in ("alibi", "rotary") for n in (64, 128)
    ]  # fmt: skip
    moved = pd.DataFrame(columns=["embedding", "parameter", "seed", "folder"])
    moved = moved.assign(start=[], end=[], change=[], relative=[])
    found = pd.DataFrame(rows)
    parts = grid_report.sections(found, moved, "embedding", "perplexity", None, False, "models")
    return grid_report.page("html", HEAD, parts, verdicts, remarks)


def test_verdicts_come_first_and_the_commands_last():
    numbers = {"seeds": 5, "change": -4.39, "low": -5.85, "high": -2.92, "p": 0.0006}
    verdicts = [
        Verdict("P1", "alibi is <below> rotary", **numbers, holm=0.0019, word="holds"),
        Verdict("P2", "alibi is equal to rotary"),
    ]
    html = page(verdicts, ["rotary-2: failed"])
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.partition("<body>")[2]))
    order = [
        *("A &lt;title&gt;", "Why?", "Two sentences.", "Verdicts", "Holds (P1): alibi is"),
        "-4.39%, 95% interval -5.85 to -2.92, 5 seeds, p = 0.0006 (0.0019 after Holm",
        *("Not tested (P2): alibi is equal to rotary. Too few runs", "All runs", "Remarks"),
        *("rotary-2: failed", "How to rebuild", "python b", "commit 1"),
    ]
    places = [shown.index(each) for each in order]
    assert places == sorted(places)
    assert 'class="holds"' in html and 'class="not tested"' in html
    assert "&lt;below&gt;" in html and "<below>" not in html


def test_without_claims_and_remarks_their_headings_are_missing():
    html = page()
    assert "Verdicts" not in html and "Remarks" not in html


def test_the_page_loads_nothing_and_fits_a_phone_and_the_dark():
    html = page()
    sources = re.findall(r"""(?:src|href)=["']([^"']*)|url\(([^)]*)""", html)
    assert (
        sources and all(src.startswith("data:") for src, url in sources) and "@import" not in html
    )
    assert 'name="viewport" content="width=device-width' in html
    assert "prefers-color-scheme: dark" in html and "overflow-x: auto" in html
    tables = len(re.findall("<table", html))
    assert tables and html.count('<div class="scroll"><table') == tables


def test_the_head_says_how_the_models_were_trained_and_where(tmp_path):
    start = {"time": "2026-11-22T01:02:03+00:00", "code": {"commit": "0123456789abcdef"}}
    for name, steps, seed in (("a", 700, 3), ("b", 1400, 4)):
        folder = tmp_path / name
        folder.mkdir()
        keys = {"num_layers": 4, "hidden_size": 128, "train_iters": steps, "train_batch_size": 16}
        keys |= {"seq_length": 1024, "data_path": "data/x", "eval_split": "test", "seed": seed}
        (folder / "config.yml").write_text("".join(f"{k}: {v}\n" for k, v in keys.items()))
        starts = [{}, start | {"ranks": {"host: EPYC": 2}}]
        if name == "a":
            (folder / "run.json").write_text(json.dumps({"starts": starts}))
    found = pd.DataFrame({"folder": [str(tmp_path / each) for each in "ab"], "seed": [3, 4]})
    head = head_of(found, None, ["a b", "c", "--out", "o"])
    assert head["methods"] == (
        "2 models with 4 layers of width 128 were trained for 700 or 1,400 steps of 16 sequences "
        "of 1,024 tokens on data/x, with 2 seeds (3 to 4). They are measured on the test split."
    )
    assert head["models"] == "4 layers of width 128, data/x, trained at 1,024 tokens, 2026-11-22"
    assert head["rebuild"].splitlines() == [
        f"python train.py {tmp_path}/a/config.yml", f"python train.py {tmp_path}/b/config.yml",
        "python tools/table.py 'a b' c --out o",
    ]  # fmt: skip
    assert head["origin"].startswith(
        "The runs: 2026-11-22, commit 0123456789ab on host: EPYC. This"
    )
    about = Description.model_validate(
        {"title": "T", "question": "Q?", "runs": "r", "configs": ["c"], "axes": {"e": ["a"]},
         "seeds": [1], "lengths": [8]}
    )  # fmt: skip
    grid = Grid(Path("g.yml"), about, {}, Path("r"), ())
    head = head_of(found, grid, ["g.yml", "--set", "a=b", "--out", "o"])
    assert (head["title"], head["question"]) == ("T", "Q?")
    assert head["rebuild"].splitlines()[0] == "python tools/sweep.py g.yml --set a=b"
