"""What one row of the table of real runs says. Facts only."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass

MODEL = "models/SmolLM2-135M-Instruct"
"""What scripts/make_smollm2.py writes, below the repository's root."""


@dataclass(frozen=True)
class Case:
    """A script with settings, run for a few steps."""

    name: str
    group: str
    script: str
    settings: tuple[str, ...]
    num_ranks: int = 2
    yaml: str = ""
    """Settings file of algos/; empty: the script's own."""
    resumes: str = ""
    """Name of a case whose checkpoint this one continues, on another layout."""
    checks_export: bool = False
    """Whether plain transformers and vLLM then load the exported folder."""

    @property
    def key(self) -> str:
        """Eight hex digits of script, settings and ranks: other settings are another case."""
        words = (self.script, self.yaml, str(self.num_ranks), *self.settings)
        return hashlib.blake2b("\n".join(words).encode(), digest_size=4).hexdigest()

    def words(self, run_dir: str) -> list[str]:
        """Arguments of `spmdflow run`."""
        files = [f"algos/{self.script}.py"]
        if self.yaml:
            files.append(f"algos/{self.yaml}.yaml")
        return [*files, *self.settings, f"run.dir={run_dir}"]

    def command(self) -> str:
        """The same for a reader."""
        return shlex.join(["spmdflow", "run", "-n", str(self.num_ranks), *self.words(self.name)])
