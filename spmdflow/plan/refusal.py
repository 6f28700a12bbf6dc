"""`Refusal`: why a script or its settings cannot be planned, with the line of the script."""

from __future__ import annotations

from spmdflow.errors import SpmdflowError


class Refusal(SpmdflowError):
    """The dry run stopped here; a script does not catch it, as it is no error of a call."""
