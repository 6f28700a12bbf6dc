"""tests/pages.py: which blocks of a page are run, and how."""

from __future__ import annotations

from pathlib import Path

from tests.pages import blocks_of, run_page

_PAGE = """# A page

```python
# made.py
print("made")
```

Then:

```bash
python made.py > out.txt
```

<!-- not run: needs docker -->
```bash
docker build .
```

<!-- run with: total_steps=2 -->
```bash
torchrun --nproc-per-node 2 -m spmdflow.run ppo \\
    run.dir=there   # a comment
```

```text
output
```
"""


def _written(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "PAGE.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_are_told_apart_and_settings_are_added_to_the_run(tmp_path: Path) -> None:
    made, ran, left_out, shortened, output = blocks_of(_written(tmp_path, _PAGE))

    assert (made.file_name, ran.file_name) == ("made.py", None)
    assert [block.is_run for block in (made, ran, left_out, output)] == [True, True, False, False]
    assert left_out.skipped == "needs docker"
    assert shortened.text.split()[-3:] == ["ppo", "run.dir=there", "total_steps=2"]
    assert (made.line, ran.line) == (3, 10)


def test_a_page_runs_in_its_folder_and_a_failing_block_is_named(tmp_path: Path) -> None:
    whole = _PAGE[: _PAGE.index("<!-- run with")]
    page = _written(tmp_path, whole + '```python\nraise SystemExit("no")\n```\n')

    (failure,) = run_page(page, tmp_path, seconds=60)

    assert (tmp_path / "out.txt").read_text() == "made\n"
    assert failure.startswith("PAGE.md:") and "ended with 1" in failure and "no" in failure
