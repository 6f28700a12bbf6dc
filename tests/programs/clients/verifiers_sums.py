"""A taskset of verifiers with a tool server, and a harness for it; `verifiers_eval.py` runs it.

The harness is the package's own chat program. It is started with this environment's Python, because
its own way installs the program's packages with uv from the internet.
"""

import json
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

__all__ = ["SumsHarness", "SumsTaskset"]


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    """A tool server."""

    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b


class SumsTaskConfig(vf.TaskConfig):
    """The tools of a task."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsData(vf.TaskData):
    """A question and its answer."""

    answer: str


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    """A sum to be found."""

    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        """The tools that the program gets."""
        return [SumsToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """Whether the last message has the answer."""
        return float(self.data.answer in str(trace.branches[-1].messages[-1].content))


class SumsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    task: SumsTaskConfig = SumsTaskConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """One task."""

    def load(self) -> list[SumsTask]:
        """The tasks."""
        data = SumsData(prompt="What is 20 + 22?", system_prompt="Use the tool.", answer="42")
        return [SumsTask(data, self.config.task)]


class SumsHarness(NullHarness):
    """The chat program of verifiers, in this environment."""

    async def setup(self, runtime: vf.Runtime) -> None:
        """Nothing is installed."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Runs the program with the arguments that verifiers gives it."""
        program = Path("chat_program.py").resolve()
        program.write_text(CHAT_PROGRAM_SOURCE)
        system_prompt, prompt = self.resolve_prompt(data)
        servers = {name: {"url": url, "timeout": 60} for name, url in mcp_urls.items()}
        words = [
            f"--base-url={endpoint}",
            f"--api-key={secret}",
            f"--model={ctx.model}",
            f"--system-prompt={system_prompt}",
            f"--mcp-config={json.dumps({'mcpServers': servers})}",
            f"--prompt={prompt}",
        ]
        return await runtime.run_program([sys.executable, str(program), *words], {})


if __name__ == "__main__":
    SumsToolset.run()
