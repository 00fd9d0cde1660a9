"""Train in another process, and count the launches of fused Triton kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.launch import run_script
from tests.helpers.paths import ROOT

DRIVER = """
import json, sys
import train
sys.argv = ["train.py", *sys.argv[1:]]
code = train.main()
from megatron.kernels.launch import LAUNCHES
print("LAUNCHES", json.dumps(LAUNCHES))
sys.exit(code)
"""


def train(config: Path, *args: str, interpret: str = "1") -> tuple[int, str, dict[str, int]]:
    """Return (exit code, output, number of launches of each Triton kernel)."""
    driver, environ = config.with_name("driver.py"), os.environ | {"TRITON_INTERPRET": interpret}
    driver.write_text(DRIVER)
    if environ == os.environ:
        code, text = run_script(driver, config, *args, cwd=ROOT, environ=environ)
    else:  # Triton reads the variable when it is imported
        done = subprocess.run(
            [sys.executable, driver, config, *args],
            cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}, timeout=240,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        code, text = done.returncode, done.stdout
    launches = [line for line in text.splitlines() if line.startswith("LAUNCHES ")]
    counts = json.loads(launches[0].partition(" ")[2]) if launches else {}
    return code, text, counts


def keys(run: Path) -> dict:
    """Return config keys: two layers, two heads, two micro-steps, validation after step 2."""
    return {
        "save": str(run),
        "load": str(run),
        "num_attention_heads": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "train_iters": 2,
        "eval_interval": 2,
        "eval_iters": 1,
        "save_interval": 1,
    }
