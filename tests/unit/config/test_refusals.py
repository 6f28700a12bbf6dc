"""Every setting that cannot work is refused with its exact message: got, expected, do.

The table is the specification; `docs` shows it too. All refusals happen without torch and
without a process group.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from spmdflow.config.check import check
from spmdflow.config.load import load
from spmdflow.errors import ConfigError
from tests.unit.config_folder import ACTOR, SCORER, TOKENS, accept, write_config_folder, write_model

KEYS_AND_TYPES = {
    "actor.optimiser.lr=1": "command line: unknown key actor.optimiser, nearest is "
    "actor.optimizer; --help lists every key",
    "actor.lr=1": "command line: unknown key actor.lr, nearest is actor.optimizer.lr; --help lists "
    "every key",
    "xyzzy=1": "command line: unknown key xyzzy; --help lists every key",
    "actor.optimizer.lr=fast": "command line: actor.optimizer.lr got 'fast' (str), expected float; "
    "give one, such as actor.optimizer.lr=1e-05",
    "actor.optimizer.betas=[a,b]": "command line: actor.optimizer.betas got ['a', 'b'] (list), "
    "expected list of float; give one, such as actor.optimizer.betas=[0.9, 0.95]",
    "actor=3": "command line: actor got 3 (int), expected a group of settings; set its keys, such "
    "as actor.model.path",
    "actor=null": "command line: actor got None, expected a group of settings; leave it out for "
    "its defaults",
    "placement.all=???": "command line: placement: got {'all': '???'}, expected a value in the "
    "place of ???; write it",
    "run.seed=1.5": "command line: run.seed got 1.5 (float), expected int; give one, such as "
    "run.seed=0",
    "data.shuffle=maybe": "command line: data.shuffle got 'maybe' (str), expected bool; give one, "
    "such as data.shuffle=true",
    "run.start_seconds=many": "command line: run.start_seconds got 'many' (str), expected float; "
    "give one, such as run.start_seconds=600.0",
    "run.call_seconds=many": "run.call_seconds: got 'many', expected auto or seconds, more than 0; "
    "set run.call_seconds=600, or leave it",
    "total_steps": "command line: got 'total_steps', expected key=value with a dotted key; give "
    "lists whole, as in actor.optimizer.betas=[0.9,0.95]",
    "run.name=[1": "command line: got 'run.name=[1', expected a value in YAML; quote it or close "
    "its brackets",
    "run.name=${run.nam}": "run.name: got ${run.nam}, expected ${key} of a setting with a fitting "
    "value or ${oc.env:NAME} of a variable that is set; correct it (Interpolation key 'run.nam' "
    "not found)",
    r"critic.optimizer.betas=\${run.seed}": r"settings: got critic.optimizer.betas=\${run.seed}, "
    "expected a value of the setting's type; correct it (Invalid value assigned: int is not a "
    "ListConfig, TupleConfig, list, or tuple.)",
    "reward.model.dtype=bfloat16": "missing reward.model.path, expected a value for each; set them "
    "in the YAML or as reward.model.path=VALUE\n"
    "  reward.model.path: Hugging Face folder, owner/name[@revision] on the hub, or a "
    "RUN_DIR or checkpoint.",
}
VALUES = {
    "actor.update.correction.kind=token actor.update.old_log_probs=rollout": "actor.update."
    "correction.kind: got token with actor.update.old_log_probs=rollout, whose ratio is the weight "
    "already, expected one correction; set actor.update.correction.kind=none, or "
    "actor.update.old_log_probs=recompute",
    "actor.rollout.weights=vllm_transfer": "actor.rollout.weights: got 'vllm_transfer', expected "
    "auto or copy or blocks or flat or adapter; set actor.rollout.weights=auto",
    "run.profile_steps=5-3": "run.profile_steps: got '5-3', expected steps and, after `on`, ranks; "
    "write '3', '3-5' or '3-5 on 0, 2'",
    "'run.profile_steps=3 on 0, 9'": "run.profile_steps: got rank 9, expected ranks 0 to 3; name "
    "ranks of the run",
    'run.guards=["actor/kl ~ 3: stop"]': "run.guards: got 'actor/kl ~ 3: stop', expected NAME < "
    "LIMIT: ACTION, or with >; LIMIT a number or such as 0.5 * best - 0.1, or of the median; "
    """ACTION warn, stop or skip; write run.guards='["eval/accuracy < 0.5 * best: stop"]'""",
    "run.resume=maybe": "run.resume: got 'maybe', expected auto or never or reload_frozen or "
    "afresh; set run.resume=auto",
    "run.trackers=[comet]": "run.trackers: got 'comet', expected one of mlflow, swanlab, "
    "tensorboard, trackio, wandb; choose one or add yours with @register_tracker('comet')",
    "actor.engine.kind=gpipe": "actor.engine.kind: got 'gpipe', expected fsdp or zero1 or "
    "zero2 or zero3 or megatron; set actor.engine.kind=fsdp",
    "actor.rollout.temperature=0": "actor.rollout.temperature: got 0.0, expected more than 0; "
    "change it (Sampling temperature; also divides the trainer's logits)",
    "actor.rollout.top_p=1.5": "actor.rollout.top_p: got 1.5, expected at most 1; change it "
    "(Nucleus sampling; 1 keeps every token)",
    "data.prompts_per_step=0": "data.prompts_per_step: got 0, expected at least 1; change it "
    "(Prompts drawn for one step)",
    "actor.optimizer.betas=[0.9,1.0]": "actor.optimizer.betas: got 1.0, expected less than 1; "
    "change it (AdamW's two moment decays)",
    "actor.optimizer.betas=[0.9]": "actor.optimizer.betas: got [0.9], expected two numbers; set "
    "actor.optimizer.betas=[0.9,0.95]",
    "run.name=a/b": "run.name: got 'a/b', expected a plain folder name; set run.dir for a path",
    "'data.eval_prompts=8 samples'": "data.eval_prompts: got '8 samples', expected all or a number "
    "of prompts, and how many samples of each pass@k takes, if any; write all, 512 or "
    "'512 x 8 samples'",
}
SIZES = {
    "actor.update.mini_batch_size=48": "actor.update.mini_batch_size: got 48, expected a divisor "
    "of the 64 samples of a step (64 prompts x 1); choose 16 or 32 or 64",
    "critic.update.mini_batch_size=128": "critic.update.mini_batch_size: got 128, expected a "
    "divisor of the 64 samples of a step (64 prompts x 1); choose 16 or 32 or 64",
    "data.samples_per_prompt=4 actor.update.mini_batch_size=2": "actor.update.mini_batch_size: got "
    "2, expected a divisor of the 256 samples of a step (64 prompts x 4) that is a multiple of 4; "
    "choose 4 or 8 or 16",
    "actor.engine.micro_batch=many": "actor.engine.micro_batch: got 'many', expected a number and "
    "rows or tokens; write '16 rows' or '4096 tokens'",
    "actor.engine.layout=t2": "actor.engine.layout: got t2 with engine.kind=fsdp, expected none, "
    "as that engine is data-parallel; set actor.engine.kind=megatron",
    "actor.engine.kind=megatron actor.engine.layout=2x2": "actor.engine.layout: got '2x2', "
    "expected sizes such as t2, p2, t4p2 or s8; correct it (data parallelism takes the other "
    "ranks)",
    "actor.engine.layout=s0": "actor.engine.layout: got 's0', expected sizes such as t2, p2, t4p2 "
    "or s8; correct it (data parallelism takes the other ranks)",
    "actor.engine.layout=s3": "actor.engine.layout: got s3 on a pool of 4, expected a divisor of "
    "the pool's size; choose one of [1, 2, 4]",
    "actor.engine.kind=megatron actor.engine.layout=p2v2": "actor.engine.layout: got p2v2, "
    "expected p3 or more with v, so that a stage has two neighbours; leave out v or raise p",
    "actor.engine.kind=zero1 actor.engine.layout=s2": "actor.engine.layout: got s2 with "
    "engine.kind=zero1, expected no s, as that engine does not shard parameters over "
    "data-parallel ranks; leave it out or set actor.engine.kind=fsdp or zero2 or zero3",
    "actor.rollout.layout=s2": "actor.rollout.layout: got s2, expected t and p alone, as the other "
    "sizes are of training; write t1p1",
    "actor.engine.kind=megatron actor.engine.layout=t3": "actor.engine.layout: got t3p1 = 3 ranks "
    "a replica on a pool of 4, expected a divisor of the pool's size; choose a product among "
    "[1, 2, 4]",
    "actor.rollout.layout=t2": "actor.rollout.layout: got t2 with rollout.engine=builtin, expected "
    "t1, as it generates on single ranks; set actor.rollout.engine=vllm or vllm_sampler",
    "actor.engine.options=[sequence_parallel]": "actor.engine.options: got sequence_parallel with "
    "engine.kind=fsdp, expected some of recompute, padded, keep_gathered, free_gathered; leave it "
    "out or choose another engine",
    "actor.rollout.max_new_tokens=64": "actor.model.path: got max_prompt_tokens 16 + "
    "max_new_tokens 64 = 80, expected at most the model's 32 positions; lower "
    "data.max_prompt_tokens or actor.rollout.max_new_tokens",
    "actor.model.path=odd": "actor.model.path: got 3 attention heads for hidden_size 64, expected "
    "a divisor or a head_dim; correct odd/config.json",
    "actor.model.path=kv": "actor.model.path: got 3 key-value heads for 4 attention heads, "
    "expected a divisor; correct kv/config.json",
    "critic.model.path=small": "critic.model.path: got a vocabulary of 3, expected at least 4, the "
    "ids of the tokenizer actor; give a model with that tokenizer",
    "critic.model.path=foreign": "critic.model.path: got another tokenizer ('c' is 4, in actor "
    "None), expected the same ids, as every model reads the actor's tokens; give a model with that "
    "tokenizer",
    "reward.function=null reward.model.path=judge data.chat_template=true": "reward.model.path: "
    "got another tokenizer ('c' is 4, in actor None), expected the same ids, as every model reads "
    "the actor's tokens; give a model with that tokenizer",
    "reward.function=null reward.model.path=little": "reward.model.path: got a vocabulary of 3, "
    "expected at least 5, the ids of the tokenizer little; give a model with that tokenizer",
}
FILES = {
    "data.train_path=nope.jsonl": "data.train_path: no file nope.jsonl in {folder}, expected "
    "prompts; correct the path",
    "data.train_path=reward.py": "data.train_path: got reward.py, expected a name that ends in "
    ".jsonl or .jsonl.gz or .jsonl.zst or .parquet, a folder, or owner/name:split of the hub; "
    "convert the file",
    "data.train_path=empty.jsonl": "data.train_path: got the empty file empty.jsonl, expected "
    "prompts; give another",
    "data.eval_path=null": "data.eval_path: got none with eval_every 10, expected a file of "
    "held-out prompts; set data.eval_path or eval_every=0",
    "data.chat_template_arguments={enable_thinking: false}": "data.chat_template_arguments: no "
    "chat template is used, as data.chat_template is false; set data.chat_template=true or "
    "data.chat_template_arguments={}",
    "data.chat_template=true data.chat_template_arguments.tokenize=true": "data.chat_template"
    "_arguments: got 'tokenize', expected a variable that the template reads and the run does not "
    "set itself; take it out of data.chat_template_arguments",
    "data.tools_column=tools": "data.tools_column: got 'tools' with data.chat_template=false, "
    "expected a chat template to show tools; set data.chat_template=true or data.tools_column=null",
    "data.tokenizer_path=nothing": "data.tokenizer_path: no tokenizer in nothing, expected a "
    "folder with tokenizer.json; give the folder of the model it belongs to",
    "actor.model.path=nope": "actor.model.path: no folder nope in {folder}, expected a Hugging "
    "Face folder; download the model and give its folder",
    "actor.model.path=nothing": "actor.model.path: no config.json in nothing, expected a Hugging "
    "Face folder; give the folder that holds it",
    "actor.model.path=broken": "actor.model.path: got Expecting property name enclosed in double "
    "quotes: line 1 column 2 (char 1) in broken/config.json, expected JSON; fix the file",
    "actor.model.path=bare": "actor.model.path: no *.safetensors in bare, expected weights beside "
    "config.json; save the model with safetensors",
    "reference.model.path=scorer": "reference.model.path: got LlamaForSequenceClassification, "
    "expected an architecture ...ForCausalLM; give another folder than scorer",
}
REWARDS = {
    "reward.function=null": "reward: got neither model nor function, expected one of them "
    "or both; set reward.model.path=FOLDER or reward.function=file.py:name",
    "reward.per_token=true": "reward.per_token: got true without a model, expected a model; set "
    "reward.model.path=FOLDER or reward.per_token=false",
    "reward.model.path=scorer": "reward: got a model beside functions without a weight for its "
    "score, expected the term model; write reward.function={judge: 1.0 * model, rule: "
    "file.py:name} or set one of "
    "the two to null",
    "reward.function=score": "reward.function: got 'score', expected file.py:name, module:name or "
    "model, with a weight in front and name=value behind where wanted; write for example 0.2 * "
    "my_reward.py:score(limit=100)",
    "reward.function=nope.py:score": "reward.function: no file nope.py in {folder}, expected a "
    "Python file; correct the path",
    "reward.function=reward.py:scor": "reward.function: no scor in reward.py, expected a function "
    "at top level; did you mean score?",
    "reward.function=reward.py:short": "reward.function: got short(prompt, response) in reward.py, "
    "expected short(prompt, response, row); change its parameters",
    "reward.function=no_such_module:score": "reward.function: no module no_such_module, expected "
    "one that Python can import; install it or write file.py:name",
    "reward.function=syntax.py:score": "reward.function: got invalid syntax (<unknown>, line 1) in "
    "syntax.py, expected Python; fix the file",
    "reward.function=null reward.model.path=actor": "reward.model.path: got LlamaForCausalLM, "
    "expected an architecture ...ForSequenceClassification; give another folder than actor",
    "reward.function=null reward.model.path=labels": "reward.model.path: got 2 labels, expected 1 "
    "(a score); give a model with num_labels 1",
}
ADAPTERS = {
    "actor.model.lora.rank=0": "actor.model.lora.rank: got 0, expected at least 1; change it (Rows "
    "of A and columns of B)",
    "actor.model.lora.rank=8 actor.engine.kind=megatron": "actor.model.lora: got adapters with "
    "actor.engine.kind=megatron, expected an engine that trains adapters: fsdp, zero1, zero2, "
    "zero3; choose one of these, or leave actor.model.lora out",
    "actor.rollout.weights=adapter": "actor.rollout.weights: got adapter without actor.model.lora, "
    "expected a policy that trains adapters; set actor.rollout.weights=auto",
    "actor.model.lora.rank=8 actor.rollout.weights=adapter": "actor.rollout.weights: got adapter "
    "with actor.rollout.engine=builtin, expected a generator that computes with them: vllm, "
    "vllm_sampler; set actor.rollout.weights=auto, which merges them into the weights",
    "reference.shares=critic": "reference.shares: got 'critic', expected actor; set "
    "reference.shares=actor",
    "reference.shares=actor": "reference.shares: got actor without actor.model.lora, expected an "
    "actor whose own weights stay as they are; leave reference.shares out",
    "actor.model.lora.rank=8 reference.shares=actor placement=standalone": "reference.shares: got "
    "actor on other ranks, expected both on the same ranks; put both into one pool, or leave "
    "reference.shares out",
    "actor.model.lora.rank=8 reference.shares=actor reference.model.path=narrow": "reference."
    "shares: got actor of actor for a reference of narrow, expected one model; set one path, or "
    "leave reference.shares out",
    "actor.model.lora.rank=8 reference.shares=actor reference.engine.kind=megatron": "reference."
    "shares: got actor with reference.engine.kind=megatron, expected rows divided as the actor's "
    "are; leave reference.engine.kind out",
}
PLACEMENTS = {
    ("colocated", 4): "placement: got 'colocated', expected colocate, split, standalone or a map "
    "pool -> {roles: [...], ranks: [...]}; did you mean colocate?",
    ("split", 1): "placement: split got 1 rank, expected at least 2 (a pool each for actor, "
    "reference | critic, reward); start more processes (--nproc-per-node 2) or set "
    "placement=colocate",
    ("standalone", 2): "placement: standalone got 2 ranks, expected at least 4 (a pool each for "
    "actor | critic | reference | reward); start more processes (--nproc-per-node 4) or set "
    "placement=colocate",
    ("{a: [0]}", 2): "placement.a: got [0], expected the two keys roles and ranks; write a: "
    "{roles: [actor], ranks: [0, 1]}",
    ("{a: {roles: actor, ranks: [0]}}", 2): "placement.a.roles: got 'actor', expected a list of "
    "role names; write roles: [actor]",
    ("{a: {roles: [actor], ranks: 0-1}}", 2): "placement.a.ranks: got '0-1', expected a list of "
    "integers; write ranks: [0, 1]",
    ("{a: {roles: [actor], ranks: [1, 0]}}", 2): "placement.a.ranks: got [1, 0], expected "
    "ascending ranks without repeats; write [0, 1]",
    ("{a: {roles: [actor], ranks: [0, 4]}}", 2): "placement.a.ranks: got 4, expected ranks of the "
    "world 0-1; start 5 processes or use other ranks",
    ("{a: {roles: [actor], ranks: [0]}, b: {roles: [critic], ranks: [0]}}", 2): "placement: rank 0 "
    "is in pools a and b, expected disjoint pools; put roles that share ranks into one pool",
    ("{a: {roles: [actor], ranks: [0]}, b: {roles: [actor], ranks: [1]}}", 2): "placement: role "
    "actor is in pools a and b, expected each role once; remove it from one",
    ("{a: {roles: [actr], ranks: [0]}}", 2): "placement.a.roles: got actr, expected roles of this "
    "script (actor, critic, reference, reward); did you mean actor?",
    ("{a: {roles: [actor, critic], ranks: [0]}}", 2): "placement: got no pool for reference, "
    "reward, expected each role of actor, critic, reference, reward once; add it to a pool's roles",
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
def test_setting_that_cannot_work_is_refused_with_got_expected_and_do(overrides: str) -> None:
    expected = TABLE[overrides].replace("{folder}", str(Path.cwd()))

    words = [overrides] if "[" in overrides or "{" in overrides else shlex.split(overrides)
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        accept(*words)


def test_reward_model_with_a_tokenizer_of_its_own_is_accepted_and_a_critic_from_it_refused() -> (
    None
):
    words = ("reward.function=null", "reward.model.path=judge")

    accept(*words, "critic.model.path=actor")
    with pytest.raises(ConfigError, match=r"^critic\.model\.path: got another tokenizer"):
        accept(*words)


def test_two_ways_of_recomputing_are_refused() -> None:
    expected = "got selective_recompute with recompute, expected one of them; leave one out"

    with pytest.raises(ConfigError, match=expected):
        options = "actor.engine.options=[recompute,selective_recompute]"
        accept("actor.engine.kind=megatron", options)


@pytest.mark.parametrize(("placement", "world_size"), PLACEMENTS)
def test_placement_that_cannot_work_is_refused(placement: str, world_size: int) -> None:
    expected = re.escape(PLACEMENTS[placement, world_size])

    with pytest.raises(ConfigError, match=f"^{expected}$"):
        accept(f"placement={placement}", world_size=world_size)


def test_head_dim_that_vllm_has_no_kernel_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmdflow.config.check._check_installed", lambda key, package, extra: None)

    with pytest.raises(ConfigError, match=r"got head_dim 8, expected at least 32 for vllm; set"):
        accept("actor.model.path=narrow", "actor.rollout.engine=vllm")


def test_package_that_is_not_installed_is_refused_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"expected an installed package; pip install 'spmdflow"):
        accept("run.trackers=[wandb]")


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
    "run: [": r"bad\.yaml: got .*line 2, column 1, expected YAML; correct that line",
    "[1, 2]": r"bad\.yaml: got list, expected key: value lines; write settings there",
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
    "def main(:": r"^script: bad\.py cannot be imported: SyntaxError: .*line 1.*; expected a",
    "import no_such_thing": r"^script: bad\.py cannot be imported: ModuleNotFoundError: No module",
    "Config = 3\ndef main(flow, cfg): 0": r"^script: got main\(flow, cfg\) beside a class",
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
