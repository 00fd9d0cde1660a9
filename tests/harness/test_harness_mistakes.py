"""Test what tools/lm_eval.py and evaluate.py say about mistakes in tasks and options."""

from __future__ import annotations

import copy
import json
import sys
from datetime import datetime

import pytest
import torch

import evaluate as command
from megatron.engine.errors import DivergedError
from megatron.harness.installed_lm_eval import harness_packages
from megatron.model import GPT
from megatron.parallel.groups import ALONE
from tests.harness.conftest import BYTES
from tests.helpers.paths import FIXTURES
from tools import lm_eval as tool

TASKS = FIXTURES / "harness"


def test_mistakes(run, call, tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("task: broken\ncustom_dataset: !function absent.data\n")
    own = (run, "--include_path", TASKS, "--tasks", "local_perplexity,local_continuation")
    scored = []
    monkeypatch.setattr(GPT, "forward", lambda *given, **options: scored.append(1) or 1 / 0)
    for args, code, message in [
        ((run,), 2, "--tasks"),
        ((*own, "--gen_kwargs", "repetition_penalty=2"), 1, "repetition_penalty cannot be used"),
        ((*own, "--gen_kwargs", "top_p=hot,do_sample=true"), 1, "not a number (could not convert"),
        ((*own, "--gen_kwargs", "temperature=none"), 1, "generation_kwargs: {'until': "),
        ((*own, "--max_length", 12), 1, "max_gen_toks 12 leaves no room for a context within"),
        (("--tasks", "a"), 2, "name the run folder: RUN"),
        ((tmp_path / "no", "--tasks", "a"), 1, "no: there is no such folder"),
        ((tmp_path, "--tasks", "a"), 1, "has no config.yml; name the config files: lm_eval.py"),
        ((run, "--tasks", "a", "--batch_size", 0), 2, "--batch_size must be at least 1, not 0"),
        ((run, "--tasks", "a", "--limit", "nan"), 2, "--limit must be at least 0, not nan"),
        ((run, "--tasks", "a", "--limit", 0), 2, "--limit must be above 0"),
        ((run, "--tasks", "a", "--log_samples"), 2, "--log_samples needs --output_path FILE.json"),
        ((run, "--tasks", " ,"), 1, "no task is named; give e.g. lambada_openai"),
        ((run, "--tasks", "a", "--output_path", run), 2, "run is a folder; name a file in it"),
        ((run, "--tasks", "a", "--output_path", "no/x.json"), 2, "there is no such folder"),
        ((run, "--tasks", "a", "--include_path", "no"), 1, "--include_path no: there is no such"),
        ((run, "--tasks", tmp_path / "broken.yaml"), 1, "a task cannot be loaded: "),
        ((run, "--tasks", tmp_path / "absent.yaml"), 1, "a task cannot be loaded: "),
    ]:
        _, err = call(tool, *args, code=code)
        assert message in err and "Traceback" not in err
    assert scored == []  # what can be known at the start is said before hours of scoring


def test_patterns_and_groups_find_the_harness_tasks_too(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: lambada_mine\noutput_type: multiple_choice\n")
    (tmp_path / "group.yaml").write_text("group: both\ntask: [lambada_mine, lambada_openai]\n")
    with harness_packages():
        from megatron.harness.score_tasks import find_tasks
    _, found = find_tasks(["lambada_mine"], tmp_path)
    assert found == ["lambada_mine"]
    manager, found = find_tasks(["lambada*", "both"], tmp_path)
    assert {"lambada_mine", "lambada_openai", "both"} <= {*found} <= {*manager.all_tasks}


def test_the_names_of_two_files_differ(run, call, tmp_path):
    """A dot in a name does not begin its ending."""
    some = (run, "--tasks", "local_choice", "--include_path", TASKS, "--log_samples")
    call(tool, *some, "--output_path", tmp_path / "lr0.001")
    assert {path.name for path in tmp_path.iterdir()} == {"lr0.001", "lr0.001.samples.json"}


def test_questions_and_answers_are_written_and_options_replaced(run, call, tmp_path):
    out = tmp_path / "scores.json"
    some = (run, "--tasks", "local_continuation", "--include_path", TASKS, "--output_path", out)
    call(tool, *some, "--log_samples", "--gen_kwargs", "max_gen_toks=3,until=~")
    rows = json.loads((tmp_path / "scores.samples.json").read_text())["local_continuation"]
    assert len(rows) == 3 and all(len(row["resps"][0][0].encode()) <= 3 for row in rows)
    found = json.loads(out.read_text())
    assert "samples" not in found and found["config"]["gen_kwargs"]["max_gen_toks"] == 3


def test_mistakes_in_evaluate(run, call, tmp_path):
    some = (run / "config.yml", "--load", run, "--out", tmp_path, "--suite")
    _, err = call(command, *some, "--eval_tasks", "a", code=2)
    assert "--suite measures no tasks" in err
    nothing = ("-o", "eval_lengths=[]", "-o", "eval_tasks=[]")
    _, err = call(command, *some[:3], *nothing, code=2)
    assert "nothing to evaluate; give --lengths L1,L2,... (or `eval_lengths` in the config)" in err


def test_the_prefix_may_name_a_new_folder(run, call, tmp_path):
    named = ("--eval_tasks", "local_choice,", "--include_path", TASKS)
    prefix = tmp_path / "new" / "mine"
    call(command, run / "config.yml", "--load", run, *named, "--eval_results_prefix", prefix)
    assert len(list(tmp_path.glob("new/mine_eval_results_*.json"))) == 1


def test_evaluations_that_begin_in_the_same_second_write_files_of_their_own(
    run, call, tmp_path, monkeypatch
):
    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(command, "datetime", Stopped)
    some = (run / "config.yml", "--load", run, "--out", tmp_path, "--include_path", TASKS)
    for _ in range(3):
        call(command, *some, "--eval_tasks", "local_choice")
    call(command, *some, "--eval_tasks", "no_such_task", code=1)
    name = "eval_results_01-02-2026-03-04-05"
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"{name}.json", f"{name}-2.json", f"{name}-3.json"}
    assert all(json.loads(path.read_text())["results"] for path in tmp_path.iterdir())
    with command.new_file(tmp_path / f"{name}.json") as path:
        assert path.name == f"{name}-4.json" and path.exists()  # no other job takes it meanwhile
    monkeypatch.setenv("RANK", "1")
    with command.new_file(tmp_path / "x.json") as path:
        assert not path.exists()


def test_a_broken_model_gets_no_score(model):
    """A number that is not finite would count as the first of several choices."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with harness_packages():
        from lm_eval.api.instance import Instance

        from megatron.harness.model import RunModel
    sizes = {"max_length": sys.maxsize, "batch_size": 2}
    adapter = RunModel(broken, BYTES, ALONE, **sizes, seed=0, info={})
    for method, request in [("loglikelihood", ("a", "b")), ("loglikelihood_rolling", ("ab",))]:
        asked = [Instance("loglikelihood", {}, request, 0)]
        with pytest.raises(DivergedError, match="log-likelihoods are not finite"):
            getattr(adapter, method)(asked, disable_tqdm=True)
