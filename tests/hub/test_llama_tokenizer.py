"""Test that tokenizers of Llama's kind are imported and exported with the same ids."""

from __future__ import annotations

import json

import pytest
import sentencepiece
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from megatron.data.tokenizers.bpe import HFTokenizer
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.fast_bpe import byte_of_symbol
from megatron.engine.open_run import open_run
from megatron.hub.export import export
from megatron.hub.importing import import_folder
from megatron.hub.tokenizer import write_tokenizer
from megatron.parallel.groups import build_groups
from tests.helpers.hub import hub_model
from tests.helpers.pipelines import TEXT, write_sentencepiece


def imported(folder, begins=None, **options):
    hub_model("llama", vocab_size=400).save_pretrained(folder / "hub")
    write_sentencepiece(folder / "hub" / "tokenizer.model", **options)
    if begins is not None:
        described = {"eos_token": "</s>", "add_bos_token": begins}
        (folder / "hub" / "tokenizer_config.json").write_text(json.dumps(described))
    import_folder(folder / "hub", folder / "run")
    return yaml.safe_load((folder / "run" / "config.yml").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    keys = imported(folder)
    assert keys["tokenizer_type"] == "HFTokenizer"
    return folder / "run"


@pytest.fixture(scope="module")
def both(run):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(run / "tokenizer.model"))
    return HFTokenizer(run / "tokenizer.json"), theirs


words = st.lists(st.sampled_from(" ".join(TEXT).split()), max_size=9).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40) | words)
def test_ids_and_texts_are_those_of_sentencepiece(both, text):
    ours, theirs = both
    ids = theirs.encode(text)
    assert ours.encode(text).tolist() == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_a_text_begins_and_ends_as_the_files_say(both, tmp_path):
    assert (both[0].begin, both[0].eod) == ((1,), 2)
    imported(tmp_path, begins=False)
    assert HFTokenizer(tmp_path / "run" / "tokenizer.json").begin == ()


def test_transformers_reads_the_exported_tokenizer(run, both, tmp_path):
    (tmp_path / "out").mkdir()
    export(open_run(run, groups=build_groups(torch.device("cpu"))), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXT:
        assert theirs(text)["input_ids"] == [1, *both[1].encode(text)]


def test_a_model_of_another_kind_stays_sentencepiece(tmp_path):
    keys = imported(tmp_path, model_type="unigram")
    assert keys["tokenizer_type"] == "SPMTokenizer"
    assert keys["vocab_file"].endswith("run/tokenizer.model")
    assert open_run(tmp_path / "run", groups=build_groups(torch.device("cpu"))).tokenizer.eod == 2


def test_a_begin_that_is_no_added_token_stays_ordinary_text(tmp_path):
    """As `bos_token`, transformers would read it inside a text as one token."""
    ids = byte_of_symbol() | {"<s>": 256, "<|endoftext|>": 257}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(["<|endoftext|>"])
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")("a<s>b")["input_ids"]
    assert found == [*ours.begin, *ours.encode("a<s>b")] and len(found) == 6
