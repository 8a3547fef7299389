"""What the tests of discovery share with every author of a hook: an environment of made-up distributions."""

from __future__ import annotations

from nvalchemi.testing import fake_site as site  # noqa: F401 - a fixture
