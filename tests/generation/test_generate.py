"""Test generate.py on a stored run: its outputs, batches, seeds, ranks and error messages."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatron.config import load_config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.engine.open_run import open_run
from megatron.entry import INTERRUPTED, NOBODY_READS
from megatron.generation import loop
from megatron.parallel.groups import build_groups
from tests.generation.conftest import WRITTEN, run_with
from tests.helpers.jobs import seal_again
from tests.helpers.launch import free_port, run_script
from tests.helpers.paths import ROOT

BYTES = build_tokenizer("ByteLevelTokenizer")
TRAINED = 16  # the training length of the stored run
GREEDY = ("--temperature", 0)


@pytest.mark.parametrize("length", [3, 40])
def test_greedy_text_to_sixteen_times_the_training_length(run, call, monkeypatch, length):
    """Each token is the most likely one by the logits of the whole text."""
    monkeypatch.setattr(loop, "PIECE", 7)
    prompt = ("def f(x): return x " * 3)[:length]
    count = 16 * TRAINED - length
    out, err = call("--load", run, "--prompt", prompt, "--max-new-tokens", count, *GREEDY)
    assert f"{length} prompt tokens" in err and f"{count} new tokens" in err and "tokens/s" in err
    assert out.startswith(prompt) and out.endswith("\n")
    config = load_config([run / "config.yml"])
    model = open_run(run, config, build_groups(torch.device("cpu"))).model
    ids = torch.tensor([list(out[:-1].encode())])
    with torch.no_grad():
        best = model(ids)[0, :, : BYTES.vocab_size].argmax(-1)
    assert ids.shape[1] == 16 * TRAINED and torch.equal(best[length - 1 : -1], ids[0, length:])


def test_a_prompt_follows_the_token_that_begins_documents(run, call, monkeypatch):
    monkeypatch.setattr(type(BYTES), "begin", (0xFE,))
    out, err = call("--load", run, "--prompt", "import os", "--max-new-tokens", 5, *GREEDY)
    assert "10 prompt tokens" in err and out.startswith("import os")
    config = load_config([run / "config.yml"])
    model = open_run(run, config, build_groups(torch.device("cpu"))).model
    ids = torch.tensor([[0xFE, *out[:-1].encode()]])
    with torch.no_grad():
        best = model(ids)[0, :, : BYTES.vocab_size].argmax(-1)
    assert ids.shape[1] == 15 and torch.equal(best[9:-1], ids[0, 10:])


def test_distances_are_scaled_as_in_an_evaluation(run):
    """At distances times 1e9 the bias hides all tokens but the last, which both texts share."""
    texts = torch.tensor([list(b"some text"), list(b"no hint t")])
    apart = {}
    for scale in (1.0, 1e9):
        config = load_config([run / "config.yml"], [f"eval_distance_scale={scale}"])
        model = open_run(run, config, build_groups(torch.device("cpu"))).model
        with torch.no_grad():
            one, other = model(texts)[:, -1]
        apart[scale] = (one - other).abs().max()
    assert apart[1e9] < 1e-5 < 1e-3 < apart[1.0]


def test_a_batch_of_unequal_prompts_gives_the_texts_of_each_alone(run, call, tmp_path):
    prompts = ["a", "import os\r", "x = 'é🙂'  ", "class A:" * 5]
    path = tmp_path / "prompts.txt"
    path.write_bytes("\n".join(prompts).encode() + b"\n")
    some = ("--load", run, "--max-new-tokens", 20, *GREEDY)
    out, _ = call(*some, "--prompts", path, "--batch-size", 3)
    prompts[1] = "import os"
    alone = [call(*some, "--prompt", prompt)[0] for prompt in prompts]
    assert out == "".join(alone)
    listed, _ = call(*some, "--json", *[x for p in prompts for x in ("--prompt", p)])
    found = [json.loads(line) for line in listed.splitlines()]
    assert [each["prompt"] + each["text"] + "\n" for each in found] == alone
    assert all((each["tokens"], each["end"]) == (20, "length") for each in found)


def test_seeds_repeat_and_differ(run, call):
    def drawn(*args):
        prompts = ("--prompt", "aa", "--prompt", "aa", "--prompt", "b")
        found, _ = call("--load", run, *prompts, "--max-new-tokens", 12, "--json", *args)
        return [json.loads(line)["text"] for line in found.splitlines()]

    first = drawn()
    assert len(set(first)) == 3
    assert drawn("--seed", 0, "--batch-size", 1) == first != drawn("--seed", 1)
    assert drawn("--top-k", 1) == drawn("--temperature", 0) == drawn("--top-p", 0)


def test_stops_and_the_end_of_documents(run, call):
    some = ("--load", run, "--prompt", "ab", "--max-new-tokens", 400, "--json", "--seed", 3)
    whole = json.loads(call(*some, "--endless")[0])
    assert (whole["tokens"], whole["end"]) == (400, "length")
    found = json.loads(call(*some)[0])
    assert found["end"] == "document" and found["tokens"] < 400
    stop = whole["text"][30:32]
    found = json.loads(call(*some, "--endless", "--stop", "absent", "--stop", stop)[0])
    assert found["end"] == "stop" and found["text"] == whole["text"].split(stop)[0]


def test_if_tokens_see_one_document_the_last_one_of_a_prompt_counts(tmp_path, call, monkeypatch):
    """The NUL byte ends a document of `CharLevelTokenizer`."""
    changes = {"tokenizer_type": "CharLevelTokenizer", "reset_attention_mask": True}
    stored, tokenizer = run_with(tmp_path, "run", **changes), build_tokenizer("CharLevelTokenizer")
    monkeypatch.setattr(type(tokenizer), "vocab_size", 264)  # as many as the stored model has
    record = next(stored.glob("global_step*/kerple.json"))
    values = json.loads(record.read_text())
    values["model"]["tokenizer"] = f"{tokenizer.name} {tokenizer.fingerprint()}"
    record.write_text(json.dumps(values))
    seal_again(record.parent)

    def text_of(prompt, **options):
        (tmp_path / "prompts").write_text(prompt)
        some = ("--load", stored, "--prompts", tmp_path / "prompts", "--max-new-tokens", 10)
        return call(*some, *GREEDY, "--endless", **options)

    assert text_of("old\0new")[0] == "old\0" + text_of("new")[0]
    assert "prompt 1 is empty" in text_of("old\0", code=1)[1]


def test_both_ranks_share_the_model_and_rank_0_writes(run, call, tmp_path):
    args = ("--max-new-tokens", 40, "--json", "--endless", "--prompts", tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_text("import\na\n")
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    muon = {"type": "Muon", "params": {"lr": 0.01}}  # which is refused for two ranks in training
    stored = run_with(tmp_path, "run_tp2", model_parallel_size=2, optimizer=muon)
    for name, where in (("run", run), ("run_tp2", stored)):
        alone, _ = call("--load", where, *args, *GREEDY)

        def rank(number, where=where):
            environ = os.environ | job | {"RANK": str(number), "LOCAL_RANK": str(number)}
            script = (ROOT / "generate.py", "--load", where, *args, *GREEDY)
            return run_script(*script, cwd=ROOT, environ=environ)

        with ThreadPoolExecutor(2) as pool:
            (code, text), (other_code, nothing) = pool.map(rank, range(2))
        assert (code, other_code, nothing) == (0, 0, ""), text + nothing
        lines = text.splitlines()
        assert [line for line in lines if line.startswith("{")] == alone.splitlines()
        tensor = "2 tensor-parallel" if name == "run_tp2" else "1 tensor-parallel"
        assert "on 2 cpu" in lines[0] and tensor in lines[0] and "tokens/s" in lines[-1]
        job["MASTER_PORT"] = str(free_port())


def test_several_samples_of_prompts_from_a_jsonl_file(run, call, tmp_path):
    path, prompts = tmp_path / "prompts.jsonl", ["import os\nimport sys\n", "é"]
    path.write_text(json.dumps({"prompt": prompts[0]}) + "\n" + json.dumps({"text": prompts[1]}))
    some = ("--load", run, "--prompts", path, "--max-new-tokens", 12, "--json", "--num-samples")
    one, three = ([json.loads(x) for x in call(*some, n)[0].splitlines()] for n in (1, 3))
    assert [row["prompt"] for row in three] == [prompts[0]] * 3 + [prompts[1]] * 3
    assert three[::3] == one and len({row["text"] for row in three}) == 6


def test_a_text_without_a_prompt_begins_a_document(run, call, monkeypatch):
    out, _ = call("--load", run, "--max-new-tokens", 12, *GREEDY)
    ids = torch.tensor([[BYTES.eod, *out[:-1].encode()]])
    best = open_run(run).model(ids)[0, :, : BYTES.vocab_size].argmax(-1)
    assert len(ids[0]) == 13 and torch.equal(best[:-1], ids[0, 1:])
    monkeypatch.setattr(type(BYTES), "begin", (0xFE, 0xFD))
    out, err = call("--load", run, "--max-new-tokens", 12, *GREEDY)
    ids = torch.tensor([[0xFE, 0xFD, *out[:-1].encode()]])
    best = open_run(run).model(ids)[0, :, : BYTES.vocab_size].argmax(-1)
    assert "2 prompt tokens" in err and torch.equal(best[1:-1], ids[0, 2:])


def test_mistakes(run, call, tmp_path, monkeypatch):
    (bad := tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n["a"]\n')
    prompt = ("--prompt", "a")
    for args, code, message in [
        (("--load", tmp_path / "no", *prompt), 1, "no: there is no such folder"),
        (("--load", tmp_path, *prompt), 1, "has no config.yml; name the config files: generate.py"),
        ((WRITTEN / "config.yml", "--load", tmp_path, *prompt), 1, "holds no checkpoint (no file"),
        (("--load", run, "--prompt", ""), 1, "prompt 1 is empty"),
        (("--load", run, *prompt, "--prompt", "\udce9"), 1, "half of a surrogate pair"),
        (("--load", run, "--prompts", tmp_path / "none"), 1, "none"),
        (("--load", run, "--prompts", bad), 1, "bad.jsonl:2: has no prompt; write {"),
        (("--load", run, "--repetition-penalty", 0), 2, "repetition-penalty"),
        (("--load", run, *prompt, "--stop", ""), 2, "--stop needs a text that is not empty"),
        (("--load", run, *prompt, "--max-new-tokens", 0), 2, "0 is not in [1, inf]"),
        (("--load", run, *prompt, "--temperature", "nan"), 2, "nan is not in [0.0, inf]"),
        (("--load", run, *prompt, "--temperature", "warm"), 2, "invalid float value: 'warm'"),
        (("--load", run, *prompt, "--top-p", 1.5), 2, "1.5 is not in [0.0, 1.0]"),
        (("--load", run, *prompt, "-o", "hiden_size=8"), 2, "hiden_size"),
        (("--load", run, *prompt, "-o", "pos_emb=alibi"), 1, "pos_emb: 'kerple_log' in the check"),
    ]:
        out, err = call(*args, code=code)
        assert message in err and not out, (args, err)
    for content, message in [
        (b"", "there is no prompt; write one per line"),
        (b"a\n\nb\n", "prompt 2 is empty"),
        (b"a\xff\n", "is not UTF-8"),
        (b"a\n" + b"b" * 3_000_000, "prompts:2: has 3,000,000 characters, and a prompt has at"),
    ]:
        (tmp_path / "prompts").write_bytes(content)
        out, err = call("--load", run, "--prompts", tmp_path / "prompts", code=1)
        assert message in err and not out


def test_prompts_without_an_end_are_refused(call, run):
    out, err = call("--load", run, "--prompts", "/dev/zero", code=1)
    assert "--prompts /dev/zero: has more than 67,108,864 bytes" in err and not out


def test_a_position_table_that_is_too_short_is_reported_at_once(tmp_path, call, run):
    stored = run_with(tmp_path, "run", pos_emb="learned", eval_lengths=[])
    record = next(stored.glob("global_step*/kerple.json"))
    record.write_text(record.read_text().replace("kerple_log", "learned"))
    path = next(stored.glob("global_step*/mp_rank_00_model_states.pt"))
    content = torch.load(path, weights_only=False)
    del content["module"]["embedding.theta"]
    content["module"]["embedding.position_embeddings.weight"] = torch.randn(TRAINED, 16)
    torch.save(content, path)
    seal_again(path.parent)
    some = ("--load", stored, "--prompt", "abcd", *GREEDY, "--max-new-tokens")
    out, _ = call(*some, TRAINED - 3)  # the last token has no position: it is never read
    assert out.startswith("abcd")
    out, err = call(*some, TRAINED - 2, code=1)
    assert not out and f"learned has {TRAINED} positions, but a sequence of {TRAINED + 1}" in err


def test_the_reader_leaves_and_ctrl_c(run):
    """Text appears while it is generated, in UTF-8, and nothing else on stdout."""
    args = ("--load", run, "--prompts", "-", "--endless", "--max-new-tokens", 10**6, "--seed", 1)
    program = [sys.executable, ROOT / "generate.py", *map(str, args)]
    environ = os.environ | {"PYTHONIOENCODING": "latin-1"}
    started = [
        subprocess.Popen(
            program, cwd=ROOT, env=environ,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in started:
        process.stdin.write("é🙂 ".encode())
        process.stdin.close()
    first, second = started
    for process in started:
        assert process.stdout.read(len("é🙂 ".encode()) + 4).startswith("é🙂 ".encode())
    first.stdout.close()
    second.send_signal(signal.SIGINT)
    for process, code in ((first, NOBODY_READS), (second, INTERRUPTED)):
        assert process.wait(120) == code
        err = process.stderr.read().decode()
        assert "Traceback" not in err and "generating with" in err
    assert err.endswith("interrupted\n")


def test_the_rate_counts_tokens_after_the_first(run, call, monkeypatch):
    """Each batch looks at the clock at its begin, twice at its first tokens, and at its end."""
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 2.0 * next(ticks)))
    out = run.parent / "three.txt"
    out.write_text("ab\ncd\nefg\n")
    flags = ("--prompts", out, "--batch-size", 2, "--max-new-tokens", 4, "--endless")
    _, err = call("--load", run, *flags)
    # Two batches of 2 s each for the prompts and 2 s for the rest; 3 texts of 1 + 3 tokens.
    said = "7 prompt tokens, first new tokens after 4.00 s; 12 new tokens, 2.2 tokens/s after"
    assert said in err, err
