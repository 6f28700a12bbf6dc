"""manifest.json: the files of a sealed checkpoint, and what each rank reports to have written.

A rank first writes into its own folder, so that all files in there are its own. A file whose header
has the hashes of its tensors (`weights.file`) was hashed while it was written, so only its header
is hashed here. Other files are read and hashed. A checkpoint consists of the files that the ranks
report. It is an error if the controller's rank cannot see one of them, as when nodes do not share
RUN_DIR.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmdflow.checkpoint.disk import disk_errors, read_patiently
from spmdflow.errors import CheckpointError
from spmdflow.weights.file import find_changed_tensor, read_head

logger = logging.getLogger(__name__)

NAME = "manifest.json"
FORMAT = "spmdflow-checkpoint-3"
_FOLDER = re.compile(r"step-(0|[1-9]\d*)(?:\.([2-9]|[1-9]\d+))?")
_NUM_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class FileFacts:
    """Size and hash of one file."""

    num_bytes: int
    sha256: str
    head_bytes: int | None = None
    """sha256 covers only the header of this size, which has the tensors' hashes; None: all
    bytes."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A sealed checkpoint, as its manifest describes it."""

    folder: Path
    step: int
    meta: dict[str, Any]
    """JSON data of the run: its own state and `layout`."""
    files: dict[str, FileFacts]
    """By path relative to the folder, with "/" on every system."""


def order_of(name: str) -> tuple[int, int] | None:
    """Return (N, attempt) for a folder named step-N (attempt 1) or step-N.attempt (2 or more).

    None for any other name, such as step-5.tmp or step-5.damaged.
    """
    match = _FOLDER.fullmatch(name)
    if match:
        return (int(match[1]), int(match[2] or 1))
    return None


def facts_of(
    folder: Path, names: Iterable[str], *, is_synced: bool = False
) -> dict[str, FileFacts]:
    """Return name -> size and sha256, for files below folder, read in several threads.

    is_synced: also fsync them. Only the header is hashed of files that have a hash of each tensor
    (`weights.file`). OSError if one cannot be read.
    """

    def read(name: str) -> FileFacts:
        return _facts_of_file(folder / name, is_synced=is_synced)

    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(names, threads.map(read, names), strict=True))


def _facts_of_file(path: Path, *, is_synced: bool) -> FileFacts:
    """Return size and sha256 of one file; is_synced: also fsync it.

    The hash covers only the header if that has a hash of each tensor (head_bytes is its size),
    otherwise all bytes (head_bytes is None).
    """
    with path.open("rb") as file:
        if is_synced:
            os.fsync(file.fileno())
        num_bytes = os.fstat(file.fileno()).st_size
        head = read_head(path)
        if head is not None:
            return FileFacts(num_bytes, head.sha256, head.num_bytes)
        return FileFacts(num_bytes, hashlib.file_digest(file, "sha256").hexdigest())


def file_names(folder: Path) -> list[str]:
    """Names of all files below folder except the manifest, relative to it and sorted."""
    paths = (path for path in folder.rglob("*") if not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in paths)
    return sorted(name for name in names if name != NAME)


def write_manifest(
    folder: Path, step: int, meta: Mapping[str, Any], files: Mapping[str, FileFacts]
) -> None:
    """Write and fsync manifest.json in folder, with a sha256 of its own content.

    files: by name relative to folder. CheckpointError if meta is not JSON data (`check_plain`).
    """
    check_plain(meta, "meta")
    plain = {}
    for name, facts in files.items():
        plain[name] = asdict(facts)
    body = {"format": FORMAT, "step": step, "meta": meta, "files": plain}
    text = json.dumps(body, sort_keys=True)
    data = json.dumps({**json.loads(text), "sha256": _sha256_of(text)}, indent=1, sort_keys=True)
    with (folder / NAME).open("w", encoding="ascii") as file:
        file.write(data + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> CheckpointInfo:
    """Return the checkpoint in a folder, as its manifest describes it. Does not look at its files.

    DamagedError if the manifest is missing, is not JSON with the expected fields, does not match
    its own sha256, is of another program or another step than the folder's name, or lists paths
    outside the folder. Plain CheckpointError for another version of the format. ReadError if it
    cannot be read for 5 s.
    """
    path = folder / NAME
    try:
        data = read_patiently(path, path.read_bytes)
    except OSError as err:  # it does not exist (`is_absent`)
        raise damage_error(path, "is missing") from err
    try:
        body = json.loads(data)
        claimed = body.pop("sha256")
        actual = _sha256_of(json.dumps(body, sort_keys=True))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as err:
        raise damage_error(path, f"does not read as a manifest ({err!r})") from err
    if claimed != actual:
        raise damage_error(path, "has been changed: its own sha256 does not match")
    order = order_of(folder.name)
    kind = body.get("format")
    step = body.get("step")
    if kind != FORMAT and isinstance(kind, str) and kind.startswith(FORMAT[:-1]):
        raise CheckpointError(
            f"checkpoint: {path} has format {kind}, expected {FORMAT}; resume with the version of "
            f"spmdflow that wrote it, or start another run from the model in RUN_DIR/export"
        )
    if kind != FORMAT or order is None or step != order[0]:
        raise DamagedError(
            f"checkpoint: {path} is foreign: format {kind!r}, step {step}; "
            f"expected {FORMAT!r} and the step of its folder; resume from the run that wrote it"
        )
    meta = body.get("meta")
    files = body.get("files")
    if not isinstance(meta, dict) or not isinstance(meta.get("layout", {}), dict):
        raise damage_error(path, f"has meta {meta!r:.80}, which is no map with a map layout")
    if not isinstance(files, dict):
        raise damage_error(path, f"has files {files!r:.80}, which is no map name -> size and hash")
    for name, facts in files.items():
        if not _describes_file(name, facts):
            problem = f"has {facts!r:.80} for file {name!r:.80}"
            raise damage_error(
                path, f"{problem}, not num_bytes and sha256 of a file in the checkpoint"
            )
    known = {}
    for name, facts in files.items():
        known[name] = FileFacts(**facts)
    return CheckpointInfo(folder, step, meta, known)


def _describes_file(name: str, facts: Any) -> bool:
    """Return whether facts are exactly a size, a hash and head_bytes, and name is a safe path.

    Safe: relative and without "..", so inside the checkpoint.
    """
    if not isinstance(facts, dict) or set(facts) != {"num_bytes", "sha256", "head_bytes"}:
        return False
    is_plain = type(facts["num_bytes"]) is int and isinstance(facts["sha256"], str)
    is_plain &= facts["head_bytes"] is None or type(facts["head_bytes"]) is int
    return is_plain and not Path(name).is_absolute() and ".." not in Path(name).parts


def check_file_sizes(info: CheckpointInfo) -> None:
    """Check that every file of a checkpoint exists with the size in its manifest.

    DamagedError for the first that is missing, not a regular file, or of another size. ReadError if
    the file system fails for 5 s. Files that the manifest does not list (`.nfs...`, `.DS_Store`)
    are only logged as a warning.
    """
    for name, facts in info.files.items():
        path = info.folder / name
        try:
            status = read_patiently(path, path.stat)
        except OSError as err:  # it does not exist (`is_absent`)
            raise damage_error(path, "is missing", facts) from err
        if not stat.S_ISREG(status.st_mode):
            raise damage_error(path, "is not a file", facts)
        num_bytes = status.st_size
        if num_bytes != facts.num_bytes:
            word = "short" if num_bytes < facts.num_bytes else "too long"
            raise damage_error(path, f"is {word}: {num_bytes} bytes", facts)
    unlisted = sorted(set(file_names(info.folder)) - set(info.files))
    if unlisted:
        logger.warning(
            "warning: %s has files that do not belong to the checkpoint; ignored: %s",
            info.folder,
            ", ".join(unlisted),
        )


def verify_files(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Read and hash all bytes of files below folder, in several threads.

    A file that is missing or has changed raises DamagedError. A file that cannot be read for 5 s,
    which may be undamaged, raises ReadError, unless another one is damaged. All files are tried
    before; the first error in the order of files is raised.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        pending = []
        for name in files:
            pending.append(threads.submit(_verify_file, folder, name, files[name]))
    problems = [each.exception() for each in pending]
    for problem in problems:
        if isinstance(problem, DamagedError):  # certain, whatever else cannot be read
            raise problem
    for problem in problems:
        if problem is not None:
            raise problem


def _verify_file(folder: Path, name: str, expected: FileFacts) -> None:
    """Compare one file with its size and hash in the manifest; raise as `verify_files` does.

    If the file has a hash of each tensor, the header is compared first, then each tensor with its
    hash.
    """
    path = folder / name

    def read() -> tuple[FileFacts, str | None]:
        actual = _facts_of_file(path, is_synced=False)
        is_hashed_by_tensor = actual == expected and actual.head_bytes is not None
        return actual, find_changed_tensor(path) if is_hashed_by_tensor else None

    try:
        actual, changed = read_patiently(path, read)
    except OSError as err:  # it does not exist (`is_absent`)
        raise damage_error(path, "is missing", expected) from err
    if actual != expected:
        raise damage_error(path, f"has sha256 {actual.sha256}", expected)
    if changed:
        raise damage_error(path, f"has other bytes in {changed}", expected)


def moved_groups(
    info: CheckpointInfo, layout: Mapping[str, Any], by_rank: Mapping[str, str]
) -> list[str]:
    """Return "actor <saved layout> -> <current layout>" for each group whose layout has changed.

    A layout's text is such as "fsdp t1p1d2 on ranks 0-1". layout: group -> engine, ranks and sizes
    of this run, compared with meta["layout"] of the checkpoint; tuples and lists count as equal.
    Groups without saved files are not returned. by_rank: group -> class, of groups whose ranks can
    load only their own saved state. CheckpointError if one of these has moved (and has saved files
    or is new), or if the run lacks a group with saved files.
    """
    saved = info.meta.get("layout", {})
    now = json.loads(json.dumps(layout))
    stateful = set()
    for name in info.files:
        if "/" in name:
            stateful.add(name.partition("/")[0])
    for group in sorted(stateful - now.keys()):
        got = f"a run without {group}, whose state {info.folder} holds"
        do = "resume with the script that wrote it, or start from scratch in another run.dir"
        raise CheckpointError.of("checkpoint", got, "every model that it was trained with", do)
    moved = []
    for group in sorted(now):
        if now[group] != saved.get(group):
            moved.append(group)
    for group in moved:
        if group not in by_rank or group not in stateful and group in saved:
            continue
        raise CheckpointError(
            f"checkpoint: {info.folder} has {group} as {_describe_layout(saved.get(group))}, "
            f"this run has {_describe_layout(now[group])}, expected the same, as "
            f"{by_rank[group]}.load_state is not marked with any_layout; resume with the "
            f"world size and placement that wrote it, or have it read boxes (docs/CHECKPOINTS.md)"
        )
    both = {}
    for name in moved:
        if name in stateful:
            both[name] = (saved.get(name), now[name])
    result = []
    for name, (a, b) in both.items():
        result.append(f"{name} {_describe_layout(a)} -> {_describe_layout(b)}")
    return result


def _describe_layout(sizes: Mapping[str, Any] | None) -> str:
    """Return a group's layout as text: "fsdp t1p1d2 on ranks 0-1"; "nothing" for None.

    s<shard_size> is added if it is neither 1 nor dp_size, e<expert_size> if it is not 1. Ranks that
    are not consecutive are listed.
    """
    if sizes is None:
        return "nothing"
    ranks = sizes["ranks"]
    engine = sizes.get("engine")
    is_span = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
    where = f"{ranks[0]}-{ranks[-1]}" if is_span else ", ".join(map(str, ranks))
    letters = {"tp_size": "t", "pp_size": "p", "dp_size": "d"}
    if sizes.get("shard_size", 1) not in (1, sizes.get("dp_size", 1)):
        letters["shard_size"] = "s"
    if sizes.get("expert_size", 1) > 1:
        letters["expert_size"] = "e"
    name = "".join(f"{letter}{sizes.get(size, 1)}" for size, letter in letters.items())
    if engine:
        return f"{engine} {name} on ranks {where}"
    return f"{name} on ranks {where}"


def check_plain(value: object, where: str) -> None:
    """Raise CheckpointError unless JSON preserves the value, except that tuples become lists.

    Checks mappings and sequences recursively; keys must be str. where: path of the value, for the
    message.
    """
    items: dict[str, object] = {}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(
                    f"checkpoint: {where} has key {key!r}, expected str keys; store pairs instead"
                )
        items = {}
        for key, item in value.items():
            items[f"{where}.{key}"] = item
    elif isinstance(value, list | tuple):
        items = {}
        for number, item in enumerate(value):
            items[f"{where}[{number}]"] = item
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise CheckpointError(
            f"checkpoint: {where} is a {type(value).__name__}, expected JSON data; "
            f"store tensors by name and anything else as numbers or text"
        )
    for location, item in items.items():
        check_plain(item, location)


def _sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class DamagedError(CheckpointError):
    """A checkpoint differs from what was sealed. A resumed run falls back to an older one."""


def damage_error(path: Path, problem: str, facts: FileFacts | None = None) -> DamagedError:
    """Return the DamagedError for a file of a checkpoint that differs from what was sealed.

    problem: continues the path, such as "is missing". facts: its size and hash in the manifest, if
    it is listed there.
    """
    if facts:
        expected = f"{facts.num_bytes} bytes, sha256 {facts.sha256}"
    else:
        expected = "the file as sealed"
    return DamagedError(
        f"checkpoint: {path} {problem}, expected {expected}; restore it, or name an older "
        f"checkpoint of this run in {path_of_latest(path)}"
    )


def path_of_latest(path: Path) -> Path:
    """Return RUN_DIR/checkpoints/latest for any path inside a checkpoint's folder.

    The nearest parent named as a sealed checkpoint is that folder. Without one, `latest` next to
    path.
    """
    sealed = []
    for folder in path.parents:
        if order_of(folder.name) is not None:
            sealed.append(folder)
    return (sealed[0] if sealed else path).parent / "latest"


_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class RankReport:
    """The files that one rank reports to have written."""

    rank: int
    node: str
    """Host name of the rank."""
    files: Mapping[str, FileFacts]
    """By name relative to the checkpoint's folder."""


def make_rank_folder(folder: Path, rank: int) -> Path:
    """Create and return the folder folder/.rank-K, into which rank K writes its files now.

    folder: .../checkpoints/step-N.tmp/<group>. It is created too, with its two parents, but not
    RUN_DIR. CheckpointError if that fails.
    """
    own = folder / f".rank-{rank}"
    with disk_errors("make", own):
        # checkpoints, step-N.tmp, folder, own: RUN_DIR itself must not be created again
        for each in (*reversed((folder, *list(folder.parents)[:2])), own):
            each.mkdir(exist_ok=True)
    return own


def move_rank_files(folder: Path, own: Path) -> dict[str, FileFacts]:
    """Move the files of a rank from its own folder (`make_rank_folder`) into folder.

    Hashes and fsyncs the files, then removes `own`. An existing file of the same name is replaced.
    Returns size and hash of each, by name relative to folder. CheckpointError if the disk fails.
    """
    with disk_errors("write", folder):
        files = facts_of(own, file_names(own), is_synced=True)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (own / name).replace(folder / name)
        for emptied in sorted((own, *own.rglob("*")), reverse=True):
            emptied.rmdir()
    return files


def await_files(
    folder: Path, written: Iterable[RankReport], *, seconds: float
) -> dict[str, FileFacts]:
    """Wait until this node sees all files of the ranks at their full size; return them by name.

    Waits at most `seconds`, because network file systems show new files late; contents are not
    read. CheckpointError with rank, node and file if a file stays invisible, if two ranks wrote it,
    or if folder has a file that no rank reports.
    """
    owners: dict[str, RankReport] = {}
    for part in written:
        for name in part.files:
            if name in owners:
                raise CheckpointError(
                    f"checkpoint: got {folder / name} from rank {owners[name].rank} and from rank "
                    f"{part.rank}, expected each file from one rank; put the rank into the names "
                    f"of the files that save_state writes"
                )
            owners[name] = part
    files = {name: owner.files[name] for name, owner in owners.items()}
    limit = time.monotonic() + seconds
    while (unseen := _find_unseen(folder, files)) and time.monotonic() < limit:
        time.sleep(_LOOK_SECONDS)
    for name, there in unseen.items():
        owner = owners[name]
        raise CheckpointError(
            f"checkpoint: got {there} at {folder / name} as seen from node "
            f"{socket.gethostname()}, expected the {files[name].num_bytes} bytes that rank "
            f"{owner.rank} wrote there on node {owner.node} ({len(unseen)} of {len(owners)} files "
            f"are not seen): RUN_DIR is not one folder that every node shares; set run.dir to a "
            f"shared folder"
        )
    for name in sorted(set(file_names(folder)) - set(files)):
        got = f"{folder / name}, which no rank says it wrote"
        do = "let nothing but save_state write there"
        raise CheckpointError.of("checkpoint", got, "only the files of the ranks", do)
    return files


def _find_unseen(folder: Path, files: Mapping[str, FileFacts]) -> dict[str, str]:
    """Return the files that are missing or have another size: name -> "no such file" or "N bytes".

    Lists each folder first, which makes NFS ask the server again. Empty if all are as expected.
    """
    for parent in {(folder / name).parent for name in files}:
        if parent.is_dir():
            os.listdir(parent)  # makes NFS ask the server again
    actual_states = {}
    for name, facts in files.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != facts.num_bytes:
            actual_states[name] = "no such file" if size is None else f"{size} bytes"
    return actual_states
