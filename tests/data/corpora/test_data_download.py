"""Test downloads from a local server: resumed, verified, renamed; and training on the result."""

from __future__ import annotations

import hashlib
import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import prepare_data
from megatron.data.corpora import catalogue
from megatron.data.corpora.catalogue import CORPORA, GPT2_FILES, RemoteFile, alternatives
from megatron.data.corpora.download import check, download
from megatron.data.errors import CorpusError
from megatron.data.shards.reader import ShardReader
from tests.helpers import archives, launch
from tests.helpers.paths import ROOT


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` (name -> bytes) with ranges.

    `breaks`: for each of the next answers, the bytes after which the connection breaks.
    `goes_on`: before it breaks a connection, it waits for this event.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.breaks: list[int] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        server: Server = self.server
        name = self.path.lstrip("/")
        server.asked.append((self.command, name, self.headers.get("Range")))
        content = server.files.get(name)
        if content is None:
            self.send_error(404)
            return
        tag, start = f'"{hashlib.sha256(content).hexdigest()[:16]}"', 0
        wanted = self.headers.get("Range")
        if wanted and self.headers.get("If-Range", tag) == tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            end = start + server.breaks.pop(0) if server.breaks else len(content)
            self.wfile.write(content[start:end])
            if end < len(content):
                self.wfile.flush()
                server.goes_on.wait()
                self.connection.close()


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


BODY = bytes(range(256)) * 20_000


def remote(server: Server, name: str = "a.bin", **known) -> RemoteFile:
    return RemoteFile((f"{server.url}/{name}",), **known)


def test_a_broken_connection_is_resumed(server, tmp_path):
    server.files["a.bin"] = BODY
    server.breaks = [2_000_000, 1_500_000]
    digest = hashlib.sha256(BODY).hexdigest()
    found = download(remote(server, size=len(BODY), sha256=digest), tmp_path / "a.bin")
    assert found == digest and (tmp_path / "a.bin").read_bytes() == BODY
    ranges = [asked[2] for asked in server.asked]
    assert ranges[0] is None and len(ranges) == 3
    starts = [int(each.removeprefix("bytes=").rstrip("-")) for each in ranges[1:]]
    assert 0 < starts[0] <= 2_000_000 < starts[1] <= 3_500_000
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".a.bin.lock", "a.bin"]
    assert download(remote(server), tmp_path / "a.bin") == "" and len(server.asked) == 3


KILLED = """
import sys
from pathlib import Path
from megatron.data.corpora.download import download
from megatron.data.corpora.catalogue import RemoteFile
download(RemoteFile((sys.argv[1],)), Path(sys.argv[2]))
"""


def test_a_killed_download_goes_on(server, tmp_path):
    server.files["a.bin"] = BODY
    server.breaks = [2_000_000]
    server.goes_on.clear()
    command = [sys.executable, "-c", KILLED, f"{server.url}/a.bin", str(tmp_path / "a.bin")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    part = tmp_path / "a.bin.part"
    while not part.exists() or part.stat().st_size < 900_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    server.goes_on.set()
    have = part.stat().st_size
    server.asked.clear()
    download(remote(server), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert [asked[2] for asked in server.asked] == [f"bytes={have}-"]


def test_a_new_version_is_downloaded_from_its_start(server, tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr("megatron.data.corpora.download.time.sleep", waits.append)
    server.files["a.bin"] = BODY
    server.breaks = [1_000_000] + [0] * 9
    with pytest.raises(CorpusError, match=r"a\.bin cannot be downloaded"):
        download(remote(server), tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6]  # after each attempt but the last
    server.breaks, server.files["a.bin"] = [], BODY[::-1]
    download(remote(server), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY[::-1]


@pytest.mark.parametrize("known", [{"size": 7}, {"sha256": "0" * 64}])
def test_another_file_is_refused(server, tmp_path, known):
    server.files["a.bin"] = BODY
    with pytest.raises(
        CorpusError, match="serves another file: 5120000 bytes, SHA-256 [0-9a-f]{64}"
    ):
        download(remote(server, **known), tmp_path / "a.bin")
    assert [path.name for path in tmp_path.iterdir()] == [".a.bin.lock"]


def test_the_next_address_and_the_mirror(server, tmp_path):
    server.files |= {"second/a.bin": b"here", "mirror/a.bin": b"mirrored"}
    file = RemoteFile((f"{server.url}/first/a.bin", f"{server.url}/second/a.bin"))
    download(file, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == b"here"
    download(file, tmp_path / "b.bin", mirror=f"{server.url}/mirror/")
    assert (tmp_path / "b.bin").read_bytes() == b"mirrored"
    answers = [(ok, text) for _, ok, text in check(file)]
    assert answers == [(False, "HTTP 404 Not Found"), (True, "4 bytes")]
    assert [ok for _, ok, _ in check(RemoteFile(file.urls[1:], size=9))] == [False]


def test_check_and_a_dead_link_name_the_alternatives(server, tmp_path, monkeypatch, capsys):
    dead = (RemoteFile((f"{server.url}/gone.jsonl.zst",)),)
    corpus = catalogue.Corpus(dead, "licence", "Github", ("monology/pile-uncopyrighted",))
    monkeypatch.setitem(CORPORA, "github", corpus)
    assert prepare_data.main(["--check", "github"]) == 1
    out = capsys.readouterr().out
    assert f"NO  {server.url}/gone.jsonl.zst: HTTP 404 Not Found" in out
    assert prepare_data.main(["github", "-t", "ByteLevelTokenizer", "-d", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    for text in (out, err):
        for ways in ("hub:monology/pile-uncopyrighted", "'pile/*.jsonl.zst'"):
            assert f"prepare_data.py github --input {ways} --pile-set 'Github'\n" in text
        assert "prepare_data.py github --input FILE" in text and "--mirror" in text
    server.files["gone.jsonl.zst"] = b"back"
    assert prepare_data.main(["--check", "github"]) == 0
    assert f"ok  {server.url}/gone.jsonl.zst: 4 bytes" in capsys.readouterr().out


def test_every_corpus_has_addresses_and_alternatives():
    for name, corpus in CORPORA.items():
        assert corpus.files and corpus.licence and alternatives(name, corpus)
        for file in corpus.files:
            assert all(url.startswith("http") for url in file.urls) and file.name
    for name in ("openwebtext2", "github", "arxiv"):
        config = yaml.safe_load((ROOT / f"configs/data/{name}.yml").read_text())
        assert config["data_path"] == f"data/{name}/{name}_text_document"
        assert [config["vocab_file"], config["merge_file"]] == [f"data/{f}" for f in GPT2_FILES]


TRAINING = {
    "tokenizer_type": "GPT2BPETokenizer",
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "pos_emb": "kerple_log",
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    "train_iters": 2,
    "log_interval": 1,
    "eval_interval": 2,
    "eval_iters": 1,
    "train_micro_batch_size_per_gpu": 2,
}


def test_three_corpora_from_their_archives_to_training(server, tmp_path, gpt2_files):
    """Corpora in each archive layout are downloaded and prepared; a run trains on their blend."""
    data = tmp_path / "data"
    made = {}
    for seed, name in enumerate(sorted(archives.LAYOUTS)):
        folder = tmp_path / f"archive_{name}"
        folder.mkdir()
        documents = archives.texts(40, seed, 60)
        made[name] = sum(map(bool, documents))
        archive = archives.LAYOUTS[name](folder, documents)
        assert archive.name == CORPORA[name].files[0].name
        server.files[archive.name] = archive.read_bytes()
    prefixes = []
    for name, count in made.items():
        arguments = [name, "-d", str(data), "--mirror", server.url, "--workers", "2"]
        arguments += ["-v", str(gpt2_files[0]), "-m", str(gpt2_files[1])]
        assert prepare_data.main(arguments) == 0
        prefixes.append(str(data / name / f"{name}_text_document"))
        assert len(ShardReader(prefixes[-1])) == count
        manifest = json.loads(Path(f"{prefixes[-1]}.json").read_text())
        assert manifest["source"]["corpus"] == name and manifest["tokenizer"] == "GPT2BPETokenizer"
        assert len(manifest["source"]["files"][0]["sha256"]) == 64
    blended = {f"{split}_data_paths": prefixes for split in ("train", "valid", "test")}
    files = {"vocab_file": str(gpt2_files[0]), "merge_file": str(gpt2_files[1])}
    blended |= {"train_data_weights": [0.5, 0.3, 0.2], "save": str(tmp_path / "run")}
    config = tmp_path / "config.yml"
    config.write_text(yaml.safe_dump(TRAINING | files | blended))
    launch.call("train.py", config)
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert sum("train/loss" in json.loads(row) for row in rows) == 2
