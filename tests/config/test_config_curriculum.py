"""The length of each step, and GPT-NeoX's key `curriculum_learning`."""

from __future__ import annotations

import pytest
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

SCHEDULE = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 16, 32], "max_step": [3, 7]},
}


def test_a_stage_begins_after_its_step(load):
    config = load("curriculum: [[0, 8], [2, 16], [3, 32]]")
    assert [config.length_of(step) for step in range(1, 7)] == [8, 8, 16, 32, 32, 32]
    assert load().length_of(1) == 32


def test_curriculum_learning_gives_the_lengths_of_deepspeed(load):
    config = load("", f"curriculum_learning={SCHEDULE}")
    scheduler = CurriculumScheduler(SCHEDULE)
    for step in range(1, 11):
        assert config.length_of(step) == scheduler.update_difficulty(step)
    [note] = config.notes
    assert note.startswith(
        "curriculum_learning: curriculum is [[0, 8], [3, 16], [7, 32]]; GPT-NeoX"
    )
    assert load(config.to_yaml()) == config


@pytest.mark.parametrize(
    "value", ["{}", "null", "{enabled: false}", {**SCHEDULE, "enabled": False}]
)
def test_a_disabled_curriculum_changes_nothing(load, value):
    assert load("", f"curriculum_learning={value}") == load()


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule_type": "fixed_linear"},
        {"schedule_type": "fixed_root"},
        {"curriculum_type": "vocabulary"},
        {"schedule_config": {"difficulty": [8, 32], "max_step": [3, 7]}},
        {"schedule_config": {"difficulty": 8, "max_step": [3, 7]}},
        {"schedule_config": None},
    ],
)
def test_other_curricula_are_refused_with_the_reason(problems, changes):
    [line] = problems("", f"curriculum_learning={SCHEDULE | changes}")
    assert "curriculum_learning: only curriculum_type seqlen with schedule_type fixed" in line
    assert line.endswith("write curriculum: [[0, 128], [5000, 512]] instead")


def test_one_curriculum_is_enough(problems):
    [line] = problems("curriculum: [[0, 32]]", f"curriculum_learning={SCHEDULE}")
    assert "write curriculum" in line
    [line] = problems("", "curriculum_learning=something else")
    assert "only curriculum_type seqlen" in line


def test_every_length_is_divided_by_the_layout(problems):
    given = ("curriculum=[[0, 2], [4, 32]]", "context_parallel_size=4")
    [line] = problems("", *given, world_size=4)
    assert "curriculum: 2 cannot be split into context_parallel_size 4" in line
    assert line.endswith("write e.g. 4")
