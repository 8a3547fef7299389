"""The stages of training: their names, their order, what they promise."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import pytest

from nvalchemi.training import TrainingStage
from nvalchemi.training import stages as module

IN_ORDER = [
    "SETUP",
    "BEFORE_TRAINING",
    "BEFORE_EPOCH",
    "BEFORE_BATCH",
    "BEFORE_FORWARD",
    "AFTER_FORWARD",
    "BEFORE_LOSS",
    "AFTER_LOSS",
    "BEFORE_BACKWARD",
    "DO_BACKWARD",
    "AFTER_BACKWARD",
    "BEFORE_OPTIMIZER_STEP",
    "DO_OPTIMIZER_STEP",
    "AFTER_OPTIMIZER_STEP",
    "AFTER_BATCH",
    "AFTER_EPOCH",
    "AFTER_TRAINING",
    "AFTER_VALIDATION",
]


def test_members_and_their_order():
    """`TrainingStage` has exactly these members, in this order."""
    assert [stage.name for stage in TrainingStage] == IN_ORDER
    assert len(TrainingStage.__members__) == len(IN_ORDER)  # no aliases


def test_the_loop_is_drawn_with_every_stage():
    """The docstring shows the loop with every stage where it fires, in the order of the members."""
    drawn = [line.split("#")[0].strip() for line in TrainingStage.__doc__.splitlines()]
    assert [line for line in drawn if line in IN_ORDER] == IN_ORDER


def test_every_member_says_what_it_guarantees():
    """Each member has a line of its own that says what is guaranteed there."""
    source = inspect.getsource(module)
    for name in IN_ORDER:
        line = next(line for line in source.splitlines() if line.strip().startswith(f"{name} = "))
        assert len(line.split("#:")[1].strip()) > 10, name


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_stage_is_chosen_by_plain_comparison(name):
    """A stage is chosen by plain comparison, also after it was copied or pickled, alone or as a key."""
    stage = TrainingStage[name]
    assert pickle.loads(pickle.dumps(stage)) is stage
    assert copy.deepcopy(stage) is stage
    assert pickle.loads(pickle.dumps({stage: 1}))[stage] == 1
    assert [other for other in TrainingStage if other == stage] == [stage]


def test_the_stages_load_nothing_else():
    """Importing the stages loads neither torch nor pydantic."""
    code = (
        "import sys; from nvalchemi.training.stages import TrainingStage; TrainingStage.SETUP; "
        "print({'torch', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
