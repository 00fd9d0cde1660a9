"""GPT-NeoX's scripts and examples have a row on the page, and its data commands work unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

import prepare_data
from tests.helpers.paths import ROOT
from tools.datasets import preprocess_data

PAGE = (ROOT / "docs" / "moving_from_kerple.md").read_text()
# The scripts at the top, in tools/ and in the examples of GPT-NeoX's README of 2026-05-19.
SCRIPTS = """
    deepy.py train.py|deepy.py generate.py|deepy.py eval.py|prepare_data.py -d ./data`|pile_subset
    preprocess_data.py|merge_datasets.py|dataset_token_count.py|multinode_prepare_data.sh
    preprocess_data_with_mask.py|preprocess_data_with_chat_template.py|inspect_checkpoints.py
    convert_neox_to_hf.py|convert_hf_to_sequential.py|convert_hf_llama_to_neox.py
    convert_raw_llama_weights_to_neox.py|merge20b.py|upload.py|write_hostfile.sh|kill.sh|killall.sh
    sync.sh|docker compose|Apptainer|requirements.txt|post-training|text_generation
    pdsh|openmpi|wandb_group|tensorboard_dir|Nsight|memory_profiling|requirements-comet
    mixture of experts
""".replace("\n", "|").split("|")


def test_every_script_of_gpt_neox_has_a_row():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    there = " ".join(row.split(" | ")[0] for row in rows)
    missing = [name.strip() for name in SCRIPTS if name.strip() and name.strip() not in there]
    assert missing == []


@pytest.mark.parametrize("order", [["-d", "./data", "{}"], ["{}", "-d", "./data"]])
def test_its_commands_for_corpora_work_unchanged(order):
    def parsed(name, *others):
        given = [each.replace("{}", name) for each in order]
        return prepare_data.parse_arguments([*others, *given])

    tokenizer = ["-t", "HFTokenizer", "--vocab-file", "20B_tokenizer.json"]
    found = parsed("pile_subset", *tokenizer)
    assert (found.dataset, found.name) == ("pile_00", "pile_00")
    assert (found.tokenizer, found.vocab_file) == ("HFTokenizer", "20B_tokenizer.json")
    found = parsed("enwik8")
    assert (found.dataset, found.data_dir) == ("enwik8", Path("data"))


def test_no_corpus_is_answered_with_names(capsys):
    with pytest.raises(SystemExit):
        prepare_data.parse_arguments(["-d", "./data"])
    assert "give either a corpus (builtin:python-stdlib, openwebtext2, ...) or --input FILES" in (
        capsys.readouterr().err
    )


def test_the_example_of_preprocess_data_is_understood():
    text = (
        "--input ./data/mydataset.jsonl.zst --output-prefix ./data/mydataset --vocab "
        "./data/gpt2-vocab.json --merge-file gpt2-merges.txt --dataset-impl mmap "
        "--tokenizer-type GPT2BPETokenizer --append-eod"
    )
    found = preprocess_data.parse_arguments(text.split())
    assert found.vocab_file == "./data/gpt2-vocab.json" and found.append_eod
