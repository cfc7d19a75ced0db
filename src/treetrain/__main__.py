"""`python -m treetrain`: the command line."""

import sys

from treetrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
