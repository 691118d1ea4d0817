"""`python -m kvspan` is `kvspan`."""

import sys

from kvspan.cli.main import main

sys.exit(main())
