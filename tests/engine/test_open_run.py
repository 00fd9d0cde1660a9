"""Test the one door to a run's model, and what it refuses."""

import shutil

import pytest
import torch

from megatron.config import ConfigError, load_config
from megatron.engine.errors import CheckpointError
from megatron.engine.open_run import open_run
from megatron.parallel.groups import build_groups
from tests.helpers.jobs import seal_again
from tests.helpers.paths import FIXTURES

CPU = build_groups(torch.device("cpu"))


@pytest.fixture
def run(tmp_path):
    shutil.copytree(FIXTURES / "checkpoint" / "run", tmp_path / "run")
    shutil.copy(FIXTURES / "checkpoint" / "config.yml", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_opens_by_its_folder_alone(run):
    opened = open_run(run, groups=CPU)
    assert opened.saved.tag == "global_step3" and not opened.model.training
    assert opened.said() == f"evaluating {run / 'global_step3'}" and opened.dtype == torch.float32
    ids = torch.tensor([list(b"some text")])
    given = open_run(run, load_config([run / "config.yml"], ["attention_backend=eager"]), CPU)
    with torch.no_grad():
        torch.testing.assert_close(opened.model(ids), given.model(ids), rtol=0, atol=1e-5)


def test_files_and_overrides_stand_for_the_config(run):
    (run / "config.yml").rename(run.parent / "named.yml")
    with pytest.raises(CheckpointError, match="has no config.yml; name the config files"):
        open_run(run, groups=CPU)
    named = [run.parent / "named.yml"]
    assert (
        open_run(run, groups=CPU, files=named, overrides=["precision=bf16"]).dtype == torch.bfloat16
    )
    with pytest.raises(ConfigError, match="num_layer: unknown key"):
        open_run(run, groups=CPU, files=named, overrides=["num_layer=3"])


@pytest.mark.parametrize(
    "damaged, refused", [("mp_rank_00_model_states.pt", True), ("optim", False)]
)
def test_the_files_that_hold_the_weights_must_be_intact(run, damaged, refused):
    seal_again(run / "global_step3")
    [path] = (run / "global_step3").glob(f"*{damaged}*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if refused:
        with pytest.raises(
            CheckpointError, match=f"is damaged: .*{path.name}: its checksum is wrong"
        ):
            open_run(run, groups=CPU)
    else:
        open_run(run, groups=CPU)


def test_a_folder_without_a_checkpoint(run):
    (run / "latest").unlink()
    shutil.rmtree(run / "global_step3")
    with pytest.raises(CheckpointError, match="holds no checkpoint .*name the `save` folder"):
        open_run(run, groups=CPU)
