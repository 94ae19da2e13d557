"""`python -m clawgym_env.cli` is `clawgym`."""

import sys

from clawgym_env.cli import main

if __name__ == "__main__":
    sys.exit(main())
