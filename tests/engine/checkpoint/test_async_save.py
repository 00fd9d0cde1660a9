"""Checkpoints that are written beside training: the same bytes, and nothing lost by any fault."""

import hashlib
from types import SimpleNamespace

import psutil
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from megatron.config import load_config
from megatron.engine.checkpoint import async_save
from megatron.engine.checkpoint.saved_checkpoints import finished, newest
from megatron.pretraining.run import Job
from tests.helpers.jobs import cell, rows, write_config
from tests.helpers.launch import run_ranks

CELLS = {
    1: {
        **{f"zero{stage}": cell(stage, "fp32") for stage in (0, 1, 2, 3)},
        "zero0-bf16": cell(0, "bf16"),
        "zero1-bf16": cell(1, "bf16"),
        "zero3-bf16": cell(3, "bf16"),
    },
    2: {
        "dp2-zero1": cell(1, "fp32"),
        "dp2-zero3-bf16": cell(3, "bf16"),
        "tp2": {"model_parallel_size": 2},
        "pp2": {"pipe_parallel_size": 2},
        "pp2-bf16": cell(1, "bf16") | {"pipe_parallel_size": 2},
    },
}
"""Number of ranks -> layout -> config keys."""
WAYS = {"sync": False, "async": True}


def train_both_ways(groups, folder, prefix):
    for name, keys in CELLS[groups.world_size].items():
        for way, value in WAYS.items():
            save = {"save": str(folder / name / way), "async_save": value, "save_interval": 2}
            keys = keys | save | {"keep_last_n_checkpoints": 2, "train_batch_size": 4}
            if groups.is_main:
                write_config(folder / name / f"{way}.yml", prefix, **keys)
            groups.barrier()
            config = load_config([folder / name / f"{way}.yml"], world_size=groups.world_size)
            Init.param_id = 0  # ZeRO-3 counts all parameters of a process, and writes the count
            Job(config, groups).run()


@pytest.fixture(scope="module", params=CELLS)
def trained(request, folder, prefix):
    run_ranks(request.param, train_both_ways, folder, prefix)
    return request.param


def content(run):
    """The hash of every file of the checkpoints, except records: these name the config."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.glob("global_step*/*")
        if path.name != "kerple.json"
    }


def test_every_file_has_the_bytes_of_a_synchronous_save(trained, folder):
    for name in CELLS[trained]:
        sync, beside = folder / name / "sync", folder / name / "async"
        assert [each.step for each in finished(sync)] == [4, 6]
        assert content(sync) == content(beside) and newest(beside).step == 6, name
        assert newest(sync).record.files == newest(beside).record.files
        assert rows(sync) == rows(beside)


def test_a_pinned_buffer_has_its_own_size(monkeypatch):
    """torch's pinned memory would have 1,024 bytes, and twice the planned memory at worst."""
    registered = []
    runtime = SimpleNamespace(cudaHostRegister=lambda *given: registered.append(given))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = async_save.Buffer(600, pinned=True)
    staged = buffer.stage([({"x": torch.arange(8.0)}, "one")])[0][0]["x"]
    assert registered == [(staged.data_ptr(), 600, 0)]
    async_save.Buffer(0, pinned=True)  # a rank that writes no file
    assert len(registered) == 1


def test_the_memory_of_a_container_is_limited(tmp_path):
    """Cached files can be dropped; those of a file system in memory cannot."""
    free = psutil.virtual_memory().available
    assert async_save.free_memory(tmp_path) == pytest.approx(free, rel=0.2)  # no limit
    (tmp_path / "memory.current").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 4000000\nshmem 1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert async_save.free_memory(tmp_path) == pytest.approx(free, rel=0.2)
    (tmp_path / "memory.max").write_text("6000000\n")
    assert async_save.free_memory(tmp_path) == 6_000_000 - 5_000_000 + 3_000_000


def test_a_copy_keeps_what_is_shared_and_does_not_change():
    flat = torch.arange(10.0)
    inner = {"x": flat[2:6].view(2, 2), "same": flat, "p": nn.Parameter(flat[:3])}
    state = {"a": [inner, inner], "empty": torch.empty(0), "n": (1, torch.ones(3).half())}
    files = [(state, "one"), ({"flat": flat}, "two")]
    size = async_save.buffer_size(files)
    assert size == 128
    for room in (size, 64, 0):  # what no longer fits is copied elsewhere
        staged = async_save.Buffer(room).stage(files)
        (copied, _), (second, _) = staged
        assert copied["a"][0] is copied["a"][1] and isinstance(copied["a"][0]["p"], nn.Parameter)
        flat += 1
        assert copied["a"][0]["same"].tolist() == [float(n) for n in range(10)]
        assert second["flat"].tolist() == copied["a"][0]["same"].tolist()
        assert copied["a"][0]["x"].tolist() == [[2, 3], [4, 5]]
        if room:
            assert copied["a"][0]["x"].untyped_storage().data_ptr() == second["flat"].data_ptr()
        flat -= 1
