"""Test the attention benchmark: it runs in Triton's interpreter, and computes correctly."""

from __future__ import annotations

import json
import os

import pytest
import torch

from benchmarks import attention_cpu, attention_gpu
from benchmarks.attention import parser
from benchmarks.attention_gpu import interleaved, plan, spread
from benchmarks.attention_report import compared, markdown
from benchmarks.attention_tiles import Search, neighbours, row_text
from megatron.kernels.tile_sizes import TABLE, Tile, TileSizes, sizes
from tests.helpers.launch import run_script
from tests.helpers.paths import ROOT

TINY = ("--device", "interpreter", "--dtype", "fp32", "--heads", "1", "--head-sizes", "16",
        "--lengths", "16", "--tokens", "16", "--repeats", "1")  # fmt: skip


def benchmark(*options: object) -> str:
    """Run the benchmark, and return its stdout."""
    script, environ = ROOT / "benchmarks" / "attention.py", dict(os.environ)
    code, text = run_script(script, *options, cwd=ROOT, environ=environ, only="stdout")
    assert code == 0, text
    return text


def test_a_run_in_the_interpreter(tmp_path):
    only = ("--only", "kerple_log", "flash", "efficient", "published", "table")
    text = benchmark(*TINY, *only, "--out", tmp_path)
    report = json.loads((tmp_path / "attention_gpu.json").read_text())
    rows = {row["variant"]: row for row in report["timings"] if row["group"] == 0}
    grouped = {"fused kerple_log, group 4", "fused kerple_log, one key head"}
    assert set(rows) == {"fused kerple_log", "sdpa flash", "published"} | grouped
    for name, row in rows.items():
        assert row["forward_ms"] > 0 and row["forward_backward_ms"] > 0
        assert row.get("repeatable", True), name
    assert [row["variant"] for row in report["timings"] if row["group"] == 1] == [
        "fused kerple_log",
        "flex table",
    ]
    for row in report["accuracy"]:
        errors = [row[key] for key in ("out", "dq", "dk", "dv", "dtheta") if key in row]
        assert len(errors) == 4 + (row["variant"] != "sdpa flash") and max(errors) < 1e-5
    refused = {(row["variant"], row["what"]): row["why"] for row in report["skipped"]}
    assert "No viable backend" in refused["sdpa efficient, mask", "forward"]
    assert "backward" in refused["flex table", "forward_backward"]
    assert (tmp_path / "attention_gpu.md").read_text() in text
    assert (tmp_path / "attention_gpu.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_out_of_time_says_so(tmp_path):
    only = ("--only", "published", "--minutes", "0")
    attention_gpu.run(parser().parse_args([*TINY, *only, "--out", str(tmp_path)]))
    report = json.loads((tmp_path / "attention_gpu.json").read_text())
    assert not report["timings"] and report["accuracy"]
    assert {row["why"] for row in report["skipped"]} == {"not reached in 0 minutes"}


def test_a_cpu_run(tmp_path):
    small = ["--length", "32", "--heads", "2", "--head-size", "8", "--batches", "1", "--threads"]
    small += [str(torch.get_num_threads()), "--repeats", "2", "--warmup", "1"]
    small += ["--documents", "3", "--window", "7"]
    attention_cpu.run(parser().parse_args([*small, "--out", str(tmp_path)]))
    report = json.loads((tmp_path / "attention.json").read_text())
    names = ["published", "eager", "blocked", "sdpa, no bias"]
    names += ["blocked, 3 documents", "blocked, window 7"]
    assert [row["variant"] for row in report["timings"]] == names
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert all(row["dtheta"] < 1e-4 for row in report["accuracy"] if "dtheta" in row)


def test_the_plan_starts_with_what_goals_are_set_for():
    groups = plan(parser().parse_args(["--device", "cuda", "--out", "x"]))
    first = [group.length for group in groups[:8]]
    assert first == [512, 2048, 8192, 16384, 1024, 4096, 32768, 65536]
    assert all(len(group.names) == 12 for group in groups[:4])
    assert {group.head_size for group in groups[8:16]} == {128}
    late = [group.names for group in groups[16:]]
    assert late == [("fused kerple_log", "flex [H]", "flex table")] * 4


def test_slow_variants_take_part_in_fewer_rounds():
    class Fake:
        def device_ms(self, call, host):
            order.append(call)
            return 1.0

    order: list[str] = []
    times = interleaved({"a": ("a", 0.0, 6), "b": ("b", 0.0, 2)}, Fake())
    assert "".join(order) == "aaabaaab" and [len(x) for x in times.values()] == [6, 2]
    assert spread([4.0, 1.0, 3.0, 2.0]) == (2.5, 1.0, 4.0)


def timing(variant: str, forward: float, both: float, peak: float) -> dict:
    where = {"group": 0, "T": 512, "B": 32, "E": 64, "variant": variant, "peak_mb": peak}
    return where | {"forward_ms": forward, "forward_backward_ms": both}


def test_goals_beside_what_was_measured():
    timings = [
        timing("fused kerple_log", 1.1, 4.0, 100.5) | {"repeatable": True},
        timing("sdpa flash", 1.0, 3.0, 100.0),
        timing("flex table", 2.0, 6.0, 100.0),
    ]
    skipped = {"group": 0, "T": 512, "B": 32, "E": 64, "what": "forward_backward"}
    skipped |= {"variant": "published", "why": "out of memory"}
    setting = dict.fromkeys(("device", "dtype", "heads", "tokens", "torch", "triton", "date"), "?")
    setting |= {"command": "?", "repeats": 3, "matmul_tflops": 700.0, "dtype": "fp32"}
    report = {"setting": setting, "timings": timings, "skipped": [skipped], "accuracy": []}
    found = {row["what"]: row for row in compared(report)}
    verdicts = {what: row["met"] for what, row in found.items()}
    assert verdicts == {
        "fused / flash, forward": True,  # 1.1 of 1.15
        "fused / flash, forward + backward": False,  # 1.33 of 1.25
        "against published, forward + backward": True,  # it ran out of memory
        "against flex table, forward + backward": True,  # 1.5 of 1.3
        "against flex [H], forward + backward": None,
        "peak MB beyond flash": True,
        "gradients repeat bit for bit": True,
    }
    page = markdown(report, "no plot")
    assert "| 512 | fused / flash, forward | <= 1.15 | 1.1 | yes |" in page
    assert "| 512 | against published, forward + backward | >= 4 | out of memory | yes |" in page
    assert "| 512 | against flex [H], forward + backward | >= 10 | - | not measured |" in page


class Bowl:
    """Fake times with a minimum at M = 128, N = 32, 8 warps, 2 stages; five stages do not fit."""

    compiled: list[TileSizes] = []

    def compile(self, which: str, tiles: TileSizes) -> None:
        self.compiled.append(tiles)

    def ms(self, which: str, tiles: TileSizes) -> float:
        tile = getattr(tiles, which)
        assert tile.M * tile.N <= 128 * 128
        assert tiles in self.compiled or tile == Tile(64, 128, 4, 4)
        if tile.stages == 5:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 + abs(tile.M - 128) + abs(tile.N - 32) + (8 - tile.warps) + abs(tile.stages - 2)


def test_the_search_walks_to_the_best_tile():
    tiles = TileSizes(*[Tile(64, 128, 4, 4)] * 4)
    search = Search([Bowl()], tiles, deadline=float("inf"))
    search.improve("key")
    assert search.tiles.key == Tile(128, 32, 8, 2) and search.complete
    assert search.tiles.forward == tiles.forward
    assert any("shared memory" in row.get("why", "") for row in search.log)
    assert len(search.log) < 50  # of a grid of 700
    search.deadline = 0.0
    search.improve("query")
    assert search.tiles.query == tiles.query and not search.complete


def test_a_search_in_the_interpreter(tmp_path):
    """The time is up as soon as the committed tiles of every pass have been timed."""
    shown = benchmark(*TINY, "--tiles", "--minutes", "0.001", "--out", tmp_path)
    page = (tmp_path / "attention_tiles.md").read_text()
    committed = row_text((4, 16, False), TileSizes(*[Tile(16, 16, 4, 1)] * 4))
    assert committed + "  # the time was up" in page and page in shown
    log = json.loads((tmp_path / "attention_tiles.json").read_text())
    assert {row["pass"] for row in log if row["ms"]} >= {"forward", "query", "key"}


def test_rows_are_as_in_the_committed_table():
    key, tiles = (2, 64, False), TABLE[90][2, 64, False]
    assert eval("{" + row_text(key, tiles) + "}", {"sizes": sizes}) == {key: tiles}
    assert {(t.M, t.N) for t in neighbours(Tile(64, 64, 8, 2), square=True)} == {
        (32, 32),
        (64, 64),
        (128, 128),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_to_use(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parser().parse_args(["--device", "cuda", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no CUDA GPU here; --device cpu"):
        attention_gpu.run(args)
