"""``python -m gradwire``, as ``torchrun -m gradwire advise`` needs it."""

import sys

from gradwire.cli import main

sys.exit(main())
