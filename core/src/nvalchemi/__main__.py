"""``python -m nvalchemi`` is the command ``nvalchemi``."""

from nvalchemi.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
