"""Test scores of lm-evaluation-harness on a stored run, by tools/lm_eval.py and evaluate.py.

The expected numbers are computed here, from float64 logits of whole texts, one text at a time.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys

import numpy
import pytest
import torch

import evaluate as command
from megatron.config import load_config
from megatron.data.errors import DataError
from megatron.engine.open_run import open_run
from megatron.harness.installed_lm_eval import harness_packages
from megatron.hub.export import export
from megatron.model import GPT
from megatron.parallel.groups import ALONE, build_groups
from tests.harness.conftest import BYTES, log_likelihood, log_probabilities
from tests.helpers.paths import FIXTURES, ROOT

TASKS = FIXTURES / "harness"
# Put on Python's import path as sitecustomize.py, this ends a command that uses the network.
NO_NETWORK = """
import os, socket
def end(*args, **options):
    os.write(2, f"NETWORK {args}".encode())
    os._exit(99)
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = end
"""


def expected_scores(model):
    rows = [json.loads(line) for line in (TASKS / "choice.jsonl").read_text().splitlines()]
    right = right_by_length = 0
    for row in rows:
        found = [
            log_likelihood(model, row["question"].encode(), choice.encode())
            for choice in row["choices"]
        ]
        by_length = [each / len(c) for each, c in zip(found, row["choices"], strict=True)]
        right += found[row["answer"]] == max(found)
        right_by_length += by_length[row["answer"]] == max(by_length)
    texts = ["def f(x):\n    return x + 1\n", "import os\nimport sys\n" * 4, "é"]
    total = sum(log_likelihood(model, [BYTES.eod], text.encode()) for text in texts)
    count = sum(len(text.encode()) for text in texts)
    return {
        "local_choice": {"acc": right / 3, "acc_norm": right_by_length / 3},
        "local_perplexity": {
            "byte_perplexity": math.exp(-total / count),
            "bits_per_byte": -total / count / math.log(2),
        },
        "local_continuation": {"exact_match": 2 / 3, "same_length": 2 / 3},
    }


def scores(path, expected):
    found = json.loads(path.read_text())["results"]
    return {
        task: {name: found[task][f"{name},none"] for name in metrics}
        for task, metrics in expected.items()
    }


def test_the_tool_scores_a_run_without_network(run, model, tmp_path):
    """Python's import path has tools/ (with lm_eval.py) and the root (with evaluate.py)."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    expected = expected_scores(model)
    assert expected["local_choice"] == {"acc": 2 / 3, "acc_norm": 1 / 3}
    out = tmp_path / "scores.json"
    done = subprocess.run(
        [sys.executable, "tools/lm_eval.py", run, "--tasks", "local_*", "--include_path", TASKS,
         "--output_path", out, "--batch_size", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_HOME": str(tmp_path / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = scores(out, expected)
    for task, metrics in expected.items():
        assert found[task] == pytest.approx(metrics, rel=1e-5), task
        assert f"|{task}" in done.stdout
    assert "evaluating" in done.stderr and "evaluating" not in done.stdout
    assert [path.name for path in tmp_path.glob("*.json*")] == [out.name]


@pytest.fixture
def ask(model):
    """Return a function that sends requests to the model, scaled so that tokens differ clearly."""
    sharp = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in sharp.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    with harness_packages():
        from lm_eval.api.instance import Instance

        from megatron.harness.model import RunModel

    def ask(method, *requests, max_length=sys.maxsize, batch_size=2, tokenizer=BYTES):
        options = {"max_length": max_length, "batch_size": batch_size, "seed": 0, "info": {}}
        adapter = RunModel(sharp, tokenizer, ALONE, **options)
        kind = "generate_until" if method == "generate_until" else "loglikelihood"
        asked = [Instance(kind, {}, request, 0) for request in requests]
        return getattr(adapter, method)(asked, disable_tqdm=True)

    ask.model = sharp
    return ask


def greedy(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(log_probabilities(model, ids)[-1, : BYTES.vocab_size].argmax().item())
    return ids[-count:]


def test_log_likelihoods_and_greedy_targets(ask):
    likely = BYTES.decode(greedy(ask.model, b"a long context", 3))
    requests = [
        ("a long context", likely), ("a", "b"), ("", "xyz"), ("  ", "y"), ("a long context", "n o"),
        ("def f(x): ", "return"), ("ab" * 40, "c"), ("a", ""),
    ]  # fmt: skip
    expected = []
    for context, text in requests:
        whole = (context + text).encode()
        start = len(context.rstrip().encode())
        prefix = [] if start else [BYTES.eod]
        expected.append(log_likelihood(ask.model, [*prefix, *whole[:start]], whole[start:]))
    for size in (1, 3, 100):
        found = ask("loglikelihood", *requests, batch_size=size)
        assert [total for total, _ in found] == pytest.approx(expected, abs=1e-9)
        assert [exact for _, exact in found] == [True, *[False] * 6, True]
    (short,) = ask("loglikelihood", ("ab" * 40, "c"), max_length=7)
    assert short[0] == pytest.approx(log_likelihood(ask.model, b"bababab", b"c"), abs=1e-9)
    with pytest.raises(DataError, match="scores a text of 9 tokens, but --max_length is 8"):
        ask("loglikelihood", ("a", "b" * 9), max_length=8)


def test_perplexities_of_whole_texts_and_of_windows(ask):
    texts = ["import os\n" * 5, "x", "", "é" * 9]
    whole = [log_likelihood(ask.model, [BYTES.eod], text.encode()) for text in texts]
    for size in (1, 3):
        found = ask("loglikelihood_rolling", *[(text,) for text in texts], batch_size=size)
        assert found == pytest.approx(whole, abs=1e-9)
    ids = [BYTES.eod, *b"abcdefghij"]  # windows of four: the last has all the context it can have
    windows = [(ids[:1], ids[1:5]), (ids[4:5], ids[5:9]), (ids[6:9], ids[9:])]
    cut = sum(log_likelihood(ask.model, *window) for window in windows)
    found = ask("loglikelihood_rolling", ("abcdefghij",), max_length=4)
    assert found == pytest.approx([cut], abs=1e-9)


def test_a_token_that_begins_documents_is_context_and_never_a_target(ask):
    """As in the harness's own model `hf`, whose LLaMA tokenizers add BOS."""
    begun = copy.copy(BYTES)
    begun.begin = (0xFE,)
    texts = [("import os",), ("x",)]
    found = ask("loglikelihood_rolling", *texts, tokenizer=begun)
    whole = [log_likelihood(ask.model, [0xFE], text.encode()) for (text,) in texts]
    assert found == pytest.approx(whole, abs=1e-9)
    found = ask("loglikelihood", ("a b", " c"), ("", "xyz"), tokenizer=begun)
    pairs = [([0xFE, *b"a b"], b" c"), ([0xFE], b"xyz")]
    expected = [log_likelihood(ask.model, *pair) for pair in pairs]
    assert [total for total, _ in found] == pytest.approx(expected, abs=1e-9)
    ids = greedy(ask.model, [0xFE, *b"import os"], 3)
    until = ("import os", {"until": [], "max_gen_toks": 3})
    assert ask("generate_until", until, tokenizer=begun) == [BYTES.decode(ids)]


def test_special_tokens_stay_out_of_answers_but_in_the_context(ask):
    """As in the harness's own model `hf`."""
    plain = greedy(ask.model, b"import os", 3)
    marked = copy.copy(BYTES)
    vars(marked)["_bytes_of_token"] = numpy.where(numpy.arange(257) == plain[0], 0, 1)
    until = ("import os", {"until": [], "max_gen_toks": 3})
    assert ask("generate_until", until) == [BYTES.decode(plain)]
    (found,) = ask("generate_until", until, tokenizer=marked)
    assert found == BYTES.decode([each for each in plain if each != plain[0]])


def test_continuations_with_the_options_of_tasks(ask):
    prompts = ["def f(x): ", "a", "import os", ""]
    ids = [[*prompt.encode()] or [BYTES.eod] for prompt in prompts]
    plain = [BYTES.decode(greedy(ask.model, each, 12)) for each in ids]
    assert len(set(plain)) == 4, plain
    options = {"until": [], "max_gen_toks": 12}
    found = ask("generate_until", *[(prompt, options) for prompt in prompts])
    assert found == [text.split("<|endoftext|>")[0] for text in plain]
    stop = plain[0][4]
    mixed = [(prompts[0], options | {"until": [stop, ""]}), (prompts[1], options)]
    assert ask("generate_until", *mixed) == [plain[0].split(stop)[0], plain[1]]
    drawn = {"until": "", "do_sample": True, "temperature": 2.0, "max_gen_toks": 12}
    two = ask("generate_until", *[(prompts[0], drawn)] * 2)
    assert two[0] != two[1] and two == ask("generate_until", *[(prompts[0], drawn)] * 2)
    assert ask("generate_until", (prompts[1], options | {"num_beams": 1})) == [plain[1]]
    (kept,) = ask("generate_until", ("x" + prompts[1], options), max_length=13)
    assert kept == plain[1]
    with pytest.raises(DataError, match="max_gen_toks 12 leaves no room"):
        ask("generate_until", (prompts[0], options), max_length=12)
    with pytest.raises(DataError, match="generation_kwargs: num_beams cannot be used here"):
        ask("generate_until", (prompts[0], options | {"num_beams": 2}))


def test_an_export_has_the_scores_of_its_run(run, tmp_path, monkeypatch):
    """The harness's model `hf` reads the export, with the same longest context."""
    import transformers

    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    exported = open_run(run, groups=build_groups(torch.device("cpu")))
    (tmp_path / "exported").mkdir()
    export(exported, tmp_path / "exported")
    with harness_packages():
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        from megatron.harness.model import RunModel

    config = load_config([run / "config.yml"])
    stored = open_run(run, config, build_groups(torch.device("cpu"))).model
    sizes = {"max_length": 20, "batch_size": 2}
    ours = RunModel(stored, BYTES, ALONE, **sizes, seed=0, info={})
    options = {"device": "cpu", "dtype": "float32", "trust_remote_code": True}
    theirs = HFLM(pretrained=str(tmp_path / "exported"), **options, **sizes)
    pairs = [("def f", "(x):"), ("", "[1]"), ("import os" * 4, " sys"), ("a ", "n")]
    texts = [("import os\nimport sys\n" * 2,), ("é",)]
    until = [
        ("def ", {"until": ["\n"], "max_gen_toks": 5}),
        ("a", {"until": [], "max_gen_toks": 3}),
    ]
    for kind, requests in [
        ("loglikelihood", pairs), ("loglikelihood_rolling", texts), ("generate_until", until)
    ]:  # fmt: skip
        asked = [Instance(kind, {}, request, 0) for request in requests]
        found, expected = (getattr(each, kind)(asked, disable_tqdm=True) for each in (ours, theirs))
        if kind == "generate_until":
            assert found == expected == ["nnnnn", "nnn"]
        else:
            assert numpy.allclose(found, expected, rtol=1e-6), kind


def test_the_key_eval_tasks(run, model, call, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    expected = {"local_perplexity": expected_scores(model)["local_perplexity"]}
    key = f"eval_tasks=[{TASKS / 'perplexity.yaml'}]"
    some = (run / "config.yml", "--load", run, "--out", tmp_path)
    call(command, *some, "-o", key, "-o", "eval_lengths=[]")
    (path,) = tmp_path.glob("eval_results_*.json")
    found = scores(path, expected)["local_perplexity"]
    assert found == pytest.approx(expected["local_perplexity"], rel=1e-5)
    info = json.loads(path.read_text())["config"]
    assert info["checkpoint"].endswith("global_step3") and info["max_length"] is None
    named = ("--eval_tasks", "local_per*", "--include_path", TASKS)
    text, _ = call(command, *some, *named, "--eval_results_prefix", tmp_path / "mine")
    (path,) = tmp_path.glob("mine_eval_results_*.json")
    assert scores(path, expected)["local_perplexity"] == found
    assert "local_perplexity" in text and "extrapolation" not in text
    monkeypatch.setattr(GPT, "longest_text", 7)
    call(command, *some, "-o", key, "-o", "eval_lengths=[]", "--out", tmp_path / "limited")
    (path,) = (tmp_path / "limited").glob("eval_results_*.json")
    assert json.loads(path.read_text())["config"]["max_length"] == 7
    assert scores(path, expected)["local_perplexity"] != found
