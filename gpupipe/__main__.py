"""`python -m gpupipe` is `gpupipe`."""

import sys

from gpupipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
