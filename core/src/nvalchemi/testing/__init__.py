"""For authors of hooks: the conformance kit, doubles, a tiny run, and environments of made-up distributions.

Importing this module imports nothing else. The kit and the fixtures run in pytest, which the extra ``testing`` brings;
the rest needs nothing but the core.

>>> from nvalchemi.testing import VetoingHook, tiny_batches, tiny_strategy
>>> strategy = tiny_strategy(VetoingHook(1))
>>> strategy.run(tiny_batches())
>>> strategy.batch_count, strategy.step_count
(4, 3)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.testing.conformance import HookConformance as HookConformance
    from nvalchemi.testing.counters import StepCost as StepCost
    from nvalchemi.testing.doubles import AccumulatingHook as AccumulatingHook
    from nvalchemi.testing.doubles import FailingHook as FailingHook
    from nvalchemi.testing.doubles import LossFactorHook as LossFactorHook
    from nvalchemi.testing.doubles import RecordingHook as RecordingHook
    from nvalchemi.testing.doubles import VetoingHook as VetoingHook
    from nvalchemi.testing.fixtures import fake_site as fake_site
    from nvalchemi.testing.graph import RecordedGraph as RecordedGraph
    from nvalchemi.testing.loop import UpdateLoop as UpdateLoop
    from nvalchemi.testing.site import FakeSite as FakeSite
    from nvalchemi.testing.tiny import TinyModel as TinyModel
    from nvalchemi.testing.tiny import poison as poison
    from nvalchemi.testing.tiny import tiny_batches as tiny_batches
    from nvalchemi.testing.tiny import tiny_strategy as tiny_strategy

__getattr__, __dir__ = door(
    __name__,
    {
        "AccumulatingHook": "nvalchemi.testing.doubles",
        "FailingHook": "nvalchemi.testing.doubles",
        "FakeSite": "nvalchemi.testing.site",
        "HookConformance": "nvalchemi.testing.conformance",
        "LossFactorHook": "nvalchemi.testing.doubles",
        "RecordedGraph": "nvalchemi.testing.graph",
        "RecordingHook": "nvalchemi.testing.doubles",
        "StepCost": "nvalchemi.testing.counters",
        "TinyModel": "nvalchemi.testing.tiny",
        "UpdateLoop": "nvalchemi.testing.loop",
        "VetoingHook": "nvalchemi.testing.doubles",
        "fake_site": "nvalchemi.testing.fixtures",
        "poison": "nvalchemi.testing.tiny",
        "tiny_batches": "nvalchemi.testing.tiny",
        "tiny_strategy": "nvalchemi.testing.tiny",
    },
)
