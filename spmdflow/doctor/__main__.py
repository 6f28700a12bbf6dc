"""`python -m spmdflow.doctor`: see `command`."""

from __future__ import annotations

import sys

from spmdflow.doctor.command import main

sys.exit(main())
