"""A key in the environment stands in no file, no output and no command line of a run."""

import contextlib
import threading
from pathlib import Path

from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import call

KEY = "0123456789abcdef" * 2 + "deadbeef"
PASSWORD = "hunter2hunter2"


def command_lines() -> bytes:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return b"\n".join(found)


def test_a_key_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PASSWORD}@127.0.0.1:9")
    run = tmp_path / "run"
    config = write_config(
        tmp_path / "c.yml",
        write_shards(tmp_path),
        save=str(run),
        save_interval=1,
        train_iters=1,
        eval_iters=0,
        train_micro_batch_size_per_gpu=2,
        use_wandb=True,
        wandb_mode="offline",
        wandb_host="https://wandb.invalid",
        num_layers=1,
    )
    seen, over = [], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append(command_lines())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        output = call("train.py", config)
    finally:
        over.set()
        watcher.join()
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.suffix == ".wandb" for path in written)
    assert run / "global_step1" / "kerple.json" in written and run / "config.yml" in written
    assert any(b"wandb" in lines for lines in seen)  # its own process was seen
    for secret in (KEY, PASSWORD):
        assert secret not in output
        assert [path for path, content in written.items() if secret.encode() in content] == []
        assert not any(secret.encode() in lines for lines in seen)
