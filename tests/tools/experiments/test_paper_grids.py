"""Test the grids of configs/paper: they compose, and agree with the paper and the plan."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megatron.config import Config, load_config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.engine.build import plan_of
from megatron.files import parse_json
from tests.helpers.paths import CONFIGS, FIXTURES, GRIDS, ROOT
from tools import sweep, table, train_tokenizer
from tools.experiments import runner
from tools.experiments.grid import Cell, filled, read_grid
from tools.experiments.grid_report import PAPER

COUNTS = {
    "table3.yml": 90, "xl.yml": 45, "table5.yml": 45, "table6.yml": 75, "released.yml": 6,
    "stand_in.yml": 24, "stand_in_lr.yml": 24, "stand_in_backends.yml": 10,
    "stand_in_fused.yml": 10, "stand_in_terms.yml": 45, "length_tasks.yml": 231,
    "recipe_screen.yml": 8, "recipe_constant.yml": 12, "recipe_dose.yml": 48,
    "retrofit_base.yml": 3, "retrofit.yml": 27, "arena_rates.yml": 39, "arena.yml": 72,
    "arena_tasks.yml": 96, "seconds_per_step.yml": 10, "wikitext103.yml": 6,
}  # fmt: skip
TASK_GRIDS = {"length_tasks.yml", "arena_tasks.yml"}
RETROFITS = {
    "more": ("rotary", None, None, "gentle"),
    "linear": ("rotary", "linear", 16.0, "gentle"),
    "ntk": ("rotary", "ntk", 16.0, "gentle"),
    "yarn": ("rotary", "yarn", 16.0, "gentle"),
    "rotary_kerple_log": ("rotary+kerple_log", None, None, "gentle"),
    "kerple_log": ("kerple_log", None, None, "gentle"),
    "kerple_log_fit": ("kerple_log", None, None, "fit"),
    "none": ("none", None, None, "gentle"),
    "alibi": ("alibi", None, None, "gentle"),
}
"""Maps each method of retrofit.yml to its embedding, `rope_scaling` and `retrofit_init`."""


def cells(name: str, **given: str) -> list[Cell]:
    return list(read_grid(CONFIGS / "paper" / name, given).cells)


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_grid_is_counted():
    assert {path.name for path in GRIDS if path.parent.name == "paper"} == COUNTS.keys()
    for name, count in COUNTS.items():
        found = cells(name)
        assert len(found) == len({cell.name for cell in found}) == count


@pytest.mark.parametrize("name", sorted(COUNTS.keys() - TASK_GRIDS - {"released.yml"}))
def test_every_cell_composes(name):
    found = cells(name)
    for cell in [cell for cell in found if cell.seed == found[0].seed]:
        config = cell.config()
        embedding = cell.axes.get("embedding", "kerple_log")
        if name == "retrofit.yml":
            embedding, *given = RETROFITS[cell.axes["method"]]
            scaling = [config.model.rope_scaling.get(key) for key in ("rope_type", "factor")]
            assert [*scaling, config.checkpoint.retrofit_init] == given
            assert config.checkpoint.finetune and config.training.train_iters == 280
        assert (
            config.model.pos_emb == embedding.replace("+", " + ")
            and config.training.seed == cell.seed
        )
        assert cell.axes.get("corpus", "") in str(config.data.data_path)
        start = str(cell.folder)
        if name == "recipe_dose.yml":
            at = config.training.train_iters * 4 // 5
            start = f"runs/recipe_constant/{embedding}-{cell.seed}/global_step{at}"
        if name == "retrofit.yml":
            start = f"runs/retrofit_base/rotary-{cell.seed}"
        assert (config.checkpoint.save, config.checkpoint.load) == (str(cell.folder), start)
        sequences = 32
        if name.startswith(("stand_in", "recipe", "retrofit", "arena")):
            sequences = 2048 // config.model.seq_length
        assert config.batch.train_batch_size == sequences


def test_table_3_is_the_papers_training():
    config = cells("table3.yml")[0].config()
    assert {cell.seed for cell in cells("table3.yml")} == {1235, 1236, 1237, 1238, 1239}
    assert (config.model.num_layers, config.model.hidden_size) == (12, 768)
    assert (config.model.seq_length, config.training.train_iters) == (512, 50_000)
    assert config.evaluation.eval_tokens == 320 * max(config.evaluation.eval_lengths)
    longer = cells("table3.yml", train_length="1024")[0].config()
    assert (longer.model.seq_length, longer.model.max_position_embeddings) == (1024, 1024)
    large = cells("xl.yml")[0].config()
    assert (large.model.num_layers, large.model.hidden_size) == (24, 2048)
    assert (large.training.train_iters, large.training.precision) == (150_000, "fp16")
    assert large.to_flat_dict()["optimizer"]["params"]["lr"] == 2e-4


def test_the_papers_numbers_cover_its_tables():
    numbers = parse_json(PAPER.read_text())["tables"]
    lengths = {"small-512": {5, 6}, "small-1024": {5}, "xl-512": {6}}
    for name, counts in lengths.items():
        assert {len(v) for by_row in numbers[name].values() for v in by_row.values()} == counts
    assert numbers["small-512"]["openwebtext2"]["kerple_log"]["16384"] == [21.4, 0.6]
    assert numbers["small-512"]["github"]["rotary"]["1024"] == [3.86, 0.25]
    assert numbers["small-512"]["arxiv"]["kerple_log3"]["8192"] == [5.0, 0.11]
    assert numbers["small-512"]["github"]["gaussian3"]["2048"] == [20.0, 4.8]
    assert numbers["small-1024"]["arxiv"]["rpe"]["16384"] == [16.0, 4.77]
    assert numbers["xl-512"]["openwebtext2"]["alibi"]["16384"] == [16.5, 0.3]
    shown: dict[str, set[str]] = {name: set() for name in numbers}
    for name in ("table3.yml", "table5.yml", "table6.yml", "xl.yml"):
        grid = read_grid(CONFIGS / "paper" / name)
        assert grid.about.paper
        key = filled(grid.about.paper.table, grid.variables)
        assert numbers[key].keys() == set(grid.about.axes["corpus"])
        shown[key] |= set(grid.about.axes["embedding"])
    shown["small-1024"] = shown["xl-512"]
    for name, rows in shown.items():
        assert all(by_row.keys() == rows for by_row in numbers[name].values())


@pytest.mark.parametrize("name", ["stand_in_terms.yml", "arena.yml", *sorted(TASK_GRIDS)])
def test_the_terms_can_be_trained(name):
    found = {cell.axes["embedding"]: cell for cell in cells(name)}
    for embedding, cell in found.items():
        plan = plan_of(cell.config(), 300, device_type="cpu")
        assert plan.pos.name == embedding.replace("+", " + ")


def test_the_arena_on_other_text():
    given = {"runs": "runs/other", "data": "data/prose_text_document", "vocab": "v.json"}
    given["split"] = "80,5,15"
    code, other = cells("arena.yml")[0], cells("arena.yml", **given)[0]
    found = other.config()
    assert other.folder == Path("runs/other/kerple_log-1246") != code.folder
    assert (found.data.data_path, found.data.vocab_file) == (given["data"], given["vocab"])
    of_code = code.config()
    changed = {name: getattr(of_code.data, name) for name in ("data_path", "vocab_file", "split")}
    assert found.data.split == given["split"] != of_code.data.split == "90,5,5"
    assert found.data.model_copy(update=changed) == of_code.data
    assert found.optimizer == of_code.optimizer and found.training == of_code.training


def test_each_length_task_has_its_own_lengths():
    for cell in cells("length_tasks.yml")[::33]:
        evaluated = cell.config().evaluation.eval_lengths
        alone = load_config(cell.configs, ["train_batch_size=64"])
        assert alone.data.data_path == f"builtin:{cell.axes['task']}"
        assert evaluated == alone.evaluation.eval_lengths


def test_the_plan_and_the_hand_scale_grid_agree():
    plan = (ROOT / "docs" / "lab" / "plan.md").read_text()
    grid = read_grid(CONFIGS / "paper" / "stand_in.yml")
    assert set(re.findall(r"^\| (P\d) \|", plan, re.M)) == grid.about.endpoints.keys()
    seeds = {
        name: {cell.seed for cell in grid.cells if cell.axes["embedding"] == name}
        for name in grid.about.axes["embedding"]
    }
    assert {name for name, found in seeds.items() if len(found) == 5} == {
        "kerple_log", "kerple_power", "alibi"
    }  # fmt: skip
    assert all(len(found) in (3, 5) for found in seeds.values())
    assert {cell.seed for cell in cells("stand_in_lr.yml")}.isdisjoint(set().union(*seeds.values()))
    config: Config = grid.cells[0].config()
    assert config.model.rpe_max_distance * 4 == config.model.seq_length == 128
    assert max(config.evaluation.eval_lengths) == 64 * config.model.seq_length


def test_a_release_gives_its_table(tmp_path, capsys, monkeypatch, start_forked):
    monkeypatch.setattr(runner, "start", start_forked)
    data = tmp_path / "data.yml"
    data.write_text(f"data_path: builtin:python-stdlib\ndata_dir: {tmp_path}\nsplit: 90,5,5\n")
    text = (CONFIGS / "paper" / "released.yml").read_text()
    release, model = tmp_path / "unzipped", FIXTURES / "parity" / "models" / "kerple_log"
    shutil.copytree(model / "checkpoint", release / "kerple_log_github_1235_checkpoints")
    for old, new in (
        ("configs/model/small.yml", str(model / "config.yml")),
        ("configs/data/{corpus}.yml", str(data)),
        ("runs/paper", str(tmp_path)),
        ("[512, 1024, 2048, 4096, 8192, 16384]", "[128, 512]"),
        ("5242880", "1024"),
    ):
        assert old in text
        text = text.replace(old, new)
    grid = tmp_path / "released.yml"
    grid.write_text(text)
    given = ["--set", f"release={release}", "--set", "cluster=cpu"]
    assert sweep.main([str(grid), *given, "--only", "github-kerple_log-*"]) == 0
    assert "github-kerple_log-1235: finished" in capsys.readouterr().out
    out = ["--against", "paper", "--out", str(tmp_path / "out")]
    assert table.main([str(grid), *given, *out]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| kerple_log \| 1 \| [\d.,]+ \| [\d.,]+ \(3\.4 ± 0\.2\) \|", printed)
    assert "- openwebtext2-kerple_power_ap_-1235: new, not counted" in printed


def test_a_tokenizer_is_trained(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("low lower lowest é " * 50)
    file = tmp_path / "new" / "tokenizer.json"
    arguments = [str(tmp_path / "texts"), "--size", "262", "--out", str(file)]
    assert train_tokenizer.main(arguments) == 0
    tokenizer = build_tokenizer("HFTokenizer", str(file))
    assert tokenizer.vocab_size == 262 and len(json.loads(file.read_text())["model"]["merges"]) == 5
    ids = tokenizer.encode("low é\n")
    assert tokenizer.decode(ids) == "low é\n" and len(ids) < len("low é\n".encode())
    again = tmp_path / "again.json"
    assert train_tokenizer.main([*arguments[:-1], str(again)]) == 0
    assert again.read_bytes() == file.read_bytes()
    assert train_tokenizer.main(["x", "--size", "9", "--out", str(file)]) == 1
    assert "--size 9: the bytes and <|endoftext|> need 257" in capsys.readouterr().err
    empty = Path(tmp_path / "empty")
    empty.mkdir()
    assert train_tokenizer.main([str(empty), "--size", "262", "--out", str(file)]) == 1
    for name in ("a.jsonl", "a.txt.gz", "a.parquet"):  # not text, so its bytes teach nothing
        (empty / name).write_bytes(b"{}")
        assert train_tokenizer.main([str(empty), "--size", "262", "--out", str(file)]) == 1
        assert f"{empty / name}: not plain text; write" in capsys.readouterr().err
        (empty / name).unlink()
