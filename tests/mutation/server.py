"""Run tests on mutants, each in a process that is forked after torch and pytest were imported.

The mutants are written into a copy of the tree. One process runs at a time. A first run of the
tests on the true code measures each test; tests that take longer than `SLOW` seconds are slow.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

SLOW = 8.0
MOST_BYTES = 12 << 30
OURS = {"megatron", "tests", "tools", "benchmarks", "train", "evaluate", "generate", "prepare_data"}
IMPORTED = ["torch", "deepspeed", "pandas", "scipy.stats", "matplotlib.figure", "triton"]
IMPORTED += ["hypothesis", "pydantic", "yaml", "safetensors.torch", "jinja2", "tokenizers"]
IMPORTED += ["matplotlib.backends.backend_agg", "pytest_timeout", "torch._dynamo", "regex"]
"""What the tests import from other projects, imported once."""


class Plugin:
    """Chooses the fast or the slow tests, the cheapest first, and measures them.

    It does not read `time.monotonic`, which a test may replace.
    """

    def __init__(self, costs: dict[str, float], slow: bool):
        self.known, self.slow = costs, slow
        self.costs: dict[str, float] = {}
        self.failed: list[str] = []
        self.passed = 0
        self._setups: dict[tuple[str, str], float] = defaultdict(float)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cost = {item.nodeid: self.known.get(item.nodeid, 0.0) for item in items}
        chosen = [item for item in items if (cost[item.nodeid] > SLOW) == self.slow]
        files: dict[str, float] = defaultdict(float)
        for item in chosen:
            files[str(item.path)] += cost[item.nodeid]

        def place(item: pytest.Item) -> tuple[float, str, float]:
            return files[str(item.path)], str(item.path), cost[item.nodeid]

        items[:] = sorted(chosen, key=place)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef, request) -> Generator[None]:
        start = time.perf_counter()
        yield
        file = request.node.nodeid.partition("::")[0]  # "" for the whole session
        self._setups[file, fixturedef.argname] += time.perf_counter() - start

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item) -> Generator[None]:
        start = time.perf_counter()
        yield
        files = item.nodeid.partition("::")[0], ""
        setups = sum(self._setups[file, name] for file in files for name in item.fixturenames)
        self.costs[item.nodeid] = time.perf_counter() - start + setups

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(report.nodeid)
            if "Timeout" in str(report.longrepr):
                self.costs[report.nodeid] = math.inf

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def copy_tree(root: Path, copy: Path) -> None:
    """Copy the files that git tracks or does not ignore."""
    shutil.rmtree(copy, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    for name in names.decode().split("\0"):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


class Server:
    """Runs the tests of `tree`, a copy that this process and its imports come from.

    The measured times and the tests' output lie beside the copy.
    """

    def __init__(self, tree: Path):
        self.copy, self.folder = tree, tree.parent
        costs = self.folder / "costs.json"
        self.costs = json.loads(costs.read_text()) if costs.exists() else {}
        self._changes = 0
        os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        os.environ |= {"WANDB_MODE": "offline", "MPLBACKEND": "agg"}
        os.environ.pop("PYTEST_ADDOPTS", None)
        for name in IMPORTED:
            importlib.import_module(name)
        gc.freeze()  # so that no process of tests collects what all of them share

    def write(self, file: str, code: str) -> None:
        """Write a file of the copy, so that no earlier bytecode counts as its own."""
        path = self.copy / file
        path.write_text(code, encoding="utf-8")
        self._changes += 1
        os.utime(path, (self._changes, self._changes))

    def baseline(self, files: list[str]) -> float:
        """Return the seconds of the fast tests of these files, after they passed."""
        for _ in range(6):
            start = time.monotonic()
            found = self.run(files, 1200, measures=True)
            self.costs |= {k: v if v is not None else math.inf for k, v in found["costs"].items()}
            (self.folder / "costs.json").write_text(json.dumps(self.costs))
            if not found["failed"]:
                return time.monotonic() - start
            if any(self.costs.get(name) != math.inf for name in found["failed"]):
                break
        raise SystemExit(f"the tests fail on the true code: {found}; see {self.folder}/output")

    def run(
        self, files: list[str], seconds: float, *, slow: bool = False, measures: bool = False
    ) -> dict:
        """Run the fast or the slow tests of these files until one fails.

        Returns:
            The keys `failed` (names of tests, or of a fault of the process), `passed`, `costs`.
        """
        result, temporary = self.folder / "result.json", self.folder / "temporary"
        result.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._child(files, slow, measures, result, temporary)
        deadline, status = time.monotonic() + seconds, None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        shutil.rmtree(temporary, ignore_errors=True)
        if result.exists():
            return json.loads(result.read_text())
        fault = "time limit" if status is None else f"the process ended with status {status}"
        return {"failed": [fault], "passed": 0, "costs": {}}

    def _child(self, files, slow, measures, result: Path, temporary: Path) -> None:
        os.setsid()
        os.chdir(self.copy)
        for name in list(sys.modules):
            if name.partition(".")[0] in OURS:
                del sys.modules[name]
        importlib.invalidate_caches()
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        plugin = Plugin(self.costs, slow)
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={temporary}", "--tb=short"]
        options += [f"--timeout={SLOW}", "--timeout-method=signal"] if measures else ["-x"]
        try:
            code = int(pytest.main([*options, *files], plugins=[plugin]))
            failed = plugin.failed or [f"pytest ended with {code}"] * (code not in (0, 5))
            costs = {k: None if v == math.inf else v for k, v in plugin.costs.items()}
            found = {"failed": failed, "passed": plugin.passed, "costs": costs}
            result.write_text(json.dumps(found))
        finally:
            os._exit(0)
