"""Servers that answer wrongly: a download is right, or it is an error that names the address."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.corpora.catalogue import RemoteFile
from megatron.data.corpora.download import check, download
from megatron.data.errors import CorpusError

BODY = bytes(range(250)) * 4
HALF = 500


class Server(http.server.ThreadingHTTPServer):
    """Sends the bytes of `answers`, one for each connection, then again the last one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[bytes] = []
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/a.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers.get("Range"))
        answers = self.server.answers
        self.wfile.write(answers.pop(0) if len(answers) > 1 else answers[0])
        self.close_connection = True

    do_HEAD = do_GET


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr("megatron.data.corpora.download.time.sleep", lambda _: None)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def answer(status: str, body: bytes = b"", **headers: object) -> bytes:
    lines = [f"HTTP/1.0 {status}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


WHOLE = answer("200 OK", BODY, Content_Length=len(BODY), ETag='"v1"')
CUT = answer("200 OK", BODY[:HALF], Content_Length=len(BODY), ETag='"v1"')


def rest(range_text: str | None, body: bytes = BODY[HALF:], **headers: object) -> bytes:
    known = {"Content_Range": range_text} if range_text else {}
    return answer("206 Partial Content", body, Content_Length=len(body), **known, **headers)


def test_the_right_rest_is_appended(server, tmp_path):
    server.answers = [CUT, rest(f"bytes {HALF}-999/1000")]
    download(RemoteFile((server.url,)), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert server.ranges == [None, f"bytes={HALF}-"]


@pytest.mark.parametrize(
    "wrong",
    [
        rest("bytes 0-499/1000", BODY[:HALF]),
        rest("bytes 400-999/1000", BODY[400:]),
        rest("bytes 501-999/1000", BODY[501:]),
        rest(None),
        rest("bytes"),
        rest("bytes 500-999/*"),
        rest("items 500-999/1000"),
        rest(f"bytes 500-999/{'9' * 5000}"),
        answer("200 OK", BODY, Content_Length=len(BODY)),
        answer("416 Range Not Satisfiable", Content_Range="bytes */400", Content_Length=0),
        answer("416 Range Not Satisfiable", Content_Length=0),
    ],
)
def test_after_a_wrong_rest_the_whole_file_is_requested(server, tmp_path, wrong):
    server.answers = [CUT, wrong, WHOLE]
    download(RemoteFile((server.url,)), tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == BODY
    assert server.ranges[:2] == [None, f"bytes={HALF}-"] and set(server.ranges[2:]) <= {None}


@pytest.mark.parametrize(
    "wrong, message",
    [
        (answer("200 OK", BODY, Content_Length="abc"), "sends the Content-Length 'abc', which is"),
        (answer("200 OK", BODY, Content_Length=-5), "sends the Content-Length '-5'"),
        (answer("200 OK", BODY, Content_Length="1_000"), "sends the Content-Length '1_000'"),
        (answer("200 OK", BODY, Content_Length="9" * 5000), "sends the Content-Length '999"),
        (answer("200 OK", BODY, Content_Length=2000), r"(IncompleteRead|stops after 1000 of 2000)"),
        (rest("bytes 0-999/1000", BODY), "sends 'bytes 0-999/1000' instead of the bytes from 0"),
        (answer("302 Found", Location="http://[x/"), "Invalid IPv6 URL"),
        (answer("302 Found", Location="file:///etc/passwd"), "HTTP 302"),
        (answer("302 Found", Location="/a.bin"), "HTTP 302 .*infinite loop"),
        (answer("200 OK", **{f"X{i}": i for i in range(200)}), "100 headers"),
        (answer("200 OK", X="y" * 70_000), "header line"),
        (b"nothing like HTTP\r\n\r\n", "nothing like HTTP"),
        (b"", "closed connection without response"),
        (answer("200 OK", b"zz\r\nabc", Transfer_Encoding="chunked"), "IncompleteRead|invalid lit"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(server, tmp_path, wrong, message):
    server.answers = [wrong]
    file = RemoteFile((server.url,))
    with pytest.raises(CorpusError, match=f"cannot be downloaded:\n  {server.url}: .*({message})"):
        download(file, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()
    [(_, found, text)] = check(file)
    assert found or text


def test_a_later_download_must_be_the_file_of_the_first(server, tmp_path):
    """No checksum is known, so the first download's is kept beside the file."""
    path, file = tmp_path / "a.bin", RemoteFile((server.url,))
    stored: Path = tmp_path / ".a.bin.sha256"
    server.answers = [WHOLE]
    digest = download(file, path)
    assert stored.read_text() == f"{digest}\n"
    assert download(file, path, force=True) == digest
    server.answers = [WHOLE.replace(b"\0\1\2", b"\0\1\3")]
    with pytest.raises(CorpusError, match=rf"serves another file: .*, not .* remove {stored}"):
        download(file, path, force=True)
    assert path.read_bytes() == BODY
    stored.unlink()
    assert download(file, path, force=True) != digest
