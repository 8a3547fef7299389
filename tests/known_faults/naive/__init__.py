"""Ways to train that go wrong: a loop by hand, and beside it one small class for each mistake.

`Loop` makes none of them, so that a test that catches a class below has caught the mistake of that class.
"""

from .accumulation import *  # noqa: F403 - one name a mistake
from .clipping import *  # noqa: F403 - one name a mistake
from .discovery import *  # noqa: F403 - one name a mistake
from .ema import *  # noqa: F403 - one name a mistake
from .loop import Loop as Loop
from .plugins import *  # noqa: F403 - one name a mistake
from .scaling import *  # noqa: F403 - one name a mistake
from .skipped_steps import *  # noqa: F403 - one name a mistake
