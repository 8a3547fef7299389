"""What authors of hooks test with: exact costs of a step, and the doubles and checks of a hook.

Importing this module imports nothing else; each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.testing.counters import StepCost as StepCost

__getattr__, __dir__ = door(__name__, {"StepCost": "nvalchemi.testing.counters"})
