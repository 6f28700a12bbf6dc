"""Print the tokens of rows, marked by whether they are trained on.

With a SCRIPT: the first rows of its data files, scanned and encoded as a run does it, what the scan
counted, and what ends a response. It needs the tokenizer and config.json of the model, but not its
weights. It reads the complete files, which takes as long as at the start of a run.

With a RUN_DIR: rows that a run trained on, such as its episodes. With run.capture_step=N they have
the tokens of step N, otherwise the texts in samples.jsonl.

Exit codes: 0 shown, 2 the script, its settings or its rows cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spmdflow.config.data_check import check_rows
from spmdflow.config.load import load
from spmdflow.config.source import sort_words
from spmdflow.errors import ConfigError, SpmdflowError
from spmdflow.log import quiet_libraries
from spmdflow.preview.recorded import recorded_rows
from spmdflow.preview.section import sections_of
from spmdflow.preview.text import legend, section_lines
from spmdflow.tracking.reading import RunFiles, RunState

FINISHED = 0
REFUSED = 2
_HERE = "command line"
_WIDTH_OF_FILES = 100
"""Columns where the output is no terminal."""


def main(words: Sequence[str] | None = None) -> int:
    """Print the rows that the command line names; return 0, or 2 with the reason on stderr.

    words: `show`, then a SCRIPT with its settings or a RUN_DIR; default: sys.argv.
    """
    options = _parser().parse_intermixed_args(words)
    quiet_libraries()
    console = Console(file=sys.stdout, color_system=None if options.plain else "auto")
    width = console.width if console.is_terminal else _WIDTH_OF_FILES
    try:
        for line in _lines(options, width):
            with console.capture() as captured:
                console.print(line, soft_wrap=True)
            sys.stdout.write(captured.get())
    except SpmdflowError as err:
        sys.stderr.write(f"spmdflow: {err}\n")
        return REFUSED
    return FINISHED


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Its help is the docstring of this module."""
    parser = argparse.ArgumentParser(
        prog="spmdflow data",
        usage="spmdflow data show SCRIPT [CONFIG.yaml] [key=value ...] [--rows N] [--plain]\n"
        "       spmdflow data show RUN_DIR [--rows N] [--plain]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--rows", type=int, default=3, metavar="N", help="rows of each file (default: 3)"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no colours; also without a terminal, or with the variable NO_COLOR",
    )
    return parser


def _lines(options: argparse.Namespace, width: int) -> Iterator[Text]:
    """Yield the lines to print, for a terminal of so many columns.

    Raises ConfigError for words that name nothing to show, and what reading the rows raises.
    """
    action, *words = options.words or ["nothing"]
    if action != "show":
        do = "write spmdflow data show SCRIPT"
        raise ConfigError.of(_HERE, action, "show", do)
    if options.rows < 1:
        got = f"--rows {options.rows}"
        raise ConfigError.of(_HERE, got, "at least 1 row", "set --rows 1 or more")
    if len(words) == 1 and _is_run_dir(Path(words[0])):
        sections = [recorded_rows(Path(words[0]), options.rows)]
    else:
        script, config, overrides = sort_words(words)
        if script is None:
            do = "name what to show; --help shows the usage"
            raise ConfigError.of(_HERE, "no SCRIPT", "a script such as sft, or a RUN_DIR", do)
        loaded = load(script, config, overrides, weights=False)
        sys.stderr.write("".join(f"{warning}\n" for warning in loaded.warnings))
        check_rows(loaded.cfg)
        sections = list(sections_of(loaded.cfg, options.rows))
    yield from legend(width)
    for section in sections:
        yield Text("")
        yield from section_lines(section, width)


def _is_run_dir(path: Path) -> bool:
    """Whether a run has been in this folder."""
    return path.is_dir() and RunFiles(path).run_state is not RunState.NONE


if __name__ == "__main__":
    sys.exit(main())
