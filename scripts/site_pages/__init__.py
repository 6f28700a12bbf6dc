"""The parts of `scripts/make_site.py` that make pages from the code, and its navigation.

| file | what |
|---|---|
| docstring | a script's docstring as Markdown |
| plain_text | a Sphinx extension: the package's docstrings as the API's text |
| settings | the table of all settings with its filter |
| source_pages | a Sphinx extension: pages with the package's source |
| navigation | a Sphinx extension: the list of pages at the left |
"""
