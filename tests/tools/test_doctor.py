"""Test the doctor: each planted fault is named with its remedy, and no broken package stops it."""

from __future__ import annotations

import json
import re
import socket
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.paths import ROOT
from tools import doctor
from tools.checkup import machine, software
from tools.checkup.finding import OK, PROBLEM, WARNING, Case

QUICKSTART = ROOT / "configs" / "quickstart.yml"


@pytest.fixture
def case(tmp_path):
    return Case(config=None, folder=tmp_path / "runs" / "not there yet", gpu=False)


def bad(check, case):
    return [(each.level, each.text, each.remedy) for each in check(case) if each.level != OK]


def replace_file(monkeypatch, name: str, text: str) -> None:
    """Make `Path(name).read_text()` return `text`."""
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: text if str(self) == name else real(self, *a, **k)
    )


def few_files(monkeypatch, folder):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 4096))


def small_disks(monkeypatch, folder):
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: SimpleNamespace(total=64_000_000, free=5_000_000)
    )


def unsafe_triton(monkeypatch, folder):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "3.5.1" if n == "triton" else real(n))


def no_compiler(monkeypatch, folder):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))


def no_name(monkeypatch, folder):
    def unknown(*_):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)


def broken_deepspeed(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "deepspeed", None)


def save_is_a_file(monkeypatch, folder):
    (folder / "runs").write_text("")


def unknown_threads(monkeypatch, folder):
    monkeypatch.setenv("OMP_NUM_THREADS", "all")


def spinning_threads(monkeypatch, folder):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")


FAULTS = [
    (few_files, machine.open_files, PROBLEM, "limit 256", "ulimit -n"),
    (small_disks, machine.disk, PROBLEM, "0.0 GB free", "name another `save`"),
    (save_is_a_file, machine.disk, PROBLEM, "written, Not a directory", "name another `save`"),
    (small_disks, machine.shared_memory, WARNING, "/dev/shm has 64 MB", "--ipc=host"),
    (unsafe_triton, software.packages, WARNING, "read data before", "triton==3.7.1 or newer"),
    (no_compiler, software.compiler, WARNING, "C compiler: none", "apt-get install g++"),
    (no_name, machine.names, WARNING, "not resolved", "/etc/hosts"),
    (broken_deepspeed, software.packages, PROBLEM, "deepspeed 0", "pip install deepspeed=="),
    (unknown_threads, machine.threads, WARNING, "OMP_NUM_THREADS=all", "export OMP_NUM_THREADS="),
    (spinning_threads, machine.threads, WARNING, "=active", "unset OMP_WAIT_POLICY"),
]


@pytest.mark.parametrize(
    "plant, check, level, text, remedy", FAULTS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_planted_fault_is_named_with_its_remedy(
    case, tmp_path, monkeypatch, plant, check, level, text, remedy
):
    before = bad(check, case)
    plant(monkeypatch, tmp_path)
    new = [each for each in bad(check, case) if each not in before]
    assert any(v == level and text in t and remedy in r for v, t, r in new), new
    assert all(r and "\n" not in t + r for _, t, r in new)


def test_the_report_names_all_of_them_and_goes_on(tmp_path, monkeypatch, capsys):
    for plant in {fault[0] for fault in FAULTS}:
        plant(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor.main([]) == 1
    report = capsys.readouterr().out
    assert all(remedy in report for plant, *_, remedy in FAULTS if plant is not unsafe_triton)
    assert "\x1b" not in report and "attention: blocked (auto" in report
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["check"] for each in found} == set(doctor.CHECKS)
    without_numbers = re.sub(r"\d", "", report)  # free space changes from call to call
    for each in found:
        assert re.sub(r"\d", "", each["text"]) in without_numbers
        assert each["remedy"] in report and set(each) == KEYS
    problems, warnings = map(int, re.findall(r"\d+", report.splitlines()[-1]))
    levels = [each["level"] for each in found]
    assert (problems, warnings) == (levels.count(PROBLEM), levels.count(WARNING)) and problems >= 3


KEYS = {"check", "level", "text", "remedy"}


def test_a_healthy_machine_is_exit_code_0(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"python": software.python, "choices": software.choices})
    assert doctor.main([str(QUICKSTART)]) == 0
    said = capsys.readouterr().out
    for words in ("attention: blocked (auto: kerple_log", "precision: fp32", "optimizer: muon"):
        assert words in said
    assert "0 problems, 0 warnings" in said
    assert "\x1b[32mok" in doctor.as_text([("python", next(software.python(None)))], True)


@pytest.mark.parametrize(
    "torch, level",
    [("2.10.1", WARNING), ("2.11.0+cu130", OK), ("2.13.2+cpu", OK), ("2.14.0", WARNING)],
)
def test_versions_of_the_range_are_supported(case, monkeypatch, torch, level):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: torch if n == "torch" else real(n))
    found = next(each for each in software.packages(case) if each.text.startswith("torch"))
    assert found.level == level
    assert found.text == f"torch {torch}, supported: from 2.11.0 on, below 2.14"


def test_a_wrong_config_is_one_of_the_problems(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"python": software.python})
    path = tmp_path / "wrong.yml"
    path.write_text("pos_emb: kerpel_log\n")
    assert doctor.main([str(path)]) == 1
    assert "did you mean kerple_log" in capsys.readouterr().out


def test_a_wrong_launch_is_one_of_the_problems(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"python": software.python})
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert doctor.main([]) == 1
    report = capsys.readouterr().out
    assert "WORLD_SIZE is 2, but RANK" in report and "ok       python" in report


def test_a_config_for_all_gpus(monkeypatch, capsys):
    """Without a launcher, a config is that of one process for each GPU, as for train.py."""
    monkeypatch.setattr(doctor, "CHECKS", {"python": software.python})
    given = [str(ROOT / "configs" / "recipes" / "own_160M.yml")]
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 8)
    assert doctor.main(given) == 0
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 3)
    assert doctor.main(given) == 1
    assert "data-parallel size 3" in capsys.readouterr().out


def test_bf16_on_a_processor_without_it(case, monkeypatch):
    replace_file(monkeypatch, "/proc/cpuinfo", "flags : sse avx2 avx512f\n")
    assert bad(machine.cpu, case) == []
    bf16 = SimpleNamespace(training=SimpleNamespace(precision="bf16"))
    [(level, text, remedy)] = bad(machine.cpu, Case(bf16, case.folder, gpu=False))
    assert level == WARNING and "much slower" in text and "precision: fp32" in remedy
    replace_file(monkeypatch, "/proc/cpuinfo", "flags : avx512f avx512_bf16\n")
    assert bad(machine.cpu, Case(bf16, case.folder, gpu=False)) == []


def test_machines_of_a_job_need_a_shared_folder(case, tmp_path, monkeypatch):
    several = Case(None, case.folder, gpu=False, ranks=4, several=True)
    mounts = "/dev/sda / ext4 rw\nserver:/x {} {} rw\n"
    replace_file(monkeypatch, "/proc/mounts", mounts.format(tmp_path, "nfs4"))
    assert not any("local" in text for _, text, _ in bad(machine.disk, several))
    replace_file(monkeypatch, "/proc/mounts", mounts.format(tmp_path, "xfs"))
    [(level, text, remedy)] = [f for f in bad(machine.disk, several) if "local" in f[1]]
    assert level == PROBLEM and "xfs" in text and "shared file system" in remedy
