"""Checkpoints: a sealed folder is complete, or does not exist. Knows files and names, no models.

    RUN_DIR/checkpoints/step-N.tmp    while every rank writes its files (`Checkpoints.begin`)
    RUN_DIR/checkpoints/step-N        sealed: never changed again, removed only as a whole
        manifest.json                 step, meta, each file's size and sha256, its own sha256
        <group>/rank-K.safetensors    a rank's state (`write_state`): boxes + JSON metadata
        <group>/hugging_face          a trained model in the Hugging Face format
    RUN_DIR/checkpoints/latest        name of the folder that a resumed run loads
    RUN_DIR/export/<group>            link to the hugging_face folder of the newest checkpoint

Order of sealing: each rank hashes its files while it writes them, fsyncs and reports them -> the
controller's rank waits until it sees each file at its full size, without reading it -> manifest ->
rename -> `latest` -> links in export -> old checkpoints removed.
After a kill or a power cut between any two of these, the old or the new checkpoint can be loaded:
every file and every folder is fsynced before the next name points to it, metrics before `latest`.

| file | what |
|---|---|
| lock | one live run in a RUN_DIR |
| run_dir | the rules of RUN_DIR itself |
| manifest, state, tensors | a checkpoint's list of files; a rank's state, written and read |
| rows | columns of rows in a file, for inspection |
| reading, disk | reads that try again, errors of file systems, fsync |
| export, hub | a trained model as a Hugging Face folder; its push to a hub |
| summary | the last message of a run: where its models are |

`run_dir` has the rules of RUN_DIR itself: who may start a run, from which checkpoint it continues,
and with which settings. `disk` checks at the start that every rank sees RUN_DIR. `summary` has the
message at the end of a run. Frozen models are not saved: the manifest has their folders and hashes
(`tensors.model_hash`), and a resumed run reads them again.

Import from the modules. The package itself imports none of them, so that `lock` and `disk` can be
imported before torch, and an error in the settings is reported without waiting for torch.
"""

from __future__ import annotations

from spmdflow.renamed import moved_names

_MOVED = {
    "HostCopies": "spmdflow.checkpoint.tensors",
    "StateFiles": "spmdflow.checkpoint.state",
    "read_tensors": "spmdflow.checkpoint.tensors",
    "write_state": "spmdflow.checkpoint.tensors",
    "write_tensors": "spmdflow.checkpoint.tensors",
}
"""Names that were exported here before 0.2.0 -> their modules; kept until 0.3.0."""
__getattr__ = moved_names(__name__, _MOVED)
