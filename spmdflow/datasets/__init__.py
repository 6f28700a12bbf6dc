"""Data sets: files of rows, which ranks read and tokenise by row number when they need them.

| extension | a row is |
|---|---|
| .jsonl, .jsonl.gz | a line: one JSON object; blank lines are skipped |
| .jsonl.zst | a line, as above (needs the extra `parquet`, which decompresses it) |
| .parquet | a row; dates and decimals become text (needs the extra `parquet`) |

The column `data.prompt_column` is text or, with `data.chat_template`, text or a list of messages
{"role", "content"}. All other fields are in the column `row`, a JSON object. The number of a row
is its line (or Parquet row) counted from 0; error messages count from 1.

Rank 0 scans a file once (`scan`): the numbers of the good rows are fixed before step 1. The
controller draws numbers (`PromptOrder`); ranks turn numbers into columns (`PromptSource`).

| file | does |
|---|---|
| line_file | reads any of the formats, and folders of `datasets`, as lines by number |
| tokenizer | transformers' tokenizers: ids, the text of responses |
| chat | messages -> text -> token ids, by the tokenizer's chat template |
| time_limit | stops a template that does not end |
| encode | a row -> texts -> token ids and columns, or an error that names the cause |
| scan | file -> `ScanReport`: good rows, over-long ones, bad ones; numbers -> columns |
| stream | shuffled epochs with a cursor; resumable |
"""
