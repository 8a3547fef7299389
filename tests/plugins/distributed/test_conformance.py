"""With one process both hooks pass the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_distributed import DDPHook, FSDPHook


class TestDDPHook(HookConformance):
    entry_point = "ddp"
    factory = DDPHook


class TestFSDPHook(HookConformance):
    entry_point = "fsdp"
    factory = FSDPHook
    arguments = {"shard": ["Linear"], "mesh": (1, 1)}
