"""Test that some packages need only torch, so that they work in any notebook."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TORCH_ALONE = ("positional", "attention", "model", "parallel")
HEAVY = ("deepspeed", "pydantic", "triton", "yaml", "wandb", "tokenizers", "matplotlib", "tqdm")


@pytest.fixture(scope="module")
def imported_with_torch_alone(repo_root) -> dict[str, str]:
    """Return package -> the error of importing its modules in a separate process, or "".

    All other third-party packages are made to look absent. The processes are forked from one that
    has imported torch.
    """
    code = f"""
import importlib, json, os, pkgutil, sys, traceback
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is hidden by this test", name=name)
sys.meta_path.insert(0, Absent())
import torch
errors = {{}}
for package in {TORCH_ALONE!r}:
    read, write = os.pipe()
    if os.fork() == 0:
        text = ""
        try:
            root = importlib.import_module("megatron." + package)
            found = list(pkgutil.walk_packages(root.__path__, root.__name__ + "."))
            assert found
            for module in found:
                importlib.import_module(module.name)
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode() or b"imported")
        os._exit(0)
    os.close(write)
    errors[package] = open(read).read()
print(json.dumps(errors))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", TORCH_ALONE)
def test_imports_with_torch_alone(imported_with_torch_alone, package):
    assert imported_with_torch_alone[package] == "imported"
