"""Three ranks, an FSDP engine on ranks 1 and 2, a vLLM engine on each of the two.

Usage: torchrun --nproc-per-node 3 rollout_vllm.py FOLDER
The checks of rollout_sync.py, then what is vLLM's own. SPMDFLOW_DATA adds a real model.
"""

from __future__ import annotations

import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from engine_state import full_tensors
from rollout_sync import (
    CPU,
    GREEDY,
    SAMPLED,
    VOCABULARY,
    World,
    check_faults,
    check_updates,
    check_versions,
    from_folder,
    main,
    message,
    sync_of,
    update,
    weights_of,
)

from spmdflow.config.schema import RolloutConfig
from spmdflow.data.ragged import ragged_from_rows, rows_of
from spmdflow.errors import WeightSyncError
from spmdflow.rollout.forward import end_tokens
from spmdflow.rollout.generator import Request, generator_of
from spmdflow.rollout.sampling import Sampling
from spmdflow.rollout.vllm_process import replace_attribute
from spmdflow.weights.move import Storages
from tests.rollout_reference import (
    END,
    disagreements,
    ended_at,
    load,
    make_prompts,
    num_close,
    reference,
    write_numbers_tokenizer,
)

STOP = ["7>", "<1"]
SAMPLINGS = (
    GREEDY,
    SAMPLED,
    Sampling(16, top_k=5),
    Sampling(16, temperature=1.3, top_p=0.8),
    Sampling(16, temperature=0.7, top_k=20, top_p=0.9, greedy=True),
)


def process_state() -> dict[str, Any]:
    """What an engine must leave as it was."""
    return {
        "python": hash(random.getstate()),
        "numpy": int(np.random.get_state()[1].sum()),  # type: ignore[index,union-attr]
        "torch": int(torch.get_rng_state().sum()),
        "threads": (torch.get_num_threads(), id(torch.set_num_threads)),
        "event": id(torch.cuda.Event),
        "pin_memory": id(torch.Tensor.pin_memory),
        "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")},
    }


def tokens_of(answer: Any) -> list[list[int]]:
    """The responses as lists."""
    return [row.tolist() for row in rows_of(answer["responses"])]


def check_process(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What differs after an engine was built and used."""
    return {"process": [name for name in before if before[name] != after[name]]}


def check_equality(world: World, generator: Any) -> dict[str, Any]:
    """vLLM, the built-in generator and transformers, for each kind of sampling."""
    builtin = world.generator("untied")
    model = load(world.folder / "untied")
    prompts = world.prompts()
    faults = []
    close = 0
    same = 0
    for sampling in SAMPLINGS:
        expected = reference(model, prompts, sampling, world.seeds, (END,))
        answers = [g.generate(prompts, sampling, world.seeds) for g in (generator, builtin)]
        faults += [
            fault for answer in answers for fault in disagreements(answer, expected, tolerance=1e-5)
        ]
        close += num_close(expected)
        same += tokens_of(answers[0]) == tokens_of(answers[1])
    hashes = generator.hashes() == builtin.hashes()
    return {"equality": {"faults": faults, "close": close, "same": same, "hashes": hashes}}


def check_stop_strings(world: World, generator: Any) -> dict[str, Any]:
    """Responses of both generators, cut where their text has a stop string."""
    tokenizer = write_numbers_tokenizer(world.folder / f"numbers-{world.rank}", VOCABULARY)
    free = tokens_of(generator.generate(world.prompts(), SAMPLED, world.seeds))
    expected = ended_at(free, STOP)
    asked = replace(SAMPLED, tokenizer_path=tokenizer).for_call(stop=STOP)
    found = [
        tokens_of(g.generate(world.prompts(), asked, world.seeds))
        for g in (generator, world.generator("untied"))
    ]
    again = tokens_of(generator.generate(world.prompts(), SAMPLED, world.seeds))
    cut = sum(len(one) < len(other) for one, other in zip(expected, free, strict=True))
    same = [tokens == expected for tokens in found] + [again == free]
    return {"stop": {"same": same, "cut": cut}}


def check_composition(world: World, generator: Any) -> dict[str, Any]:
    """Responses in another order, alone, and of no rows."""
    prompts = rows_of(world.prompts())
    seeds = world.seeds
    whole = tokens_of(generator.generate(world.prompts(), SAMPLED, seeds))
    order = list(reversed(range(len(prompts))))
    reverse = generator.generate(
        ragged_from_rows([prompts[i] for i in order]), SAMPLED, [seeds[i] for i in order]
    )
    alone = generator.generate(ragged_from_rows(prompts[3:4]), SAMPLED, seeds[3:4])
    nothing = generator.generate(ragged_from_rows([], dtype=torch.int64), SAMPLED, [])
    return {
        "composition": {
            "reversed": tokens_of(reverse) == [whole[i] for i in order],
            "alone": tokens_of(alone) == whole[3:4],
            "nothing": list(nothing.batch_size),
            "distinct": len({tuple(row) for row in whole}),
        }
    }


def check_refused_request(world: World, generator: Any) -> dict[str, Any]:
    """Requests that are refused, by vLLM too, and whether the next ones are drawn as ever."""
    before = tokens_of(generator.generate(world.prompts(), SAMPLED, world.seeds))
    empty, other = (Request(torch.zeros(n, dtype=torch.int64), 0, SAMPLED) for n in (0, 1))
    said = [message(lambda g=g: g.add(empty)) for g in (generator, world.generator("untied"))]

    def refuse(*_: Any, **__: Any) -> None:
        raise WeightSyncError("as vLLM might")

    with replace_attribute(generator._llm.llm_engine, "add_request", refuse):
        said.append(message(lambda: generator.add(other)))
    left = len(generator._sampler.requests) + len(generator.step())
    after = tokens_of(generator.generate(world.prompts(), SAMPLED, world.seeds))
    return {"refused request": {"said": said, "left": left, "same": before == after}}


def check_prefix_cache(world: World, generator: Any) -> dict[str, Any]:
    """Prompts of several cache blocks, before and after an update."""
    engine = world.engine("untied")
    hybrid = sync_of(world, engine, generator, verify_every=1)
    hybrid.sync()
    prompts = ragged_from_rows([torch.randint(3, VOCABULARY, (280,)) for _ in range(4)])
    hybrid.generate(prompts, GREEDY, world.seeds[:4])
    update(engine, 7)
    hybrid.sync()
    found = hybrid.generate(prompts, GREEDY, world.seeds[:4])
    fresh = load(world.folder / "untied")
    fresh.load_state_dict(dict(full_tensors(engine)))
    expected = reference(fresh, prompts, GREEDY, world.seeds[:4], (END,))
    return {"prefix cache": disagreements(found, expected, tolerance=1e-5)}


def check_sleep(world: World, generator: Any) -> dict[str, Any]:
    """KV cache bytes awake and asleep, and responses before and after."""
    before = tokens_of(generator.generate(world.prompts(), SAMPLED, world.seeds))
    cache = Storages(generator._runner.kv_caches)
    sizes = [cache.num_bytes]
    generator.sleep()
    generator.sleep()
    sizes.append(cache.num_bytes)
    after = tokens_of(generator.generate(world.prompts(), SAMPLED, world.seeds))
    return {"sleep": {"bytes": sizes, "same": before == after}}


def check_own_sampler(world: World) -> dict[str, Any]:
    """vLLM's own sampler: the same twice, other tokens than ours, the policy's log-probs."""
    generator = world.generator("untied", engine="vllm_sampler")
    how = replace(SAMPLED, top_k=20).for_call(temperature=0.7)
    first, again = (generator.generate(world.prompts(), how, world.seeds) for _ in range(2))
    generator.close()
    model = load(world.folder / "untied")
    gaps = []
    columns = (rows_of(first[name]) for name in ("responses", "rollout_log_probs"))
    for prompt, response, log_probs in zip(rows_of(world.prompts()), *columns, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        scaled = logits[len(prompt) - 1 : -1] / SAMPLED.temperature
        expected = scaled.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        gaps.append(float((expected - log_probs).abs().max()))
    same = tokens_of(first) == tokens_of(again)
    distinct = len({*map(tuple, tokens_of(first))})
    return {"own sampler": {"same": same, "distinct": distinct, "gap": max(gaps)}}


def check_padding(world: World, generator: Any) -> dict[str, Any]:
    """Rows that pad the vocabulary are not part of what is compared."""
    embedding = generator.model.model.embed_tokens.weight
    before = generator.hashes()
    with torch.no_grad():
        embedding[VOCABULARY:] += 1
    return {"padding": {"rows": len(embedding), "same": generator.hashes() == before}}


def check_second(world: World) -> dict[str, Any]:
    """A second engine beside the first."""
    return {"second": message(lambda: world.generator("untied", engine="vllm"))}


def check_small_cache(world: World) -> dict[str, Any]:
    """A cache for 10 blocks, 12 rows that grow into their second: vLLM preempts and resumes."""
    draw = torch.Generator().manual_seed(world.rank)
    prompts = ragged_from_rows(
        [torch.randint(3, VOCABULARY, (110,), generator=draw) for _ in range(12)]
    )
    long = Sampling(60, temperature=1.2)
    seeds = world.seeds[:12]
    block_bytes = 2 * 2 * 128 * 32 * 4  # k and v, layers, tokens, head_dim, bytes
    tight = world.generator("untied", engine="vllm", kv_cache_gib=10 * block_bytes / (1 << 30))
    tight._end_tokens = ()
    answer = tight.generate(prompts, long, seeds)
    tight.close()
    expected = reference(load(world.folder / "untied"), prompts, long, seeds, ())
    faults = disagreements(answer, expected, tolerance=1e-5)
    lengths = [len(row) for row in tokens_of(answer)]
    return {"small cache": {"faults": faults, "close": num_close(expected), "lengths": lengths}}


def check_refusals(world: World) -> dict[str, Any]:
    """Sizes and models that vLLM does not take."""
    return {
        "no room": message(
            lambda: world.generator("untied", engine="vllm", kv_cache_gib=4096 / (1 << 30))
        ),
        "narrow": message(lambda: world.generator("narrow", engine="vllm")),
    }


def check_first_sync(world: World) -> dict[str, Any]:
    """Before it all weights are zeros; it reaches every element but padding."""
    generator: Any = generator_of(RolloutConfig(engine="vllm"), str(world.folder / "tied"), CPU)
    parameters = dict(generator.model.named_parameters())
    zeros = all(not parameter.any() for parameter in parameters.values())
    for _, view, _ in generator.blocks():
        view.fill_(math.nan)
    left = {name: int((~parameter.isnan()).sum()) for name, parameter in parameters.items()}
    generator.close()
    return {"first sync": {"zeros": zeros, "left": {n: size for n, size in left.items() if size}}}


def check_real_model(world: World) -> dict[str, Any]:
    """stories260K-hd64, 64 sampled tokens, against transformers."""
    if "SPMDFLOW_DATA" not in os.environ:
        return {}
    path = str(Path(os.environ["SPMDFLOW_DATA"]) / "models" / "stories260K-hd64")
    prompts = make_prompts(4, vocab_size=512, seed=world.rank)
    sampling = Sampling(64)
    generator = from_folder(RolloutConfig(engine="vllm"), path)
    found = generator.generate(prompts, sampling, world.seeds[:4])
    generator.close()
    expected = reference(load(path), prompts, sampling, world.seeds[:4], end_tokens(path))
    return {"real model": disagreements(found, expected, tolerance=5e-5)}


def vllm_checks(world: World) -> dict[str, Any]:
    """Every check, with one engine for most of them."""
    before = process_state()
    generator: Any = world.generator("untied", engine="vllm")
    found = check_process(before, process_state())
    found |= check_equality(world, generator) | check_composition(world, generator)
    found |= check_stop_strings(world, generator) | check_refused_request(world, generator)
    found |= check_versions(world, generator) | check_updates(world, generator)
    found |= check_faults(world, generator) | check_prefix_cache(world, generator)
    found |= check_sleep(world, generator) | check_second(world) | check_padding(world, generator)
    found["names"] = sorted(weights_of(generator))
    generator.close()
    tied: Any = world.generator("tied", engine="vllm")
    found |= check_updates(world, tied, model="tied")
    tied.close()
    found |= check_first_sync(world) | check_own_sampler(world)
    return found | check_small_cache(world) | check_refusals(world) | check_real_model(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), vllm_checks)
