"""Test the exact words of `--check` about text, tokenizer, folders and disk."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from megatron.config import load_config
from megatron.config.describe import describe, doubts
from megatron.data.shards.reader import ShardReader
from megatron.engine.build import tokenizer_of
from megatron.engine.open_text import open_text
from megatron.pretraining import readiness as module
from megatron.pretraining.readiness import readiness
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import call, run_script
from tests.helpers.paths import CONFIGS, ROOT
from tools import train_tokenizer

Usage = namedtuple("Usage", "free")
BPE = CONFIGS / "quickstart_bpe.json"
NEOX = "https://huggingface.co/EleutherAI/gpt-neox-20b/resolve/main/tokenizer.json"
NO_FILE = "no such file; data_path is the common path of both files; make them with prepare_data.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Leave the checkout, and have a disk of 100 GB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: Usage(100e9))


def problems(*files, **overrides):
    given = [f"{key}={value}" for key, value in overrides.items()]
    config = load_config([CONFIGS / name for name in files], given, world_size=8)
    return [line for is_problem, line in readiness(config) if is_problem]


def test_missing_text_and_tokenizer_are_named_with_the_commands_that_make_them():
    small = {"save_interval": 143000}
    assert problems("recipes/pythia_160M.yml", **small, extra_save_iters="[]") == [
        f"vocab_file: data/20B_tokenizer.json: no such file; curl -L --create-dirs -o "
        f"data/20B_tokenizer.json {NEOX}",
        f"data/pile/pile_text_document.idx and data/pile/pile_text_document.bin: {NO_FILE}\n"
        "    python prepare_data.py pile -d data -t HFTokenizer -v data/20B_tokenizer.json",
    ]
    command = "python prepare_data.py --input FILES --name mine -d data -t GPT2BPETokenizer"
    assert problems("recipes/own_160M.yml") == [
        f"vocab_file: data/gpt2-vocab.json: no such file; downloaded with the text: {command}",
        f"merge_file: data/gpt2-merges.txt: no such file; downloaded with the text: {command}",
        f"data/mine_text_document.idx and data/mine_text_document.bin: {NO_FILE}\n    {command}",
    ]
    tokenizer, _ = problems("recipes/own_160M.yml", tokenizer_type="HFTokenizer", merge_file="null",
                            vocab_file="a/b.json")  # fmt: skip
    assert tokenizer == (
        "vocab_file: a/b.json: no such file; "
        "python tools/train_tokenizer.py TEXTS --size 32000 --out a/b.json"
    )
    first, *_ = problems("recipes/llama_7B.yml", keep_last_n_checkpoints="null", save="null")
    assert first == (
        "vocab_file: data/tokenizer.model: no such file; copy the file of the published model "
        "there, or name your own"
    )


def test_the_command_that_is_named_makes_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    keys = {"tokenizer_type": "ByteLevelTokenizer", "seq_length": 16}
    config = write_config(tmp_path / "c.yml", "data/mine_text_document", **keys)
    found = problems(config, train_micro_batch_size_per_gpu=1)
    command = found[0].rpartition("\n    python prepare_data.py ")[2].replace("FILES", "a.txt")
    script = ROOT / "prepare_data.py"
    code, text = run_script(script, *command.split(), cwd=Path.cwd(), environ=dict(os.environ))
    assert code == 0, text
    assert problems(config, train_micro_batch_size_per_gpu=1) == []


def test_the_text_has_its_epochs_and_checkpoints_their_size(tmp_path):
    config = write_config(
        tmp_path / "c.yml", write_shards(tmp_path), save="runs/a", save_interval=2, train_iters=6,
        train_batch_size=8, keep_last_n_checkpoints=1, split="50,25,25",
    )  # fmt: skip
    found = list(readiness(load_config([config])))
    tokens = int(ShardReader(tmp_path / "text_document").sizes[:30].sum())
    # 2 blocks x 12 x 32 x 32, two tables of at most 50,304 x 32; 16 bytes each in fp32
    size = 16 * (2 * 12 * 32 * 32 + 2 * 50304 * 32) / 1e9
    assert [line for is_problem, line in found if not is_problem] == [
        f"text to train on {tokens:,} tokens in 30 of 60 documents; the run reads 768 = "
        f"{768 / tokens:.3g} epochs",
        f"about 2 x {size:.3g} = {2 * size:.3g} GB of checkpoints to come; {tmp_path} has 100 GB "
        "free",
    ]
    assert not any(is_problem for is_problem, _ in found)
    assert not (tmp_path / "runs").exists()


def test_held_out_text_that_is_shorter_than_the_longest_evaluation_is_named(tmp_path):
    given = {"train_iters": 2, "train_batch_size": 8, "split": "90,10"}
    config = write_config(tmp_path / "c.yml", write_shards(tmp_path), **given)
    held = int(ShardReader(tmp_path / "text_document").sizes[54:].sum())
    assert problems(config, eval_lengths=[16, held - 1]) == []
    assert problems(config, eval_lengths=[16, held]) == [
        f"split: the valid split has {held:,} tokens in 6 documents, too few for eval_lengths up "
        f"to {held:,}; give it a larger weight"
    ]
    none = problems(config, eval_lengths=[16], split="999,1", eval_split="valid")
    assert none[0].startswith("split: the valid split has 0 tokens in 0 documents, too few")


def test_the_size_of_a_trained_tokenizer_is_its_own(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one two two")
    out = ["--size", "8192", "--out", str(tmp_path / "made.json")]
    assert train_tokenizer.main([str(tmp_path / "a.txt"), *out]) == 0
    size = len(json.loads((tmp_path / "made.json").read_text())["model"]["vocab"])
    assert capsys.readouterr().out == f"{tmp_path / 'made.json'}: {size:,} tokens\n" and size < 300
    assert train_tokenizer.main(["builtin:typo", *out]) == 1
    assert "No such file or directory: 'builtin:typo'" in capsys.readouterr().err


def test_a_split_without_documents_to_validate_on_is_named(tmp_path):
    given = {"train_iters": 2, "train_batch_size": 8}
    config = write_config(tmp_path / "c.yml", write_shards(tmp_path), **given)
    for split, says in (("50,50", False), ("999,1", True)):
        loaded = load_config([config], [f"split={split}"])
        (fact, *_) = (line for is_problem, line in readiness(loaded) if not is_problem)
        about = open_text(loaded, tokenizer_of(loaded)).about
        assert {line.endswith("; no document to validate on") for line in (fact, about)} == {says}


def test_a_small_disk_and_folders_that_cannot_be_written_are_named(tmp_path):
    found = problems("recipes/own_160M.yml", save_interval=100, keep_last_n_checkpoints="null")
    assert found[-1] == (
        f"save: about 62 x 2.27 = 141 GB of checkpoints to come; {tmp_path} has 100 GB free; "
        "write keep_last_n_checkpoints: 2, a larger save_interval, or another folder"
    )
    for step in range(100, 2100, 100):  # of a run that is resumed
        (tmp_path / f"held/global_step{step}").mkdir(parents=True)
    resumed = {"save": "held", "save_interval": 100, "keep_last_n_checkpoints": "null"}
    assert not any("checkpoints" in line for line in problems("recipes/own_160M.yml", **resumed))
    (tmp_path / "file").write_text("")
    given = {"save": "/proc/x", "tensorboard_dir": "file/b", "vocab_file": BPE}
    assert problems("quickstart.yml", **given) == [
        "save: /proc/x: /proc cannot be written, No such file or directory; write another folder",
        f"tensorboard_dir: file/b: {tmp_path}/file cannot be written, Not a directory; write "
        "another folder",
        "load: runs/quickstart: holds no checkpoint; name a run's folder",
    ]


@pytest.mark.parametrize("task", ["tasks/copy.yml", "quickstart.yml"])
def test_a_builtin_text_misses_nothing(task):
    given = {"vocab_file": BPE} if "quick" in task else {}
    assert problems(task, **given) == []


def test_check_prints_both_and_its_code_says_whether_something_is_missing():
    config, given = CONFIGS / "recipes/own_160M.yml", ["--gpus", 64]
    said = call("train.py", config, "--check", *given, "-o", "save=runs/x", code=1)
    assert "= 4 micro x 1 accumulation x 64 data-parallel" in said
    assert said.index("\non this machine\n  about 3 x ") < said.index("\nnot ready on this")
    said = call("train.py", CONFIGS / "quickstart.yml", "--check", code=0)
    assert "not ready" not in said


@pytest.mark.parametrize(("override", "code", "why"), [
    ("theta_frozen=[foo]", 2, "pos_emb kerple_log has no parameter 'foo'"),
    ("theta_init={bias_p: -1}", 2, "-1.0 is outside of its bounds"),
    ("pos_emb_options={logs: 2}", 1, "kerple_log has no option logs"),
    ("vocab_file=null", 1, "vocab_file"),
])  # fmt: skip
def test_check_finds_what_stops_the_start(override, code, why):
    assert why in call("train.py", CONFIGS / "quickstart.yml", "--check", "-o", override, code=code)


def test_check_does_not_import_torch():
    code = "import megatron.pretraining.readiness, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_a_large_shape_with_the_rate_of_a_small_one_is_doubted():
    def said(*files, ranks=64, **overrides):
        given = [f"{key}={value}" for key, value in overrides.items()]
        return doubts(load_config([CONFIGS / f for f in files], given, world_size=ranks))

    llama = ("paper/train.yml", "family/llama.yml", "llama/70B.yml")
    (line,) = said(*llama, train_batch_size=64)
    assert line == (
        "warning: optimizer.params.lr 0.0006 with weight_decay 0 for a model of 77.8 billion "
        "parameters: published ones have at most 0.00015 and 0.01 to 0.1; is the training that of "
        "a smaller model? See configs/recipes"
    )
    assert said(*llama, train_batch_size=64, train_iters=0) == []
    small, large = (
        ["paper/train.yml", f"model/{n}.yml", "pos_emb/none.yml"] for n in ("small", "xl")
    )
    assert said(*small, ranks=1) == [] != said(*large, ranks=1)
    assert said(*large, ranks=1, **{"optimizer.params.lr": 2e-4}) == []
    for path in (CONFIGS / "recipes").glob("*.yml"):
        assert said(path, ranks=8) == [], path
    config = load_config([CONFIGS / f for f in llama], ["train_batch_size=64"], world_size=64)
    notes = describe(config).partition("\nnotes\n")[2]
    assert line in notes


def test_a_load_without_a_checkpoint_is_a_problem(tmp_path):
    text = f"load: {tmp_path / 'typo'}: holds no checkpoint; name a run's folder"
    keys = {"save": tmp_path / "new", "load": tmp_path / "typo", "save_interval": 1400}
    assert text in problems("quickstart.yml", **keys)
    assert text not in problems("quickstart.yml", **keys | {"load": f"{tmp_path}/./new"})
    assert any(
        line.startswith("load: .: ") for line in problems("quickstart.yml", save="null", load=".")
    )
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "latest").write_text("global_step1")  # a branch that goes on
    assert text not in problems("quickstart.yml", **keys)
