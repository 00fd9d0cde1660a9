"""Servers that send anything: the right file, or an error that names the address."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import socketserver
import threading
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from megatron.data.corpora.catalogue import RemoteFile
from megatron.data.corpora.download import check, download
from megatron.data.errors import CorpusError
from tests.fuzz.damage import FOLDER, damaged, in_time

BODY = b"the right file"
HEADERS = b'HTTP/1.1 %s\r\nETag: "1"\r\nContent-Length: %d\r\n%s\r\n'
WHOLE = HEADERS % (b"200 OK", len(BODY), b"") + BODY
CUT = HEADERS % (b"200 OK", len(BODY), b"") + BODY[:5]
REST = HEADERS % (b"206 Partial Content", 9, b"Content-Range: bytes 5-13/14\r\n") + BODY[5:]
NONE = HEADERS % (b"416 No", 0, b"Content-Range: bytes */14\r\n")
MOVED = HEADERS % (b"302 Found", 0, b"Location: /other\r\n")
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ne\r\n" + BODY + b"\r\n0\r\n\r\n"
ANSWERS = [WHOLE, CUT, REST, NONE, MOVED, CHUNKS]


class Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1 << 16)
        answers = self.server.answers
        self.request.sendall(answers.pop(0) if len(answers) > 1 else answers[0])


@functools.cache
def server(_: int) -> socketserver.TCPServer:
    """A server in a thread of this process, whose id is the argument."""
    made = socketserver.TCPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


@given(st.lists(damaged(ANSWERS, most=2), min_size=1, max_size=4))
def test_a_download(answers: list[bytes]) -> None:
    here = server(os.getpid())
    here.answers = [*answers, WHOLE] if len(answers) > 2 else answers
    url = f"http://127.0.0.1:{here.server_address[1]}/file"
    file = RemoteFile((url,), sha256=hashlib.sha256(BODY).hexdigest())
    for path in FOLDER.glob("file*"):
        path.unlink()
    waits = mock.patch("megatron.data.corpora.download.time.sleep")
    with in_time(), waits, contextlib.redirect_stderr(io.StringIO()):
        list(check(file))
        try:
            download(file, FOLDER / "file")
        except CorpusError as error:
            assert url in str(error)
            return
    assert (FOLDER / "file").read_bytes() == BODY
