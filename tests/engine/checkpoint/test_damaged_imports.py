"""Test that an import with flipped bytes is refused, whichever of its files has them."""

import json
import shutil

import pytest
import torch

from megatron.engine.checkpoint.checksums import sealed
from megatron.engine.checkpoint.choose_start import usable
from megatron.engine.checkpoint.exchange import import_checkpoint
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import CheckpointError
from megatron.hub.importing import import_folder
from megatron.parallel.groups import build_groups
from tests.helpers.hub import hub_model
from tests.helpers.paths import FIXTURES

ALONE = build_groups(torch.device("cpu"))
RELEASE = FIXTURES / "parity" / "models" / "kerple_log" / "checkpoint" / "global_step50000"
FLIPPED = 64


def of_gpt_neox(folder):
    import_checkpoint(RELEASE, folder / "run", summed_biases=False)


def of_transformers(folder):
    hub_model("llama").save_pretrained(folder / "hub")
    import_folder(folder / "hub", folder / "run")


@pytest.fixture(params=[of_gpt_neox, of_transformers], scope="module")
def imported(request, tmp_path_factory):
    """Return the run folder of an import."""
    folder = tmp_path_factory.mktemp("imported")
    request.param(folder)
    return folder / "run"


def test_flipped_bytes_in_any_file_of_an_import_are_refused(imported, tmp_path):
    assert usable(imported, ALONE, allow_fallback=False) == (newest(imported), "")
    checkpoint = newest(imported).path
    files = [path.relative_to(imported) for path in checkpoint.rglob("*") if path.is_file()]
    assert {"kerple.json", "mp_rank_00_model_states.pt"} <= {path.name for path in files}
    assert (checkpoint / "configs").is_dir() == any(path.suffix == ".yml" for path in files)
    for number, file in enumerate(files):
        run = tmp_path / str(number)
        shutil.copytree(imported, run)
        content = bytearray((run / file).read_bytes())
        middle = max(0, len(content) - FLIPPED) // 2
        for place in range(middle, min(middle + FLIPPED, len(content))):
            content[place] ^= 1
        (run / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"is damaged: .*{file.name}: "):
            usable(run, ALONE, allow_fallback=False)


def test_an_import_of_an_earlier_version_has_no_checksums_and_still_loads(imported, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    record = newest(run).path / "kerple.json"
    kept = newest(run).record
    values = json.loads(record.read_text())
    del values["files"]
    record.write_text(sealed({key: x for key, x in values.items() if key != "checksum"}))
    saved, _ = usable(run, ALONE, allow_fallback=False)
    assert saved.weights().keys() == newest(imported).weights().keys()
    assert saved.kind == "imported" and saved.step == kept.progress.step
