"""Saving passes the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_checkpoint import CheckpointHook


class TestCheckpointHook(HookConformance):
    entry_point = "checkpoint"
    factory = CheckpointHook
    stateful = True
    supports_cuda = True
    run_marks = ("folder",)

    @property
    def arguments(self):
        return {"root": self.folder, "every_steps": 2}
