"""`spmdflow doctor`: what is installed, what works on this node, and what is missing for what.

Looks and reports; changes nothing and survives whatever is missing. Exit code 0: a run on the CPU
can work here; 1: it cannot, and the lines marked `bad` say why.

| file | what |
|---|---|
| `command` | the command line and what it prints |
| `check` | one thing that was looked at |
| `packages` | Python, versions against the ranges of the installed package, extras |
| `devices` | torch's build, GPUs, cores, the store that ranks meet at |
| `node` | addresses, RUN_DIR, limits, environment |
"""
