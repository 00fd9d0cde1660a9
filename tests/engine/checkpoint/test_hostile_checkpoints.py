"""Checkpoint files that would run code: no command runs it, and each names the file.

Each file of a checkpoint in turn gets a bomb, an object that makes a folder when it is unpickled.
The record is sealed again, as a forger would do.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron.config import load_config
from megatron.engine.checkpoint import relayout
from megatron.engine.checkpoint.checksums import describe_files, sealed
from megatron.engine.checkpoint.exchange import export_checkpoint, import_checkpoint
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import only_safe_loads
from megatron.evaluation.by_length import evaluate_checkpoint
from megatron.parallel.groups import build_groups
from megatron.pretraining.run import Job
from megatron.run_folder import RECORD
from tests.helpers.jobs import STAGES, cell, write_config, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import FIXTURES
from tools.reshape_checkpoint import reshape

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
PART, STREAMS = "zero_pp_rank_0_mp_rank_00_model_states.pt", "rng_rank_00000.pt"
ALONE = build_groups(torch.device("cpu"))
PUBLISHED = FIXTURES / "parity" / "models" / "kerple_log" / "checkpoint"


class Bomb:
    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def arm(path: Path, proof: Path) -> None:
    """Add a bomb to the content of `path`, and forge the record beside it."""
    state = torch.load(path, weights_only=False, map_location="cpu")
    state = state if isinstance(state, dict) else {"param": state}
    torch.save({"bomb": Bomb(proof)} | state, path)
    record = path.parent / RECORD
    if record.is_file():
        values = json.loads(record.read_text())
        values.pop("checksum")
        record.write_text(sealed(values | {"files": describe_files(path.parent, ALONE)}))


def settings(folder, stage, **changes):
    config = folder / f"z{stage}.yml"
    run = str(folder / f"z{stage}")
    keys = cell(stage, "fp32") | {"save": run, "load": run, "save_interval": 1, "eval_iters": 0}
    keys |= {"train_micro_batch_size_per_gpu": 2, "train_iters": 1, "lr_decay_iters": 9}
    return write_config(config, str(folder / "text_document"), **keys | changes)


JOBS = ("resume", "other layout", "finetune")
TOOLS = ("evaluate", "export", "reshape", "import")


def start(command, config, run, out, groups):
    """Do what the command does up to the point where all files are read."""
    names = [f"save={run}", f"load={run}", "train_iters=2"]
    if command == "resume":
        Job(load_config([config], names), groups)
    elif command == "other layout":
        stage = load_config([config], world_size=1).parallel.zero_stage
        Job(load_config([config], [*names, f"zero_optimization.stage={stage % 3 + 1}"]), groups)
    elif command == "finetune":
        Job(load_config([config], [*names[1:], "finetune=true", "save=null"]), groups)
    elif command == "evaluate":
        keys = ["eval_tokens=16", "eval_lengths=[16]", f"load={run}"]
        evaluate_checkpoint(load_config([config], keys), run, out=out)
    elif command == "export":
        export_checkpoint(run, out)
    elif command == "reshape":
        reshape(run, out, None, 1)
    else:
        import_checkpoint(newest(run).path, out, summed_biases=False)


def train(groups, folder):
    """One step in each ZeRO stage, then the attacks on training."""
    for stage in STAGES:
        Job(load_config([settings(folder, stage)]), groups).run()
    return attack(folder, JOBS, groups) | attack_converted(groups, folder)


def worth_trying(stage, command, name):
    """Leaves out repetitions: stage 2 has stage 1's files, and only training reads STREAMS."""
    return command == "resume" or (stage != 2 and name != STREAMS)


def attack(folder, commands, groups=None):
    """{(stage, command, file): (error or None, did the bomb go off)}."""
    found = {}
    for stage in STAGES:
        names = sorted(path.name for path in newest(folder / f"z{stage}").path.glob("*.pt"))
        for name in names:
            which = [each for each in commands if worth_trying(stage, each, name)]
            run, out, proof = (folder / each for each in ("attacked", "out", "proof"))
            shutil.copytree(folder / f"z{stage}", run)
            arm(newest(run).path / name, proof)
            for command in which:
                error = None
                try:
                    start(command, folder / f"z{stage}.yml", run, out, groups)
                except CheckpointError as refused:
                    error = str(refused)
                found[stage, command, name] = error, proof.exists()
                shutil.rmtree(out, ignore_errors=True)
                shutil.rmtree(proof, ignore_errors=True)
            shutil.rmtree(run)
    return found


def attack_converted(groups, folder):
    """The same for the files of a folder in the universal format."""
    found, proof = {}, folder / "proof"
    config = settings(folder, 1)
    engine = Job(load_config([config], ["load=null", "save=null"]), groups).engine
    for name in (
        "mp_rank_00_model_states.pt",
        "zero/optimizer_state.pt",
        "zero/final_norm.bias/fp32.pt",
        "zero/final_norm.bias/exp_avg.pt",
        "zero/final_norm.bias/step.pt",
    ):
        target = relayout.convert(newest(folder / "z1"), folder / "scratch")
        arm(target / name, proof)
        error = None
        try:
            relayout.load(engine, target)
        except CheckpointError as refused:
            error = str(refused)
        found["converted", "load", name] = error, proof.exists()
    return found


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    write_shards(folder)
    return run_ranks(1, train, folder)[0] | attack(folder, TOOLS)


def test_no_bomb_goes_off(attacked):
    assert {stage for stage, _, _ in attacked} == {*STAGES, "converted"}
    assert [attempt for attempt, (_, exploded) in attacked.items() if exploded] == []


WEIGHTS = {"finetune", "evaluate", "export"}
CONVERTED = {"other layout", "reshape"}


def readers(stage, name):
    """The commands that read the file `name` of a checkpoint of this ZeRO stage."""
    if stage == 2 or name == STREAMS:
        return {"resume"}
    if stage == 0:
        return {"resume", "import", *WEIGHTS}
    if stage == 3:
        return {"resume", *CONVERTED, *WEIGHTS}
    return {"resume", *CONVERTED, *({"import", *WEIGHTS} if name == MODEL else ())}


@pytest.mark.parametrize("stage", STAGES)
def test_each_command_that_reads_a_hostile_file_names_it(attacked, stage):
    names = {name for which, _, name in attacked if which == stage}
    expected = {0: {MODEL, STREAMS}, 3: {PART, OPTIMIZER, STREAMS}}
    assert names == expected.get(stage, {MODEL, OPTIMIZER, STREAMS})
    for name in names:
        refused = {
            command
            for (which, command, file), (error, _) in attacked.items()
            if (which, file) == (stage, name) and f"/{name}: asks for posix.mkdir" in (error or "")
        }
        assert refused == readers(stage, name), name


def test_each_hostile_file_of_a_converted_checkpoint_is_named(attacked):
    found = {
        name: error for (which, _, name), (error, _) in attacked.items() if which == "converted"
    }
    assert len(found) == 5
    for name, error in found.items():
        assert error and f"/{name}: asks for posix.mkdir" in error


def test_without_the_refusal_the_bomb_goes_off(tmp_path):
    torch.save({}, tmp_path / "a.pt")
    arm(tmp_path / "a.pt", tmp_path / "proof")
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "proof").is_dir()


def pipeline(groups, folder):
    """Resume a pipeline's checkpoint whose layer files are all armed: the error of each rank."""
    config, run, proof = folder / "z1.yml", folder / "z1", folder / "proof"
    if groups.is_main:
        settings(folder, 1, pipe_parallel_size=2)
    groups.barrier()
    Job(load_config([config], world_size=2), groups).run()
    groups.barrier()
    if groups.is_main:
        layers = sorted(newest(run).path.glob("layer_*"))
        for path in layers:
            arm(path, proof)
        assert len(layers) > 3
    groups.barrier()
    try:
        Job(load_config([config], ["train_iters=2"], world_size=2), groups)
    except CheckpointError as refused:
        return str(refused), proof.exists()
    return "", proof.exists()


def test_layer_files_of_a_pipeline_are_refused(tmp_path):
    write_shards(tmp_path)
    for error, exploded in run_ranks(2, pipeline, tmp_path):
        assert not exploded
        assert re.search(r"/layer_\d\d-model_00-model_states.pt: asks for posix.mkdir", error)
    with pytest.raises(CheckpointError, match=r"/layer_00-.*.pt: asks for posix.mkdir"):
        newest(tmp_path / "z1").weights()
    assert not (tmp_path / "proof").exists()


def test_a_published_checkpoint_with_a_forged_record_is_refused(tmp_path):
    """`kerple.json` makes it one of ours, which DeepSpeed would have opened."""
    shutil.copytree(PUBLISHED, tmp_path / "run", ignore=shutil.ignore_patterns("configs"))
    saved = newest(tmp_path / "run")
    layers = ["embedding", "layers.0"]
    layout = {"zero_stage": 0}
    progress = {"step": saved.step, "consumed_samples": 0, "train_samples": 0}
    record = {"progress": progress, "layout": layout, "layers": layers, "files": {}}
    (saved.path / RECORD).write_text(sealed(record))
    arm(saved.path / "layer_00-model_00-model_states.pt", tmp_path / "proof")
    forged = newest(tmp_path / "run")
    assert forged.kind == "ours" and forged.damage(ALONE) is None
    with pytest.raises(CheckpointError, match=r"/layer_00-.*.pt: asks for posix.mkdir"):
        forged.weights()
    with only_safe_loads(), pytest.raises(CheckpointError, match="asks for posix.mkdir"):
        torch.load(saved.path / "layer_00-model_00-model_states.pt", weights_only=False)
    assert not (tmp_path / "proof").exists()


def test_names_that_are_paths_write_nothing_outside(tmp_path):
    shutil.copytree(FIXTURES / "checkpoint" / "run", tmp_path / "run")
    saved = newest(tmp_path / "run")
    path = saved.path / OPTIMIZER
    state = torch.load(path, weights_only=False)
    for names in state["optimizer_state_dict"]["param_slice_mappings"]:
        for name in list(names):
            names[f"../../../{name}"] = names.pop(name)
    torch.save(state, path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=rf"{OPTIMIZER}: .* is a path"):
        relayout.convert(saved, tmp_path / "scratch" / "deep" / "er")
    shutil.rmtree(tmp_path / "scratch")
    assert sorted(tmp_path.iterdir()) == before
