"""Ways to train that go wrong: a loop by hand, and beside it one small class for each mistake.

`Loop` makes none of them, so that a test that catches a class below has caught the mistake of that class.
"""

from .loop import Loop
from .skipped_steps import *  # noqa: F403 - one name a mistake
