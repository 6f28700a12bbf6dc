"""`python -m spmdflow.plan`: see `command`."""

from __future__ import annotations

import sys

from spmdflow.plan.command import main

sys.exit(main())
