"""Every setting that cannot work is refused, with its key, its value and a remedy.

Tables of settings and of what their message must name (tests/unit/refusals.py); its words are free.
Many more are on docs/REFUSALS.md (tests/unit/pages/refusals.py). All refusals happen without torch
and without a process group.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.errors import ConfigError
from tests.unit.config_folder import ACTOR, SCORER, TOKENS, accept, write_config_folder, write_model
from tests.unit.refusals import Parts, missing_parts

KEYS_AND_TYPES: dict[str, Parts] = {
    "actor.optimiser.lr=1": ("command line", "actor.optimiser", "actor.optimizer", "--help"),
    "actor.optimizer.betas=[a,b]": (
        "command line",
        "actor.optimizer.betas",
        "['a', 'b']",
        "actor.optimizer.betas=[0.9, 0.95]",
    ),
    "actor=null": ("command line", "actor", "None", ""),
    "placement.all=???": ("command line", "placement", "{'all': '???'}", ""),
    "data.shuffle=maybe": ("command line", "data.shuffle", "'maybe'", "data.shuffle=true"),
    "run.start_seconds=many": (
        "command line",
        "run.start_seconds",
        "'many'",
        "run.start_seconds=600.0",
    ),
    "run.call_seconds=many": ("command line", "'many'", "float or none", "run.call_seconds=0.5"),
    "total_steps": (
        "command line",
        "'total_steps'",
        "key=value",
        "actor.optimizer.betas=[0.9,0.95]",
    ),
    "run.name=${run.nam}": ("run.name", "${run.nam}", "run.nam"),
    "critic.optimizer.betas=\\${run.seed}": (
        "settings",
        "critic.optimizer.betas=\\${run.seed}",
        "",
    ),
    "reward.model.dtype=bfloat16": ("missing reward.model.path", "", "reward.model.path=VALUE"),
}
VALUES: dict[str, Parts] = {
    "actor.update.correction.kind=token actor.update.old_log_probs=rollout": (
        "actor.update.correction.kind",
        "token",
        "actor.update.old_log_probs=rollout",
        "actor.update.correction.kind=none",
    ),
    "actor.rollout.weights=vllm_transfer": (
        "actor.rollout.weights",
        "'vllm_transfer'",
        "actor.rollout.weights=auto",
    ),
    "run.profile_steps=[0]": ("run.profile_steps", "0", "at least 1", ""),
    "run.profile_ranks=[0,9]": ("run.profile_ranks", "rank 9", "0 to 3", ""),
    "actor.engine.offload=[moments]": (
        "actor.engine.offload",
        "'moments'",
        "actor.engine.offload=[parameters]",
    ),
    "actor.rollout.kv_cache_fraction=1.2": (
        "actor.rollout.kv_cache_fraction",
        "1.2",
        "at most 1",
        "",
    ),
    'run.guards=["actor/kl ~ 3: stop"]': (
        "run.guards",
        "'actor/kl ~ 3: stop'",
        "run.guards='[\"eval/accuracy < 0.5 * best: stop\"]'",
    ),
    "actor.optimizer.betas=[0.9,1.0]": ("actor.optimizer.betas", "1.0", "less than 1", ""),
    "run.name=..": ("run.name", "'..'", "set run.dir"),
    "data.eval_prompts=0": ("data.eval_prompts", "0", "at least 1", ""),
}
SIZES: dict[str, Parts] = {
    "critic.update.mini_batch_size=128": (
        "critic.update.mini_batch_size",
        "128",
        "64",
        "16 or 32 or 64",
    ),
    "actor.engine.micro_batch_rows=0": ("actor.engine.micro_batch_rows", "0", "at least 1", ""),
    "actor.engine.layout=t2": (
        "actor.engine.layout",
        "t2",
        "engine.kind=fsdp",
        "actor.engine.kind=megatron",
    ),
    "actor.engine.kind=megatron actor.engine.layout=2x2": (
        "actor.engine.layout",
        "'2x2'",
        "t4p2",
        "",
    ),
    "actor.engine.layout=d3": ("actor.engine.layout", "d3 with t1p1", "d4", "omit d"),
    "actor.engine.layout=d4d4": ("actor.engine.layout", "'d4d4'", "t2d4", ""),
    "actor.engine.layout=s0": ("actor.engine.layout", "'s0'", "s8", ""),
    "actor.engine.layout=s3": ("actor.engine.layout", "s3", "4", "[1, 2, 4]"),
    "actor.engine.kind=megatron actor.engine.layout=p2v2": (
        "actor.engine.layout",
        "p2v2",
        "p3",
        "",
    ),
    "actor.engine.kind=zero1 actor.engine.layout=s2": (
        "actor.engine.layout",
        "s2",
        "engine.kind=zero1",
        "actor.engine.kind=fsdp",
    ),
    "actor.rollout.layout=s2": ("actor.rollout.layout", "s2", "t1p1"),
    "actor.engine.kind=megatron actor.engine.layout=t3": (
        "actor.engine.layout",
        "t3p1 = 3",
        "4",
        "[1, 2, 4]",
    ),
    "actor.rollout.layout=t2": (
        "actor.rollout.layout",
        "t2",
        "rollout.engine=builtin",
        "actor.rollout.engine=vllm",
    ),
    "actor.engine.options=[sequence_parallel]": (
        "actor.engine.options",
        "sequence_parallel",
        "engine.kind=fsdp",
        "recompute",
        "",
    ),
    "actor.model.path=kv": ("actor.model.path", "3", "4", "kv/config.json"),
    "reward.function=null reward.model.path=judge data.chat_template=true": (
        "reward.model.path",
        "'c' is 4",
        "None",
        "tokenizer",
    ),
    "reward.function=null reward.model.path=little": ("reward.model.path", "3", "5", "tokenizer"),
}
FILES: dict[str, Parts] = {
    "data.chat_template_arguments={enable_thinking: false}": (
        "data.chat_template_arguments",
        "data.chat_template is false",
        "data.chat_template=true",
    ),
    "data.chat_template=true data.chat_template_arguments.tokenize=true": (
        "data.chat_template_arguments",
        "'tokenize'",
        "data.chat_template_arguments",
    ),
    "data.chat_template=true data.chat_template_date=28.11.2026": (
        "data.chat_template_date",
        "'28.11.2026'",
        "a date such as 2026-11-28",
        "data.chat_template_date",
    ),
    "data.tools_column=tools": (
        "data.tools_column",
        "'tools'",
        "data.chat_template=false",
        "data.tools_column=null",
    ),
    "data.tokenizer_path=nothing": ("data.tokenizer_path", "nothing", "tokenizer.json", "folder"),
    "actor.model.path=nothing": ("actor.model.path", "config.json", "nothing", "folder"),
    "actor.model.path=broken": ("actor.model.path", "line 1 column 2", "broken/config.json", ""),
}
REWARDS: dict[str, Parts] = {
    "reward.function=no_such_module:score": ("reward.function", "no_such_module", "file.py:name"),
    "reward.function=syntax.py:score": ("reward.function", "line 1", "syntax.py", ""),
}
ADAPTERS: dict[str, Parts] = {
    "actor.model.lora.rank=0": ("actor.model.lora.rank", "0", "at least 1", ""),
    "actor.rollout.weights=adapter": (
        "actor.rollout.weights",
        "adapter",
        "actor.model.lora",
        "actor.rollout.weights=auto",
    ),
    "reference.shares=critic": ("reference.shares", "'critic'", "reference.shares=actor"),
    "actor.model.lora.rank=8 reference.shares=actor placement=standalone": (
        "reference.shares",
        "actor",
        "ranks",
        "reference.shares",
    ),
    "actor.model.lora.rank=8 reference.shares=actor reference.model.path=narrow": (
        "reference.shares",
        "actor",
        "narrow",
        "reference.shares",
    ),
    "actor.model.lora.rank=8 reference.shares=actor reference.engine.kind=megatron": (
        "reference.shares",
        "actor on fsdp t1",
        "reference.engine megatron t1",
        "set reference.engine.kind=fsdp and reference.engine.layout=t1",
    ),
    "actor.model.lora.rank=8 actor.engine.kind=megatron actor.engine.layout=p2": (
        "actor.model.lora",
        "adapters on 2 pipeline stages",
        "one stage",
        "remove p2 from actor.engine.layout",
    ),
}
PLACEMENTS: dict[str, Parts] = {
    "{a: [0]}": ("placement.a", "[0]", "{roles: [actor], ranks: [0, 1]}"),
    "{a: {roles: actor, ranks: [0]}}": ("placement.a.roles", "'actor'", "roles: [actor]"),
    "{a: {roles: [actor], ranks: 0-1}}": ("placement.a.ranks", "'0-1'", "ranks: [0, 1]"),
    "{a: {roles: [actor], ranks: [0]}, b: {roles: [actor], ranks: [1]}}": (
        "placement",
        "actor",
        "a and b",
        "",
    ),
}
TABLE = KEYS_AND_TYPES | VALUES | SIZES | FILES | REWARDS | ADAPTERS


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The valid folder, and beside it everything that is wrong."""
    write_config_folder(tmp_path)
    write_model(tmp_path / "odd", {**ACTOR, "num_attention_heads": 3})
    write_model(tmp_path / "kv", {**ACTOR, "num_attention_heads": 4, "num_key_value_heads": 3})
    write_model(tmp_path / "narrow", {**ACTOR, "num_attention_heads": 8, "num_key_value_heads": 8})
    write_model(tmp_path / "small", {**ACTOR, "vocab_size": 3})
    write_model(tmp_path / "foreign", ACTOR, {**TOKENS, "c": 4})
    write_model(tmp_path / "judge", SCORER, {**TOKENS, "c": 4})
    write_model(tmp_path / "little", {**SCORER, "vocab_size": 3}, {**TOKENS, "c": 4})
    write_model(tmp_path / "labels", {**SCORER, "id2label": {"0": "bad", "1": "good"}})
    write_model(tmp_path / "broken", ACTOR)
    (tmp_path / "broken/config.json").write_text("{")
    write_model(tmp_path / "bare", ACTOR)
    (tmp_path / "bare/model.safetensors").unlink()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "syntax.py").write_text("def score(:\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("overrides", TABLE)
def test_setting_that_cannot_work_is_refused_with_its_value_and_a_remedy(overrides: str) -> None:
    words = [overrides] if "[" in overrides or "{" in overrides else shlex.split(overrides)

    with pytest.raises(ConfigError) as refusal:
        accept(*words)

    assert missing_parts(str(refusal.value), TABLE[overrides]) == [], refusal.value


def test_reward_model_with_a_tokenizer_of_its_own_is_accepted_and_a_critic_from_it_refused() -> (
    None
):
    words = ("reward.function=null", "reward.model.path=judge")

    accept(*words, "critic.model.path=actor")
    with pytest.raises(ConfigError, match=r"^critic\.model\.path: got another tokenizer"):
        accept(*words)


def test_two_ways_of_recomputing_are_refused() -> None:
    expected = "got selective_recompute with recompute, expected one of them; remove one"

    with pytest.raises(ConfigError, match=expected):
        options = "actor.engine.options=[recompute,selective_recompute]"
        accept("actor.engine.kind=megatron", options)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_that_cannot_work_is_refused(placement: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        accept(f"placement={placement}", world_size=2)

    assert missing_parts(str(refusal.value), PLACEMENTS[placement]) == [], refusal.value


def test_head_dim_that_vllm_has_no_kernel_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmdflow.config.check._check_installed", lambda key, package, extra: None)

    with pytest.raises(ConfigError, match=r"got head_dim 8, expected at least 32 for vllm; set"):
        accept("actor.model.path=narrow", "actor.rollout.engine=vllm")


@pytest.mark.parametrize("family", ["cohere2", "ernie4_5_moe", "falcon_h1", "lfm2", "nemotron_h"])
def test_family_for_which_vllm_is_wrong_is_refused_for_vllm_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    monkeypatch.setattr("spmdflow.config.check._check_installed", lambda key, package, extra: None)
    write_model(tmp_path / family, {**ACTOR, "model_type": family, "head_dim": 32})
    words = (f"actor.model.path={family}", f"reference.model.path={family}")

    accept(*words)
    with pytest.raises(ConfigError, match=rf"got a model of the family {family} for vllm \("):
        accept(*words, "actor.rollout.engine=vllm")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor.update.router=replay", "actor.update.router: got replay for .*no experts"),
        (
            "actor.update.router_balance_coef=0.01",
            r"actor.update.router_balance_coef: got 0.01 for .*no experts, expected a mixture",
        ),
    ],
)
def test_settings_of_experts_are_refused_for_a_dense_model(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        accept(setting)


def test_settings_of_experts_are_accepted_for_a_mixture(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts["num_hidden_layers"] = 2
    write_model(tmp_path / "mixture", {**ACTOR, **experts, "model_type": "qwen3_moe"})
    words = ("actor.model.path=mixture", "reference.model.path=mixture")

    accept(*words, "actor.update.router=replay", "actor.update.router_balance_coef=0.01")
    for weights in ("blocks", "flat"):
        message = rf"actor.rollout.weights: got {weights} for mixture.*expected copy, or auto"
        with pytest.raises(ConfigError, match=message):
            accept(*words, f"actor.rollout.weights={weights}")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "engine.kind=fsdp stores weights in another layout"),
        (("actor.engine.kind=megatron",), "rollout.engine=builtin has its own weights"),
        (
            (
                *("actor.engine.kind=megatron", "actor.engine.layout=p2"),
                *("actor.rollout.engine=vllm", "actor.rollout.layout=t2"),
            ),
            "generation replicas lie across training replicas",
        ),
    ],
)
def test_trainer_and_generator_that_cannot_share_weights_are_refused(
    words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    llama = {"model_type": "llama", "num_hidden_layers": 2, "intermediate_size": 64}
    write_model(tmp_path / "llama", {**ACTOR, **llama})
    words = ("actor.model.path=llama", *words)
    for weights in ("blocks", "flat"):
        message = rf"actor.rollout.weights: got {weights}, expected copy here, because {why}"
        with pytest.raises(ConfigError, match=message):
            accept(*words, f"actor.rollout.weights={weights}")


def test_package_that_is_not_installed_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"expected an installed package; pip install 'wandb"):
        accept("run.trackers=[wandb]")


def test_metrics_page_without_its_library_is_refused_only_if_a_port_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(ConfigError) as caught:
        accept("run.metrics_port=9400")

    said = str(caught.value)
    assert "run.metrics_port: got prometheus_client, expected an installed package; " in said
    assert "prometheus" in said.partition("; ")[2] and "run.metrics_port=null" in said
    assert accept().run.metrics_port is None


def test_engine_whose_package_is_not_installed_is_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError) as caught:
        accept("actor.engine.kind=megatron", "critic.engine.kind=fsdp")

    said = str(caught.value)
    assert "actor.engine.kind: got megatron, expected an installed package" in said
    assert "pip install 'megatron-core" in said and "critic" not in said


def test_environment_variable_that_is_not_set_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: got .*'SPMDFLOW_NO_SUCH' not found"):
        accept("run.dir=${oc.env:SPMDFLOW_NO_SUCH}")


def test_kl_without_a_reference_model_is_refused() -> None:
    Path("grpo.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from typing import Any\n"
        "from spmdflow.config.leaf import part\n"
        "from spmdflow.config.schema import *\n"
        "@dataclass\n"
        "class Config:\n"
        "    actor: ActorConfig = part(ActorConfig)\n"
        "    placement: Any = 'colocate'\n"
        "    total_steps: int = 1\n"
        "def main(flow, cfg: Config): pass\n"
    )

    cfg = load("grpo.py", None, ["actor.model.path=actor", "actor.loss.kl_coef=0.1"]).cfg
    with pytest.raises(ConfigError, match=r"^actor\.loss\.kl_coef: got 0\.1 without a reference"):
        check(cfg, 1)


def test_two_corrections_of_the_same_rollouts_are_refused_while_rows_may_be_stale() -> None:
    script = Path(__file__).resolve().parents[3] / "algos" / "grpo_async.py"
    words = ["actor.update.correction.kind=token", "max_staleness="]

    stale = load(script, None, [words[0], words[1] + "1"]).cfg
    fresh = load(script, None, [words[0], words[1] + "0"]).cfg

    check(fresh, 2)
    with pytest.raises(ConfigError, match="a script that weighs its rows by correction, expected"):
        check(stale, 2)


YAML_PROBLEMS = {
    "actor: {optimiser: {lr: 1}}": r"bad\.yaml: unknown key actor\.optimiser, nearest is",
    "run: {seed: x}": r"bad\.yaml: run\.seed got 'x' \(str\), expected int; give one",
    "run: [": r"bad\.yaml: got invalid YAML \(.*, line 2, column 1\), expected key: value lines; c",
    "[1, 2]": r"bad\.yaml: got a list, expected settings as key: value lines; write lines such as",
}


@pytest.mark.parametrize("text", YAML_PROBLEMS)
def test_problem_in_a_yaml_file_is_refused_with_the_file(text: str) -> None:

    Path("bad.yaml").write_text(text)

    with pytest.raises(ConfigError, match=YAML_PROBLEMS[text]):
        load("ppo.py", "bad.yaml", [])


def test_missing_settings_are_listed_with_their_sentences() -> None:

    Path("ppo.yaml").unlink()

    with pytest.raises(ConfigError) as refusal:
        load("ppo.py", None, [])
    assert str(refusal.value) == (
        "missing data.train_path, actor.model.path, expected a value for each; set them in the "
        "YAML or as data.train_path=VALUE\n"
        "  data.train_path: File or data set of training prompts, or a weighted map of them.\n"
        "  actor.model.path: Hugging Face folder, owner/name[@revision] on the hub, or a "
        "RUN_DIR or checkpoint."
    )


SCRIPT_PROBLEMS = {
    "x = 1": r"^script: bad\.py has no main, expected main\(flow, cfg\); define it$",
    "async def main(flow, cfg): pass": r"^script: main in bad\.py is an async function, expected",
    "def main(:": r"^script: bad\.py cannot be imported: SyntaxError: .*line 1.*; expected a",
    "import no_such_thing": r"^script: bad\.py cannot be imported: ModuleNotFoundError: No module",
    "Config = 3\ndef main(flow, cfg): 0": r"^script: got main\(flow, cfg\) and a class",
    "def main(flow, cfg: int): pass": r"^script: got cfg: <class 'int'>, expected a dataclass of s",
    "def main(flow, cfg: 'X'): pass": r"^script: got name 'X' is not defined in the annotations of",
}


@pytest.mark.parametrize("text", SCRIPT_PROBLEMS)
def test_script_that_cannot_be_used_is_refused(text: str) -> None:

    Path("bad.py").write_text(text)

    with pytest.raises(ConfigError, match=SCRIPT_PROBLEMS[text]):
        load("bad.py", None, [])


def test_missing_script_or_config_is_refused_with_the_folder() -> None:

    with pytest.raises(
        ConfigError, match=r"^script: no file pp0\.py in .*nearest is ppo\.py; give"
    ):
        load("pp0.py", None, [])
    with pytest.raises(ConfigError, match=r"^config: no file nope\.yaml in .*, expected a YAML"):
        load("ppo.py", "nope.yaml", [])
