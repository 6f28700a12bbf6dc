"""Settings: defaults < YAML < command line, typed, checked before any device is touched.

Precedence: the dataclass defaults of the script's `Config` (or `PPOConfig`), then CONFIG.yaml (the
script's name with `.yaml` if none is given), then `key=value` from the command line. A later
source replaces single keys; lists are replaced whole; a placement map is merged pool by pool.
Values may refer to others (`${actor.model.path}`) or the environment (`${oc.env:SPMDFLOW_DATA}`).
A relative path in a YAML file means the current directory or, if nothing is there, the YAML's own,
or the bundled files. A bundled script or YAML is given by its name.

| file | does |
|---|---|
| schema | the dataclasses; a default that works, a sentence and bounds per key |
| algorithm, offline, evaluate | the same for algorithms besides PPO |
| leaf | the keys of a dataclass tree as a flat list |
| load | script + YAML + overrides -> one object; the only user of omegaconf |
| installed | bundled scripts by name; whether the installation is complete |
| placement | preset or map -> pools of ranks |
| algebra | prompts -> samples -> mini-batches -> micro-batches, as integers |
| eval_prompts, reward_terms | settings that are small texts of their own |
| exported | the Hugging Face folder that a RUN_DIR or a checkpoint's step means |
| check, model_folder, reward_source | everything refused before a process group exists |
| help, describe | what `--help` and the first lines of a run print |
"""
