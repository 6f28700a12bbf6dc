"""Parts of scripts/server_chains.py: runs whose generation servers are disturbed at random.

| file | what |
|---|---|
| servers | a server in a process of its own, and a proxy in front of it that can lie |
| recording | the algorithm: grpo_async that keeps every trained row |
| disturb | the disturbances, and a chain of them |
| verify | whether a disturbed run kept its promise |
"""
