"""Measures the machine at hand and writes a hardware file for the device mapping.

    python scripts/calibrate.py --out cpu_here.yaml [--name cpu_here] [--processes 2] [--vllm]
    python scripts/calibrate.py --out gpu_here.yaml --device cuda [--name gpu_here] [--processes 8]
    python scripts/calibrate.py --out gpu_here.yaml --device cuda --processes 1      a single GPU

The setting run.hardware and the option --hardware of spmdflow.plan take the file. Whether it is of
processors or of GPUs is read from its name: of processors it begins with cpu.

Every process of a node measures at the same time, as ranks compute at the same time: on a CPU with
fewer cores than processes each gets its share. Matrix rates, memory, collectives (gloo on a CPU,
NCCL on CUDA), the least time of a layer, host time of an optimizer step, of a generation step (with
--vllm: two measurements of the installed vLLM) and of a call through the controller. The network is
taken as the link where there is one machine. The CUDA path is written and has never been run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from bench._clock import best_of, shared, usual
from bench._processor import processor_name
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

Values = dict[str, float]
MODEL = ROOT / "algos/arithmetic/model"
GENERATION_BATCHES = (4, 48)
NEW_TOKENS = 40


def main() -> None:
    """Measure in torchrun and beside it, then write the file."""
    arguments = _arguments()
    if arguments.rank_folder:
        run_rank(arguments.rank_folder, arguments.device)
        return
    if arguments.generation_of:
        print(json.dumps(generation_seconds(arguments.generation_of)))
        return
    values = _in_torchrun(arguments.processes, arguments.device)
    values |= _host_costs(arguments, values)
    text = file_text(arguments, values)
    arguments.out.write_text(text)
    print(text)


def run_rank(folder: Path, device_name: str) -> None:
    """What each process measures, all at once; the mean over processes is kept."""
    dist.init_process_group("nccl" if device_name == "cuda" else "gloo")
    rank = dist.get_rank()
    if device_name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(device_name)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    values: Values = {"reserved_bytes": used if device_name == "cpu" else 2e9}
    for part in PARTS:
        dist.barrier()
        values |= part(device, values)
    everyone: list[Values] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, values)
    if rank == 0:
        means = {name: statistics.mean(one[name] for one in everyone) for name in values}
        (folder / "values.json").write_text(json.dumps(means))
    dist.destroy_process_group()


def memory_rates(device: torch.device, known: Values) -> Values:
    """Bytes/s of a copy, read and write together; the same with scattered rows of 2 KB."""
    numel = (1 << 24) if device.type == "cpu" else (1 << 30)
    source = torch.ones(numel, device=device)
    target = torch.empty_like(source)
    copy = 8 * numel / _seconds_of(lambda: target.copy_(source), device)
    rows = source.view(-1, 512)
    order = torch.randperm(len(rows), device=device)
    out = target.view(-1, 512)
    gather = 8 * numel / _seconds_of(lambda: torch.index_select(rows, 0, order, out=out), device)
    return {
        "memory_bandwidth": copy,
        "kv_read_efficiency": min(gather / copy, 1.0),
        "memory_bytes": memory_bytes(device),
        "host_bandwidth": host_bandwidth(device, copy),
    }


def matrix_rates(device: torch.device, known: Values) -> Values:
    """The best rate of square matrices."""
    sizes = (256, 512) if device.type == "cpu" else (4096, 8192)
    found: Values = {}
    for dtype in (torch.float32, torch.bfloat16):
        rates = [_matrix_rate(n, n, n, dtype, device) for n in sizes]
        found[f"peak_flops_{str(dtype).removeprefix('torch.')}"] = max(rates)
    return found


def layer_efficiency(device: torch.device, known: Values) -> Values:
    """Part of the matrices' rate that whole decoder layers reach, forward and backward.

    What the simulators count as memory traffic of the matrices is taken off first, as they add it.
    Norms, rotations and activation functions are in it: nothing else accounts for them.
    """
    hidden, ffn, rows, length = (
        (512, 1376, 16, 16) if device.type == "cpu" else (4096, 11008, 4, 1024)
    )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    seconds = {}
    for layers in (1, 5):
        model = _llama(hidden, ffn, layers, heads=hidden // 64).to(device, dtype)

        def run(model: torch.nn.Module = model) -> None:
            model.zero_grad()
            model(ids, use_cache=False).logits.float().sum().backward()

        seconds[layers] = _seconds_of(run, device)
    tokens = rows * length
    weights = 4 * hidden * hidden + 3 * hidden * ffn
    flops = 3 * (2 * tokens * weights + 4 * tokens * length / 2 * hidden)
    moved = 3 * dtype.itemsize * (weights + tokens * (8 * hidden + 3 * ffn))
    busy = (seconds[5] - seconds[1]) / 4 - moved / known["memory_bandwidth"]
    peak = known[f"peak_flops_{str(dtype).removeprefix('torch.')}"]
    return {"compute_efficiency": min(flops / max(busy, 1e-9) / peak, 1.0)}


def layer_floor(device: torch.device, known: Values) -> Values:
    """What one more decoder layer takes for one token of a model so small that only calls count."""
    seconds = {}
    for layers in (2, 10):
        model = _llama(32, 64, layers, heads=2).to(device).eval()
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.no_grad():
            seconds[layers] = _seconds_of(partial(model, ids, use_cache=False), device, least=20)
    return {"layer_floor_seconds": max((seconds[10] - seconds[2]) / 8, 1e-7)}


def update_seconds(device: torch.device, known: Values) -> Values:
    """AdamW, clipping and clearing over 24 tensors that are too small to matter."""
    parameters = [torch.nn.Parameter(torch.ones(64, device=device)) for _ in range(24)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return {"update_seconds": _seconds_of(step, device, least=20)}


def collectives(device: torch.device, known: Values) -> Values:
    """Ring latencies and bandwidth among all processes of this machine.

    Latencies are what a run pays on average: a rank that waits is woken late now and then. One
    process has no peer: it gets the values of the bundled file for such devices.
    """
    number = dist.get_world_size()
    if number == 1:
        from spmdflow.mapping.hardware import load_hardware

        bundled = load_hardware(LINKS_OF[device.type])
        return {name: float(getattr(bundled, name)) for name in LINKS}
    rank = dist.get_rank()
    words = torch.zeros(1024, device=device)  # gloo sends fewer messages for single numbers
    reduce_seconds = usual(lambda: dist.all_reduce(words), device)
    base = min(usual(lambda: _ping(words, rank), device) / 2, 0.5 * reduce_seconds)
    hop = (reduce_seconds - base) / (2 * (number - 1))
    size = (1 << 22) if device.type == "cpu" else (1 << 28)
    own = torch.zeros(size // number, device=device)
    whole = torch.zeros(size // number * number, device=device)
    pieces = list(whole.chunk(number))
    gathered = usual(lambda: dist.all_gather(pieces, own), device, times=40)
    busy = max(gathered - base - (number - 1) * hop, 0.2 * gathered)
    return {
        "collective_base_seconds": base,
        "link_hop_seconds": hop,
        "link_bandwidth": 4 * own.numel() * (number - 1) / busy,
    }


def link_efficiency(device: torch.device, known: Values) -> Values:
    """Part of the link's rate that gathers and reductions reach between computing layers, on a CPU.

    There the processors that compute also move the bytes, and copies into and out of the messages
    are not free. From a model with and without FSDP: it gathers its weights twice and reduces its
    gradients once, in float32.
    """
    number = dist.get_world_size()
    if device.type != "cpu" or number == 1:
        return {"link_efficiency": 1.0}
    ids = torch.zeros(8, 32, dtype=torch.long)
    seconds = []
    for shards in (False, True):
        model = _llama(512, 1376, 8, heads=8)
        received = 3 * 4 * sum(x.numel() for x in model.parameters()) * (number - 1) / number
        if shards:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)

        def run(model: torch.nn.Module = model) -> None:
            model.zero_grad()
            model(ids, use_cache=False).logits.float().sum().backward()

        seconds.append(usual(run, device, times=5))
    rate = received / max(seconds[1] - seconds[0], 1e-9)
    return {"link_efficiency": min(rate / known["link_bandwidth"], 1.0)}


LINKS = ("collective_base_seconds", "link_hop_seconds", "link_bandwidth")
LINKS_OF = {"cpu": "cpu", "cuda": "h100"}
"""Bundled file with the links of such devices."""


def generation_seconds(name: str) -> Values:
    """Host time of a generation step and of each sequence in it, from two batch sizes of vLLM."""
    from spmdflow.config.schema import RolloutConfig
    from spmdflow.data.ragged import ragged_from_rows
    from spmdflow.rollout.generator import Replica
    from spmdflow.rollout.sampling import Sampling
    from spmdflow.rollout.vllm import VllmGenerator

    device = torch.device(name)
    cfg = RolloutConfig(max_batch_size=max(GENERATION_BATCHES), kv_cache_gib=0.0625)
    generator = VllmGenerator(cfg, str(MODEL), device, Replica.alone())
    seconds = []
    for batch in GENERATION_BATCHES:
        prompts = ragged_from_rows([torch.tensor([1, 3, 4])] * batch)
        seeds = list(range(batch))
        sampling = Sampling(max_new_tokens=NEW_TOKENS)

        def run(p: torch.Tensor = prompts, s: list = seeds, how: Sampling = sampling) -> object:
            return generator.generate(p, how, s)

        seconds.append(best_of(run, device, least=3) / NEW_TOKENS)
    few, many = GENERATION_BATCHES
    each = max((seconds[1] - seconds[0]) / (many - few), 1e-7)
    return {"sequence_step_seconds": each, "step_seconds": max(seconds[0] - few * each, 1e-6)}


def memory_bytes(device: torch.device) -> float:
    """Of one device; on a CPU a process's share of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages / dist.get_world_size()


def host_bandwidth(device: torch.device, copy: float) -> float:
    """Bytes/s from pinned host memory; on a CPU half of a copy's reads and writes."""
    if device.type == "cpu":
        return copy / 2
    source = torch.ones(1 << 28, pin_memory=True)
    target = torch.empty_like(source, device=device)
    return 4 * source.numel() / best_of(lambda: target.copy_(source, non_blocking=True), device)


def file_text(arguments: argparse.Namespace, values: Values) -> str:
    """The YAML file, each value with where it is from."""
    from spmdflow.mapping.hardware import COEFFICIENTS

    when = time.strftime("%Y-%m-%d")
    machine = f"{processor_name()}, {os.cpu_count()} cores, {platform.machine()}"
    if arguments.device == "cuda":
        machine = f"{torch.cuda.get_device_name()}, {machine}"
    measured = f"scripts/calibrate.py, {arguments.processes} processes, {when}"
    lines = [
        f"# Measured on {machine} with torch {torch.__version__}, {when}, load average "
        f"{os.getloadavg()[0]:.0f}:",
        f"# python scripts/calibrate.py {' '.join(sys.argv[1:])}",
        f"name: {arguments.name}",
    ]
    for name in COEFFICIENTS:
        source = SOURCES.get(name, measured)
        if arguments.processes == 1 and name in LINKS:
            source = f"{LINKS_OF[arguments.device]}.yaml: one process has no peer"
        if name in ("step_seconds", "sequence_step_seconds"):
            source = measured + ", vLLM" if arguments.vllm else "estimate: run with --vllm"
        value = {**FIXED, **values}[name]
        lines.append(f'{name}: {{value: {value:.6g}, source: "{source}"}}')
    return "\n".join(lines) + "\n"


FIXED: Values = {
    "usable_memory_fraction": 0.9,
    "memory_efficiency": 1.0,
    "network_efficiency": 1.0,
}
SOURCES = {
    "usable_memory_fraction": "a plan's margin, as vLLM's default gpu_memory_utilization",
    "memory_efficiency": "the bandwidth is measured, not a data sheet's",
    "network_efficiency": "the bandwidth is measured, not a data sheet's",
    "network_bandwidth": "one machine: its processes' links together",
    "network_hop_seconds": "one machine: as link_hop_seconds",
    "gpus_per_node": "processes of this measurement",
}


def hardware_name(name: str | None, device: str) -> str:
    """What the file is called: plans take a name that begins with cpu for processors."""
    name = name or {"cpu": "cpu_here", "cuda": "gpu_here"}[device]
    if device == "cuda" and name.startswith("cpu"):
        raise ValueError(f"got --name {name}, expected none with cpu for GPUs; choose another")
    if device == "cpu" and not name.startswith("cpu"):
        sys.stderr.write(f"calibrate: named cpu_{name}, as files of processors begin with cpu\n")
        return f"cpu_{name}"
    return name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", help="of the hardware; cpu... (cpu_here), or of GPUs (gpu_here)")
    parser.add_argument("--out", type=Path, default=Path("hardware.yaml"), help="file to write")
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="ranks of this machine; 1: links are not measured",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--vllm", action="store_true", help="measure generation with vLLM")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--generation-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        arguments.name = hardware_name(arguments.name, arguments.device)
    except ValueError as err:
        parser.error(str(err))
    if arguments.processes < 1:
        parser.error(f"got --processes {arguments.processes}, expected at least 1; start 2")
    return arguments


def _in_torchrun(processes: int, device: str) -> Values:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", __file__, "--device", device]
        subprocess.run([*command, "--rank-folder", folder], check=True, timeout=600)
        values: Values = json.loads((Path(folder) / "values.json").read_text())
    values["network_bandwidth"] = values["link_bandwidth"] * processes
    values["network_hop_seconds"] = values["link_hop_seconds"]
    values["gpus_per_node"] = float(processes)
    return values


def _host_costs(arguments: argparse.Namespace, values: Values) -> Values:
    """Generation and calls, each in processes of their own."""
    found: Values = {"step_seconds": 2 * values["layer_floor_seconds"]}
    found["sequence_step_seconds"] = 1e-5
    if arguments.vllm:
        command = [sys.executable, __file__, "--generation-of", arguments.device]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
        found |= json.loads(done.stdout.splitlines()[-1])
        config = json.loads((MODEL / "config.json").read_text())
        forward = config["num_hidden_layers"] * values["layer_floor_seconds"]
        found["step_seconds"] = max(found["step_seconds"] - forward, 1e-6)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rpc.json"
        command = [sys.executable, str(ROOT / "scripts/bench.py"), "rpc", "--calls", "200"]
        command += ["--ranks", str(arguments.processes), "--simulated", "4", "--json", str(file)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        rows = json.loads(file.read_text())["rows"]
    found["call_seconds"] = next(r["p50_ms"] for r in rows if r["kind"] == "real") / 1e3
    return found


def _llama(hidden: int, ffn: int, layers: int, *, heads: int) -> torch.nn.Module:
    """Random weights and hardly a vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from spmdflow.cpu.product import use_onednn_products

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=layers,
        vocab_size=32,
    )
    model = LlamaForCausalLM(config)
    use_onednn_products(model)
    return model


def _matrix_rate(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> float:
    from spmdflow.cpu.product import product

    left = torch.ones(m, k, dtype=dtype, device=device)
    right = torch.ones(k, n, dtype=dtype, device=device)
    return 2 * m * k * n / _seconds_of(lambda: product(left, right), device, least=30)


def _seconds_of(call: Callable[[], object], device: torch.device, *, least: int = 9) -> float:
    """The least seconds of a call; where processes share cores, the mean that each of them has."""
    if device.type == "cpu" and dist.get_world_size() > (os.cpu_count() or 1):
        return shared(call, device)
    return best_of(call, device, least=least)


def _ping(word: torch.Tensor, rank: int) -> None:
    """There and back between ranks 0 and 1; the others look on."""
    if rank == 0:
        dist.send(word, 1)
        dist.recv(word, 1)
    elif rank == 1:
        dist.recv(word, 0)
        dist.send(word, 0)


PARTS = (
    memory_rates,
    matrix_rates,
    layer_efficiency,
    layer_floor,
    update_seconds,
    collectives,
    link_efficiency,
)

if __name__ == "__main__":
    main()
