"""The built-in generator: a Hugging Face model with a KV cache, whole on every rank."""

from spmdflow.kind.generator import GeneratorKind, register_generator

register_generator(GeneratorKind("builtin", "Hugging Face model with KV cache"))(
    "spmdflow.rollout.builtin:BuiltinGenerator"
)
