"""take_peak_bytes of a device that is not the thread's current one; prints two peaks as JSON."""

import json

import torch

from spmdflow.parallel.device import take_peak_bytes

device = torch.device("cuda", 2)
assert torch.cuda.current_device() == 0
take_peak_bytes(device)
kept = torch.ones(1 << 20, device=device)
freed = torch.ones(1 << 20, device=device)
del freed
print(json.dumps([take_peak_bytes(device), take_peak_bytes(device)]))
