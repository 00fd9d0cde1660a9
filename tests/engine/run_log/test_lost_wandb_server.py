"""Test that a server of Weights & Biases that goes away does not hold a run at its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import wandb

from tests.helpers.paths import ROOT

RUN = """
import sys
from pathlib import Path
from megatron.config.sections.data import LoggingConfig
from megatron.engine.run_log import sinks
from megatron.engine.run_log.log import RunLog

sinks.FINISH_SECONDS = 2
folder, host = sys.argv[1:]
settings = LoggingConfig(use_wandb=True, wandb_mode="online", wandb_host=host, wandb_project="p")
with RunLog(Path(folder), settings, is_main=True) as log:
    log.metrics(1, {"train/loss": 1.0})
    input()  # until the server is gone
    log.metrics(2, {"train/loss": 0.5})
"""
BUCKET = {
    "id": "x", "name": "abc12345", "displayName": "n", "config": "{}", "historyLineCount": 0,
    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}},
}  # fmt: skip
ANSWERS = {
    "UpsertBucket": {"upsertBucket": {"bucket": BUCKET, "inserted": True}},
    "Viewer": {"viewer": {"id": "v", "entity": "e", "username": "u", "flags": "{}"}},
}


class Handler(BaseHTTPRequestHandler):
    gone = False

    def do_POST(self):
        size = int(self.headers.get("content-length") or 0)
        asked = self.rfile.read(size).decode(errors="replace")
        if Handler.gone:
            self.close_connection = True
            return
        name = re.search(r"(?:query|mutation) (\w+)", asked)
        body = json.dumps({"data": ANSWERS.get(name[1] if name else "", {})}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture(name="host")
def _host():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.skipif(
    "finish_timeout" not in wandb.Settings.model_fields,
    reason="needs a wandb with finish_timeout, such as that of requirements.txt; .ci/run has it",
)
def test_a_run_ends_although_wandbs_server_is_gone(tmp_path, monkeypatch, host):
    monkeypatch.setattr(Handler, "gone", False)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, tmp_path / "run", host],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert any("wandb: http://127.0.0.1" in line for line in run.stdout)
        Handler.gone = True
        said, _ = run.communicate("\n", timeout=90)  # without a limit, wandb waits for hours
    finally:
        run.kill()
    assert run.returncode == 0 and "wandb sync" in said
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [1, 2]
