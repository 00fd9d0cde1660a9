"""Test the files of an export: the joined source, the tokenizer, and what happens after faults."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.fast_bpe import DIFFICULT_TEXTS
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import HubError
from megatron.engine.open_run import open_run
from megatron.hub import export
from megatron.hub import tokenizer as hub_tokenizer
from megatron.hub.bundle import bundle
from megatron.hub.tokenizer import write_tokenizer
from megatron.parallel.groups import build_groups
from megatron.positional import names
from tests.helpers import hub
from tests.helpers.paths import FIXTURES
from tests.helpers.pipelines import PIPELINES, write_pipeline
from tools import export_hf


def test_all_positional_embeddings_fit_into_one_file():
    """Each name is defined in one file only, and no file imports a name that it defines."""
    tree = ast.parse(bundle(names()))
    imported, defined = set(), Counter()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined.update(target.id for target in targets if isinstance(target, ast.Name))
    assert [name for name, count in defined.items() if count > 1] == []
    assert not imported & defined.keys() and {"Rotary", "ForgetGate"} <= defined.keys()


def test_the_file_defines_all_that_it_uses_and_imports_torch_and_transformers_alone():
    text = bundle(names())
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    packages = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            packages.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
    assert packages - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_only_what_a_model_needs_is_in_the_file():
    text = bundle(["alibi_learned"])
    assert "class AlibiLearned" in text and "def slopes" in text and "class Rotary" not in text
    assert "class Norm(" in text and "def eager" in text and "def activate" in text
    assert "class BlockNorm" not in text and "TensorGroup" not in text and "Backend(" not in text


def gpt2_files(folder):
    """Write GPT-2's two files with three merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll"]
    tokens = [*letters, "he", "ll", "hell", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder / "vocab.json", folder / "merges.txt"


def hf_file(folder, *added, end="<|endoftext|>"):
    hub.write_tokenizer(folder, end)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_tokens(list(added))
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


MADE = {
    "bytes": lambda folder: build_tokenizer("ByteLevelTokenizer"),
    "characters": lambda folder: build_tokenizer("CharLevelTokenizer"),
    "gpt2": lambda folder: build_tokenizer("GPT2BPETokenizer", *gpt2_files(folder)),
    "hf": lambda folder: build_tokenizer("HFTokenizer", hf_file(folder)),
    "hf special": lambda folder: build_tokenizer(
        "HFTokenizer",
        hf_file(folder, AddedToken("<|endoftext|>", special=True), AddedToken("    ")),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_a_tokenizer_gives_the_same_ids(name, tmp_path):
    ours = MADE[name](tmp_path)
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    for text in (*DIFFICULT_TEXTS, "hello hell<|endoftext|>\x00Ā", "x    y"):
        ids = ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids) or ours.eod in ids
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eod, ours.eod)
    batch = theirs(["hello", "a"], padding=True)
    assert batch["attention_mask"][1] == [0] * (len(batch["input_ids"][1]) - 1) + [1]
    assert theirs.decode(batch["input_ids"][1], skip_special_tokens=True) == "a"


@pytest.mark.parametrize("name", PIPELINES)
def test_a_template_is_that_of_transformers_and_is_exported(name, tmp_path):
    ours = build_tokenizer("HFTokenizer", write_pipeline(name, tmp_path / "given"))
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out")
    end = [ours.eod] if name == "t5" else []
    for folder in ("given", "out"):
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / folder / "tokenizer.json"))
        for text in DIFFICULT_TEXTS:
            assert theirs(text)["input_ids"] == [*ours.begin, *ours.encode(text), *end]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [theirs.bos_token_id] == ([*ours.begin] or [None])


def test_a_tokenizer_that_cannot_be_written(tmp_path):
    class SPMTokenizer(type(build_tokenizer("ByteLevelTokenizer")).__base__):
        name = "SPMTokenizer"
        encode = decode = count_bytes = _content = None

    with pytest.raises(HubError, match="tokenizer_type: SPMTokenizer cannot be exported; Byte"):
        write_tokenizer(SPMTokenizer(), tmp_path)


@pytest.fixture
def run(tmp_path):
    """Return a copy of the stored run, with the `config.yml` that a run has."""
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "checkpoint" / "run", folder)
    shutil.copyfile(FIXTURES / "checkpoint" / "config.yml", folder / "config.yml")
    return folder


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs export_hf.py in this process and returns its output."""
    for key in ("HF_HUB_OFFLINE", "HF_MODULES_CACHE"):
        monkeypatch.setenv(key, "")  # so that the values that the tool sets are removed again

    def run_here(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["export_hf.py", *map(str, args)])
        try:
            found = export_hf.main()
        except SystemExit as end:
            found = end.code
        out, err = capsys.readouterr()
        assert found == code, err
        return out if code == 0 else err

    return run_here


def contents(folder):
    return sorted(path.name for path in folder.iterdir())


@torch.no_grad()
def test_the_export_of_a_run_alone(run, call, tmp_path, monkeypatch):
    """In a process without this project, it gives our logits, and a batch the texts of each."""
    monkeypatch.setattr(socket.socket, "connect", None)  # nothing reaches for a network
    monkeypatch.chdir(tmp_path)
    out = call("run", "new/out")
    assert "KerpleForCausalLM in float32" in out and "run/global_step3 -> new/out" in out
    assert contents(tmp_path / "new") == ["out"]
    modes = {path.stat().st_mode for path in (tmp_path / "new" / "out").iterdir()}
    assert len(modes) == 1
    ours = open_run(run, groups=build_groups(torch.device("cpu"))).model
    ids = torch.tensor([list(b"import os, sys\n")])
    torch.save((ids, ours(ids)), tmp_path / "wanted.pt")
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import pickle, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {str(tmp_path / "new" / "out")!r}
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids, wanted = torch.load("wanted.pt")
assert (model(ids).logits - wanted).abs().max() < 1e-5
def texts(*prompts):
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    made = model.generate(**batch, max_new_tokens=64, do_sample=False)
    return tokenizer.batch_decode(made, skip_special_tokens=True)
model = pickle.loads(pickle.dumps(model))
assert texts("def ", "import os, é") == texts("def ") + texts("import os, é")
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_weights_are_stored_in_the_dtype_of_the_run_or_of_the_option(run, call, tmp_path):
    call(run, tmp_path / "a", "-o", "precision=bf16")
    call(run, tmp_path / "b", "--dtype", "bfloat16")
    call(run, tmp_path / "c", "--dtype", "float64")
    a, b, c = (load_file(tmp_path / each / "model.safetensors") for each in "abc")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    words, theta = "model.embedding.word_embeddings.weight", "model.position_bias.theta"
    assert (a[words].dtype, a[theta].dtype) == (torch.bfloat16, torch.float32)
    assert c[words].dtype == torch.float64
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", trust_remote_code=True)
    assert (model.dtype, model.get_parameter(theta).dtype) == (torch.bfloat16, torch.float32)
    assert np.array_equal(model.get_parameter(theta).detach().numpy(), a[theta].numpy())


WRONG = {
    "formula": ("-p * self", "-1.01 * p * self"),
    "cache": ("k_BKSE[:, :, :end], v", "k_BKSE[:, :, :end].roll(at.offset, 2), v"),
    "not a number": ("-p * self", "-p * torch.nan * self"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_export_with_other_logits_is_refused(run, call, tmp_path, monkeypatch, fault):
    right = bundle(["kerple_log"])
    wrong = right.replace(*WRONG[fault])
    assert wrong != right
    monkeypatch.setattr(export, "bundle", lambda terms: wrong)
    text = call(run, tmp_path / "out", code=1)
    assert "logits differ from ours by" in text and "there is no export" in text
    assert contents(tmp_path) == ["modules", "run"]


def test_an_export_with_other_ids_is_refused(run, call, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_tokenizer, "byte_of_symbol", lambda: {chr(i): i for i in range(256)})
    text = call(run, tmp_path / "out", code=1)
    assert "ByteLevelTokenizer gives other ids to" in text
    assert contents(tmp_path) == ["run"]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_what_an_ended_export_leaves(run, call, tmp_path, monkeypatch, end):
    """Nothing at DIR; what a killed one leaves beside it is removed by the next."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under `nohup` and `&`
        monkeypatch.setattr(export, "write_tokenizer", lambda *_: os.kill(os.getpid(), end))
        try:
            call(run, tmp_path / "out")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    left = [".out.unfinished"] if end == signal.SIGKILL else []
    assert contents(tmp_path) == [*left, "run"]
    call(run, tmp_path / "out")
    assert contents(tmp_path) == ["modules", "out", "run"]


def test_an_export_to_a_full_disk(run, call, tmp_path, full_disk, monkeypatch):
    monkeypatch.setattr(export, "bundle", lambda terms: "")  # which is longer than these weights
    with full_disk(80_000):
        text = call(run, tmp_path / "out", "--dtype", "float64", code=1)
    assert "error: the weights: " in text and "File too large" in text
    assert contents(tmp_path) == ["run"]


def test_what_cannot_be_exported_is_refused_at_once(run, call, tmp_path, monkeypatch):
    assert "no such folder; name the `save` folder" in call(tmp_path / "no", "out", code=2)
    (target := tmp_path / "out").mkdir()
    (target / "a").touch()
    assert "is not empty; remove it, or name another" in call(run, target, code=1)
    assert contents(target) == ["a"] and not (target / "a").unlink()
    text = call(run, target, "-o", "published_numerics=true", code=1)
    assert "export with -o published_numerics=false" in text
    (run / "config.yml").rename(run / "other.yml")
    assert "has no config.yml; name the config files with --config" in call(run, target, code=1)
    assert contents(target) == []
    call(run, target, "--config", run / "other.yml")
    about = json.loads((target / "config.json").read_text())["kerple_run"]
    assert (about["run"], about["step"]) == (newest(run).lineage, newest(run).step)
    monkeypatch.setattr(export_hf, "find_spec", lambda name: None)
    text = call(run, tmp_path / "new", code=1)
    assert text == "error: needs transformers: pip install -r requirements-hub.txt\n"
