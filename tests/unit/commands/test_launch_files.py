"""launch/slurm.sbatch and launch/kubernetes.yaml begin again what stopped before its last step.

The commands of the cluster are stand-ins on PATH; srun and torchrun wait for SIGTERM, or end.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WAITS = "#!/bin/bash\ntrap 'echo stopped; exit 1' TERM\necho runs\nwhile :; do sleep 0.02; done\n"
DONE_BEFORE_SIGTERM, SIGTERM, FINISHES, TIME_LIMIT, FAILS = range(5)


class Cluster:
    """A folder of commands, and RUN_DIR."""

    def __init__(self, folder: Path, how: int) -> None:
        self.run_dir = folder / "run"
        self._commands = folder / "bin"
        self.run_dir.mkdir()
        self._commands.mkdir()
        finish = f"touch {self.run_dir / 'finished'}\n"
        program = {
            DONE_BEFORE_SIGTERM: WAITS.replace("exit 1", f"{finish.strip()}; exit 1"),
            SIGTERM: WAITS,
            FINISHES: f"#!/bin/bash\n{finish}",
            TIME_LIMIT: "#!/bin/bash\n",
            FAILS: "#!/bin/bash\nexit 1\n",
        }[how]
        self._write("srun", program)
        self._write("torchrun", program)
        self._write("scontrol", '#!/bin/bash\necho "scontrol $*"\n')
        self._is_stopped = how in (DONE_BEFORE_SIGTERM, SIGTERM)

    def _write(self, name: str, text: str) -> None:
        (self._commands / name).write_text(text)
        (self._commands / name).chmod(0o755)

    def run(self, *command: str) -> tuple[int, str]:
        """Status and output of a launch file's command, which gets SIGTERM if it waits for it."""
        given = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "FIRST_NODE": "a", "NNODES": "1"}
        given |= {"RANKS": "1", "RESTARTS": "0", "ENDPOINT": "a:1", "POD_IP": "127.0.0.1"}
        given |= {"RUN_DIR": str(self.run_dir)}
        path = f"{self._commands}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | given | {"PATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        said = ""
        if self._is_stopped:
            said = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        said += process.communicate(timeout=60)[0]
        return process.returncode, said


@pytest.mark.parametrize(
    ("how", "again"),
    [
        (DONE_BEFORE_SIGTERM, False),
        (SIGTERM, True),
        (FINISHES, False),
        (TIME_LIMIT, True),
        (FAILS, False),
    ],
)
def test_slurm_job_is_put_into_the_queue_again_only_if_time_was_over_and_it_is_not_done(
    how: int, again: bool, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, how)

    _, said = cluster.run("bash", "launch/slurm.sbatch", "ppo", f"run.dir={cluster.run_dir}")

    assert ("scontrol requeue 7" in said) == again


@pytest.mark.parametrize(
    ("how", "status"),
    [(DONE_BEFORE_SIGTERM, 1), (SIGTERM, 75), (FINISHES, 0), (TIME_LIMIT, 75), (FAILS, 1)],
)
def test_pod_ends_with_the_status_that_begins_it_again_only_if_it_was_stopped_and_is_not_done(
    how: int, status: int, tmp_path: Path
) -> None:
    (_, job) = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (launch,) = [each["value"] for each in container["env"] if each["name"] == "LAUNCH"]
    ignored = job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]

    ended, _ = Cluster(tmp_path, how).run("bash", "-c", launch, "spmdflow", "ppo")

    assert ended == status and ignored == [75]
