"""Lengths of prompts: from the data file if it is there and small, else the longest allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmdflow.config.data_source import data_sources, split_place
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

    def scan(self, data: DataConfig, setting: object) -> ScanReport:
        """Facts of a file or a mixture (data.train_path or data.eval_path), real or assumed."""
        sources = data_sources("data", setting)
        files = [Path(split_place(source.place)[0]) for source in sources]
        path = " + ".join(source.place for source in sources)
        why = "it is not here" if not all(file.exists() for file in files) else ""
        if not why and not self._read_data:
            why = "data are not read"
        if not why and sum(map(_num_bytes, files)) > SMALL_FILE_BYTES:
            why = f"it has more than {SMALL_FILE_BYTES >> 20} MiB"
        if not why:
            try:
                report = scan(data, setting, load_tokenizer(data.tokenizer_path))
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


def _num_bytes(path: Path) -> int:
    """Of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
