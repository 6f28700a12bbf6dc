"""`spmdflow data show`: prints the tokens of rows, marked by whether they are trained on.

Rows of a data file are scanned and encoded by the functions of a run (`datasets`). Rows of a run
are those that it recorded. It needs the tokenizer and config.json of a model, not its weights.

| file | does |
|---|---|
| row | `ShownRow`: a row's tokens in parts that are trained or only read |
| section | the rows of a script's data sections, what the scan counted, how responses end |
| recorded | rows that a run recorded, such as its episodes |
| text | rows as lines of a terminal |
"""
