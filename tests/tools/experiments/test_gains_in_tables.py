"""Test that tables have the gains of far text that the suite has measured."""

from __future__ import annotations

from tools import table


def test_tables_have_columns_with_the_gains_of_far_text(tmp_path, capsys):
    for name, gain in (("a", 0.01), ("b", 0.03)):
        suite = tmp_path / name / "suite"
        suite.mkdir(parents=True)
        (tmp_path / name / "config.yml").write_text(f"pos_emb: rotary\nseed: {ord(name)}\n")
        (tmp_path / name / "extrapolation.csv").write_text("length,perplexity\n64,8\n128,9\n")
        (suite / "windowed_twin.csv").write_text(
            f"context,bins,value\n65,all,{gain}\n65,doubling,9\n"
        )
        (suite / "exact_context.csv").write_text(f"context,value\n64,{gain + 0.1}\n")
    folders = [str(tmp_path / name) for name in "ab"]
    assert table.main([*folders, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "| embedding | seeds | 64 | 128 | far gain | twin's gain |" in out
    assert "| +0.1200 ± 0.0141 | +0.0200 ± 0.0141 |" in out
