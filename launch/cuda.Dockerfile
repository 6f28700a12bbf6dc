# spmdflow for NVIDIA GPUs: torch's build for CUDA 13, vLLM, Megatron-Core. Needs driver 580 or newer and the NVIDIA
# container toolkit on the host; the CUDA libraries are in the packages. Never run on a GPU.
# Build in the root of the repository:  docker build -f launch/cuda.Dockerfile -t spmdflow:cuda .
# Start:  docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" spmdflow:cuda torchrun --nproc-per-node 8 -m spmdflow.run algos/ppo.py
FROM debian:bookworm-slim
ENV PIP_NO_CACHE_DIR=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# g++ and python3-dev: Triton compiles the launchers of its kernels at run time. ibverbs: NCCL over InfiniBand, which
# otherwise uses sockets without a word
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ ibverbs-providers libibverbs1 libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/spmdflow
COPY . .
RUN scripts/setup.sh --cuda
ENV PATH=/opt/spmdflow/.venv/bin:$PATH
WORKDIR /work
CMD ["spmdflow"]
