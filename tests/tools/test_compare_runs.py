"""Two runs that differ in one key, in one commit, in nothing: compare_runs says so in each case."""

import json
import re
import shutil

import pytest

from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import call

SIZE = {"num_layers": 1, "train_iters": 3, "train_micro_batch_size_per_gpu": 2, "eval_interval": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    prefix = write_shards(folder)
    for name, changes in (("a", {}), ("same", {}), ("other", {"lr_decay_style": "linear"})):
        folders = {"save": str(folder / name), "load": str(folder / name), "save_interval": 2}
        config = write_config(folder / f"{name}.yml", prefix, **SIZE, **folders, **changes)
        call("train.py", config)
    return folder


def compare(*runs, code):
    return call("tools/compare_runs.py", *runs, code=code)


def test_two_runs_of_one_command_do_not_differ(runs):
    assert compare(runs / "a", runs / "same", code=0) == "nothing differs\n"
    lines = (runs / "a" / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ", line) for line in lines)
    assert sum(" | loss " in line for line in lines) == 3
    names = [json.loads(line).keys() for line in (runs / "a" / "metrics.jsonl").open()]
    assert all({"time", "elapsed_seconds"} < each for each in names)


def test_two_slurm_jobs_do_not_differ_by_their_jobs(runs, tmp_path):
    for name, spin in (("1", "3000"), ("2", "30000")):
        run = shutil.copytree(runs / "a", tmp_path / name)
        found = json.loads((run / "run.json").read_text())
        own = {"SLURM_JOB_ID": name, "SLURM_JOB_NODELIST": f"n{name}", "GOMP_SPINCOUNT": spin}
        found["starts"][-1]["environment"] |= own
        (run / "run.json").write_text(json.dumps(found))
    assert compare(tmp_path / "1", tmp_path / "2", code=0) == "nothing differs\n"


def test_one_key_is_named_and_the_step_from_which_the_losses_differ(runs):
    said = compare(runs / "a", runs / "other", code=1).splitlines()
    assert said[0] == "config lr_decay_style: cosine | linear"
    first = {line.partition(":")[0]: line for line in said[1:]}
    # The rate of step 2 is the first that differs, so step 3 has the first other loss.
    assert re.match(r"train/lr: equal in \d rows, from step [12] on 0.0", first["train/lr"])
    assert first["train/loss"].startswith("train/loss: equal in 2 rows, from step 3 on ")
    assert not any(line.startswith(("code", "data", "versions", "ranks")) for line in said)


def test_one_commit_and_its_changes_are_shown(runs, tmp_path):
    for name in "ab":
        run = shutil.copytree(runs / "a", tmp_path / name)
        found = json.loads((run / "run.json").read_text())
        found["starts"][-1]["code"] |= {"commit": name * 40, "patch": name}
        found["patches"][name] = f"kept\n+changed {name}\n"
        (run / "run.json").write_text(json.dumps(found))
    assert compare(tmp_path / "a", tmp_path / "b", code=1).splitlines() == [
        f"code.commit: {'a' * 40} | {'b' * 40}", "code.patch: a | b",
        "--- patch of A", "+++ patch of B", "@@ -2 +2 @@", "-+changed a", "++changed b",
    ]  # fmt: skip


def test_a_resumed_run_names_its_start_and_keeps_its_id(runs, tmp_path):
    run = runs / "same"
    call("train.py", runs / "same.yml", "-o", "train_iters=4")
    first, second = json.loads((run / "run.json").read_text())["starts"]
    assert second["from"] == str(run / "global_step3") and second["step"] == 3
    assert first["run"] == second["run"] == second["from_run"]
    record = json.loads((run / "global_step4" / "kerple.json").read_text())
    assert record["lineage"] == first["run"] and second["data"] == record["data"]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("run.json", None, "run.json: not that of a run"),
        ("run.json", "[]", "run.json: not that of a run"),
        ("run.json", '{"starts": [], "patches": {}}', "run.json: not that of a run"),
        ("run.json", '{"starts": [{"code": 3}], "patches": {}}', "run.json: not that of a run"),
        ("config.yml", "a: [", "config.yml: not that of a run"),
        ("config.yml", "7", "config.yml: not that of a run"),
    ],
)
def test_missing_and_damaged_files_are_named(runs, tmp_path, name, content, words):
    other = shutil.copytree(runs / "a", tmp_path / "b")
    (other / name).unlink()
    if content is not None:
        (other / name).write_text(content)
    said = compare(runs / "a", other, code=1)
    assert said.startswith(f"error: {other}") and words in said and "Traceback" not in said
