"""Test which GPU a rank uses, and that the state of a converted checkpoint gets there."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron import launcher
from megatron.engine.checkpoint import relayout
from megatron.engine.job.join import device_of_rank


@pytest.fixture(name="rank")
def _rank(monkeypatch):
    """Return a function from the number of visible GPUs and LOCAL_RANK to the device's index."""

    def build(visible, local_rank):
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        for name in ("LOCAL_RANK", launcher.LOCAL_RANK):
            monkeypatch.setenv(name, "")  # so that it is restored
            monkeypatch.delenv(name)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local_rank))
        device = device_of_rank()
        assert chosen == [device] and device.type == "cuda"
        return device.index

    return build


def test_a_rank_uses_the_gpu_of_its_number(rank):
    assert rank(8, 3) == 3 and os.environ["LOCAL_RANK"] == "3"
    assert rank(8, None) == 0 and rank(1, None) == 0 and "LOCAL_RANK" not in os.environ


def test_a_task_that_sees_only_its_own_gpu_uses_it(rank):
    """As with `srun --gpus-per-task=1`. DeepSpeed takes LOCAL_RANK for the number of the device."""
    assert rank(8, 3) == 3 and launcher.local_rank() == 3
    assert rank(1, 3) == 0 and launcher.local_rank() == 3  # of which only 0 prints for its machine
    assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"


def test_the_counter_of_steps_of_a_converted_checkpoint_is_on_the_device(tmp_path):
    """DeepSpeed leaves it on the CPU, where fused Adam refuses it if the weights are on a GPU."""
    shared = torch.tensor(7.0)
    states = {"a": {"step": shared}, "b": {"step": shared}, "c": {"step": 7}}
    engine = SimpleNamespace(
        device=torch.device("meta"),
        optimizer=SimpleNamespace(optimizer=SimpleNamespace(state=states)),
        _config=SimpleNamespace(),
        load_checkpoint=lambda *_, **__: None,
    )
    relayout.load(engine, tmp_path)
    assert states["a"]["step"].is_meta and states["c"]["step"] == 7
    assert states["a"]["step"] is not states["b"]["step"]
