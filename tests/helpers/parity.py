"""Run `tools/check_parity.py` in this process, and change the cases that it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tools.check_parity import main


def check(capsys, *args) -> tuple[int, list[str]]:
    code = main([str(arg) for arg in args])
    return code, capsys.readouterr().out.splitlines()


def changed_npz(path: Path, key: str, change) -> None:
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    arrays[key] = change(arrays[key].copy())
    np.savez(path, **arrays)
