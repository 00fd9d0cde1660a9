"""Files that are no checkpoint files, or call functions: an error names them, and nothing runs."""

import argparse
import functools
import importlib
import os
import pickle
import random
import subprocess
import sys
import urllib.request
import zipfile

import numpy as np
import pytest
import torch

from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import only_safe_loads, safe_load

CALLS = {
    "a command": (os.system, ("true",)),
    "an import": (importlib.import_module, ("antigravity",)),
    "eval": (eval, ("1",)),
    "getattr": (getattr, (1, "real")),
    "open": (open, ("proof", "w")),
    "a process": (subprocess.Popen, (["true"],)),
    "nested pickle": (pickle.loads, (pickle.dumps(1),)),
    "nested file": (torch.load, ("other.pt",)),
    "nested tensor": (torch.storage._load_from_bytes, (b"",)),
    "torch hub": (torch.hub.load, ("a/b", "c")),
    "partial": (functools.partial, (os.getpid,)),
    "network": (urllib.request.urlopen, ("http://127.0.0.1:9",)),
    "numpy file": (np.load, ("other.npy", "r", True)),
    "map": (map, (os.rmdir, ["proof"])),
}


class Call:
    def __init__(self, function, arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("new", [True, False])
def test_no_call_is_made(tmp_path, kind, new):
    path = tmp_path / "a.pt"
    torch.save({"a": Call(*CALLS[kind])}, path, _use_new_zipfile_serialization=new)
    refuse(path, "asks for .*, which no checkpoint needs; refused")


FILES = {
    "a pipe": (os.mkfifo, "not a regular file"),
    "a folder": (os.mkdir, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "nothing": (lambda path: None, "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "text": (lambda path: path.write_text("x" * 100), "refused|cannot be read"),
    "a zip": (lambda path: zipfile.ZipFile(path, "w").close(), "refused|cannot be read"),
    "an object": (lambda path: torch.save(argparse.Namespace(a=1), path), "asks for argparse"),
    "TorchScript": (
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path),
        "refused|cannot be read",
    ),
    "a path as key": (lambda path: torch.save([{"../a": 1}], path), "is a path"),
    "NUL in a key": (lambda path: torch.save({"a": ({"b\0": 1},)}, path), "is a path"),
    "endless nesting": (
        lambda path: path.write_bytes(b"\x80\x02" + b"(" * 10**4 + b"."),
        "refused|cannot be read",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_checkpoint_file_is_refused(tmp_path, kind):
    make, says = FILES[kind]
    make(tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", says)


def refuse(path, says):
    with pytest.raises(CheckpointError, match=says):
        safe_load(path)
    with only_safe_loads(), pytest.raises(CheckpointError, match=says):
        torch.load(path, weights_only=False)


def test_content_that_contains_itself_is_loaded(tmp_path):
    values: list = []
    values.append({"a": values})
    torch.save(values, tmp_path / "a.pt")
    assert isinstance(safe_load(tmp_path / "a.pt")[0]["a"], list)


def test_processes_that_a_conversion_starts_refuse_code_too(tmp_path):
    torch.save({"a": Call(os.mkdir, (str(tmp_path / "proof"),))}, tmp_path / "a.pt")
    script = f"import torch; torch.load({str(tmp_path / 'a.pt')!r}, weights_only=False)"
    with only_safe_loads():
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "posix.mkdir" in done.stderr
    assert not (tmp_path / "proof").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_the_environment_of_other_threads_keeps_its_variables(monkeypatch):
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    monkeypatch.setattr(type(os.environ), "clear", lambda _: pytest.fail("RANK is gone for others"))
    with only_safe_loads():
        monkeypatch.setenv("SET_MEANWHILE", "1")
        with only_safe_loads():
            pass
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert os.environ["SET_MEANWHILE"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_changed_bytes_give_an_error_or_content(tmp_path):
    """Errors of many types come out of the unpickler."""
    path, draw = tmp_path / "a.pt", random.Random(5)
    content = {"module": {"a": torch.ones(2)}, "step": 3, "set": {1}, "text": ["b", None, 2.5]}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    intact, refused = path.read_bytes(), 0
    for _ in range(300):
        data = bytearray(intact)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        try:
            safe_load(path)
        except CheckpointError as error:
            refused += str(path) in str(error)
    assert 100 < refused < 300


class Written:
    """Pickled as a call of `getattr`, the way Python before 3.11.4 writes members of enums."""

    def __init__(self, cls, name):
        self.cls, self.name = cls, name

    def __reduce__(self):
        return getattr, (self.cls, self.name)


def test_members_of_enums_are_read_as_older_pythons_write_them(tmp_path):
    """DeepSpeed's optimizer states have the ZeRO stage, a member of an enum."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"zero_stage": Written(ZeroStageEnum, "gradients")}, tmp_path / "states.pt")
    with only_safe_loads():
        loaded = torch.load(tmp_path / "states.pt")
    assert loaded["zero_stage"] is ZeroStageEnum.gradients


def test_getattr_gives_nothing_but_members_of_enums(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    torch.save(Written(LossScaler, "backward"), tmp_path / "states.pt")
    with only_safe_loads(), pytest.raises(CheckpointError, match="asks for getattr"):
        torch.load(tmp_path / "states.pt")
