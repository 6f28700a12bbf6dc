"""HTML report of runs: metrics, samples, timeline, prediction, failures and settings in one file.

`python -m spmdflow.view RUN_DIR [RUN_DIR ...]` writes the file. A browser opens it from the disk,
without a server or a network. `content` selects and shapes the data of a run's files
(`tracking.reading`). `html` embeds that data, our scripts and styles in page/, and plotly's script
from the installed package in one file. The package knows no model and no device. docs/VIEW.md
describes the page.
"""
