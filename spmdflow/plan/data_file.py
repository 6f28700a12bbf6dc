"""Lengths of prompts: from the data file if it is there and small, else the longest allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmdflow.config.eval_prompts import eval_prompts_of
from spmdflow.config.schema import DataConfig
from spmdflow.datasets.scan import ScanReport, scan
from spmdflow.datasets.tokenizer import load_tokenizer
from spmdflow.errors import SpmdflowError

SMALL_FILE_BYTES = 4 << 20
"""Files up to here are tokenised (about two seconds); of larger ones lengths are assumed."""


ASSUMED_ROWS = 1 << 12
"""Rows of a file that is not read; its number plays no part in what a step does."""


class DataFiles:
    """Scans data files as rank 0 would, or says what it took instead."""

    def __init__(self, cfg: Any, *, read_data: bool) -> None:
        self._cfg, self._read_data = cfg, read_data
        self.notes: list[str] = []

    def scan(self, data: DataConfig, path: str) -> ScanReport:
        """Facts of a file, real or assumed."""
        file = Path(path)
        why = "it is not here" if not file.is_file() else ""
        if not why and not self._read_data:
            why = "data are not read"
        if not why and file.stat().st_size > SMALL_FILE_BYTES:
            why = f"it has more than {SMALL_FILE_BYTES >> 20} MiB"
        if not why:
            try:
                report = scan(data, path, load_tokenizer(data.tokenizer_path))
                self.notes.append(f"prompts of {path}: {len(report.rows)} rows, their own lengths")
                return report
            except SpmdflowError as err:
                why = f"it cannot be read here ({err})"
        return self._assumed(data, path, why)

    def _assumed(self, data: DataConfig, path: str, why: str) -> ScanReport:
        longest = data.max_prompt_tokens
        held_out = eval_prompts_of(data.eval_prompts).num_prompts or 0
        count = max(ASSUMED_ROWS, data.prompts_per_step, held_out)
        self.notes.append(f"prompts of {path}: {longest} tokens each, as {why}")
        return ScanReport(
            path=path,
            num_bytes=0,
            num_rows=count,
            rows=list(range(count)),
            token_lengths=[longest] * count,
            num_too_long=0,
            longest_tokens=longest,
            bad_rows=[],
            fingerprint="",
        )
