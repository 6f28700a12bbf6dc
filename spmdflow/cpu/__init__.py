"""What makes small models fast on a CPU. A run on GPUs computes the same without it.

Runs on a CPU are how this project is learned and tested: a model of a few million parameters on the
cores of one node. There, other things cost time than on a GPU: matrix products by MKL on a CPU that
is not Intel's, masked entries of attention, the Python code around each small operation, and pages
that the allocator returns to the system.

| file | what | on a GPU |
|---|---|---|
| product | float32 matrix products and linear layers by oneDNN | PyTorch's own product |
| attention | attention in blocks of queries, each with the keys that it sees | one kernel |
| llama | the built-in generator's forward for Llama, Mistral, Qwen2 and Qwen3 | vLLM generates |
| shared_prompts | decode attention over prompts that several rows share | vLLM's prefix cache |
| parked | cache rows that wait for the next turn of their conversation | vLLM's prefix cache |
| memory | keeps freed memory in the process | the CUDA allocator does |

`rollout.engine=builtin` also works on a GPU. The generator of `rollout.builtin` then runs the files
`llama`, `shared_prompts` and `parked` there.
"""
