"""Which folders are packages: spmdflow with all its rooms, and algos/ as spmdflow.algos.

Only what setup.cfg cannot say. The long description is the README without links into the
repository: on a package index they would lead nowhere.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

RELATIVE_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)")

setup(
    packages=[
        *find_namespace_packages(include=["spmdflow*"]),
        *(f"spmdflow.{name}" for name in find_namespace_packages(include=["algos*"])),
    ],
    package_dir={"spmdflow.algos": "algos"},
    long_description=RELATIVE_LINK.sub(r"\1", Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
