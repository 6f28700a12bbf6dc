"""Settings: defaults < the script's YAML < the user's YAML < command line, typed, checked early.

Precedence: the dataclass defaults of the script's settings class, then the script's own YAML (its
name with `.yaml`), then CONFIG.yaml, then `key=value` from the command line. A later source
replaces single keys. Lists are replaced whole, and so are maps that are one setting (the terms of a
reward, a placement) by a file; the command line merges them name by name. `???` in a file makes a
setting required. If the file is that of a training run and the script an evaluation, it counts
alone.
Values may refer to others (`${actor.model.path}`) or the environment (`${oc.env:SPMDFLOW_DATA}`).
A relative path in a YAML file means the current directory or, if nothing is there, the YAML's own,
or the bundled files. A bundled script or YAML is found by its name.

| file | does |
|---|---|
| schema | the dataclasses; a default that works, a sentence and bounds per key |
| algorithm, offline, objective | the same for other algorithms; for losses and advantages |
| leaf | the keys of a dataclass tree as a flat list, their errors, and `--help` |
| load, source | script + YAML + overrides -> one object; bundled ones by name |
| script | imports the script and finds the settings class of its `main` |
| foreign_names | names of settings in TRL, verl and OpenRLHF -> ours, for unknown keys |
| old_forms | settings in the form of before 0.2.0 -> those of today, with a warning |
| resolve | the passes that give `auto` its meaning, place the run and check it |
| episode | settings of episodes, and an actor that has them |
| episode_models | models that episodes call besides the policy |
| endpoint | settings of where the endpoint of episodes listens, and their checks |
| guard | conditions on the metrics of a step (run.guards) |
| adapter | adapters of a policy: what a folder says of one, and what fits together |
| location | models and data by path, checkpoint or name on the hub -> folders |
| placement | preset or map -> pools of ranks |
| parallel | layouts and the batch algebra, as integers and as the first lines of a run |
| data_source, reward | settings with a grammar: sources of data, terms of a reward |
| model_folder | what a model's folder says about it; models inside checkpoints |
| check | everything that is an error before a process group exists |
| server | the part of it about generation servers |
| data_check | the part of it about how rows are read, also for tools that only look at rows |

Types and bounds are checked here, on plain dataclasses, and not by a second schema library next to
omegaconf, which reads the types and fills in `${...}`: the two would have to be kept in step. An
error names the file or the word of the command line, the nearest key and an example, and all errors
are reported together. Translating another library's errors into these would take as much code as
the checks (`leaf.setting`, `leaf.check_bounds`).

A settings class that has no use for a setting of its base class overrides it with a `ClassVar`. A
value that only some scripts can set is a plain attribute of a base class that is not a dataclass
(`PolicyLossSettings`, `AdvantageSettings`, `DataSettings`); a subclass makes it a setting.
"""
