"""``python -m zero_optim`` is the command ``zero-optim``."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main())
