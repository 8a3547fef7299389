"""``python -m nvalchemi.cli``, where the script is not on the path."""

import sys

from nvalchemi.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
