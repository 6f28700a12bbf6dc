"""RUN_DIR/export/<role>: always the Hugging Face folder of the newest checkpoint.

A stable path for whoever comes next: another run's `actor.model.path`, an evaluation, a server.
It is a relative symbolic link, so a RUN_DIR may be moved as a whole. The link is replaced in one
operation: it names the old or the new folder, also after a kill, and follows within a step if the
kill came between `latest` and the link.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from spmdflow.checkpoint.disk import sync

logger = logging.getLogger(__name__)

EXPORT, FOLDER = "export", "hugging_face"


def link_exports(run_dir: Path, sealed: Path) -> list[Path]:
    """Point export/<role> at every <role>/hugging_face of a sealed checkpoint; returns the links.

    The checkpoint is whole without them, so a disk that refuses is only reported.
    """
    made = []
    for source in sorted(sealed.glob(f"*/{FOLDER}")):
        link = run_dir / EXPORT / source.parent.name
        try:
            _point(link, source)
        except OSError as err:
            logger.warning("checkpoint: cannot link %s to %s: %s", link, source, err)
        else:
            made.append(link)
    return made


def _point(link: Path, source: Path) -> None:
    link.parent.mkdir(exist_ok=True)
    beside = link.with_name(link.name + ".tmp")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(source, link.parent), target_is_directory=True)
    beside.replace(link)
    sync(link.parent)
