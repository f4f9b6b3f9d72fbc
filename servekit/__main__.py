"""`python -m servekit` is the `servekit` command."""

import sys

from servekit.cli.main import run

sys.exit(run())
