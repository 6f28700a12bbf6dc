"""Two actors, two references and two rewards, each with settings of its own.

`SEEN` has what a run gave: on one process a test can read it.
"""

from dataclasses import dataclass
from typing import Any

from spmdflow import (
    ActorWorker,
    Flow,
    PPOConfig,
    ReferenceWorker,
    RewardWorker,
    compute_advantages,
    part,
    setting,
)
from spmdflow.config.leaf import follows
from spmdflow.config.schema import (
    ActorConfig,
    DataConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    UpdateConfig,
)

SEEN: list[dict[str, Any]] = []


@dataclass
class TeacherConfig(ReferenceConfig):
    """A second reference, at a temperature of its own."""

    temperature: float = setting("Divides the logits.", 1.0, above=0)


@dataclass
class JudgeConfig(RewardConfig):
    """A second reward, which reads responses with a tokenizer of its own."""

    tokenizer_path: str = setting("Folder of the tokenizer.")


@dataclass
class StudentUpdateConfig(UpdateConfig):
    """Optimizer steps on the rows of another data section."""

    samples_per_step: int = follows("lessons.samples_per_step", 0)


@dataclass
class StudentRolloutConfig(RolloutConfig):
    """Generation for the prompts of another data section."""

    tokenizer_path: str = follows("lessons.tokenizer_path", "")


@dataclass
class StudentConfig(ActorConfig):
    """A second actor, on data of its own."""

    update: StudentUpdateConfig = part(StudentUpdateConfig)
    rollout: StudentRolloutConfig = part(StudentRolloutConfig)


@dataclass
class Config(PPOConfig):
    """PPO's settings and a second model of each kind."""

    lessons: DataConfig = part(DataConfig)
    student: StudentConfig = part(StudentConfig)
    teacher: TeacherConfig = part(TeacherConfig)
    judge: JudgeConfig = part(JudgeConfig)


def main(flow: Flow, cfg: Config) -> None:
    """One PPO step without a critic, of each actor on its own prompts."""
    actor = flow.spawn(ActorWorker, cfg.actor)
    student = flow.spawn(ActorWorker, cfg.student, name="student")
    reference = flow.spawn(ReferenceWorker, cfg.reference)
    teacher = flow.spawn(ReferenceWorker, cfg.teacher, name="teacher")
    reward = flow.spawn(RewardWorker, cfg.reward)
    judge = flow.spawn(RewardWorker, cfg.judge, name="judge")
    prompts = flow.prompts(cfg.data)
    lessons = flow.prompts(cfg.lessons, name="lessons")

    for step in flow.steps(cfg.total_steps):
        for who, own, frozen, scores in (
            (actor, prompts, reference, reward),
            (student, lessons, teacher, judge),
        ):
            batch = who.generate_sequences(next(own), stop=["5"])
            batch |= who.compute_log_prob(batch)
            batch |= frozen.compute_ref_log_prob(batch)
            batch |= scores.compute_reward(batch)
            batch |= batch.map(compute_advantages, estimator="reinforce_pp", cfg=cfg.advantage)
            columns = ("prompts", "responses", "old_log_probs", "ref_log_probs", "response_text")
            SEEN.append({**batch.fetch(*columns), "update": dict(who.update_actor(batch))})
        step.log(done=1.0)
