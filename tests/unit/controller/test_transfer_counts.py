"""What the io thread counts of transfers is read by the script as a copy."""

from __future__ import annotations

from spmdflow.controller.result import Transfers
from tests.unit.controller.test_release import ROWS, Orders, frame_of


def test_counts_that_the_script_was_given_do_not_change_with_later_releases() -> None:
    orders = Orders()
    transfers = Transfers(orders, seconds=1.0)
    before = transfers.planned_bytes

    transfers.need(frame_of([]), ["x"], {1: ROWS})

    assert before == {}
    assert transfers.planned_bytes == {(0, 1): len(ROWS) * 2 * 4}
