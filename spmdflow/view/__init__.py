"""A run to look at: metrics, samples, timeline, prediction, failures and settings in one HTML file.

`python -m spmdflow.view RUN_DIR [RUN_DIR ...]` writes it; a browser opens it from the disk: no
server, no network. `content` chooses and shapes what the files of a run hold (`tracking.reading`),
`html` puts that and page/ (our own scripts and styles) into one file, with plotly's script from the
installed package. Knows no model and no device; docs/VIEW.md says what the page shows.
"""
