# CPU:  docker build -t ironlaw . && docker run --rm ironlaw
# CUDA: docker build -t ironlaw:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 . \
#       && docker run --rm --gpus all ironlaw:cuda
# Runs the demo: measure, plan, train, explain, generate, serve. Other verbs: docker run --rm ironlaw ironlaw plan ...
ARG BASE=python:3.12-slim
FROM $BASE

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# A C++ compiler is what torch.compile needs on a CPU.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "$TORCH" --index-url "$TORCH_INDEX"

WORKDIR /ironlaw
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY scripts scripts
RUN pip install --no-cache-dir ".[serve,data]" && rm -rf src build

RUN useradd --create-home trainer && mkdir /runs && chown trainer /runs
USER trainer
WORKDIR /runs
CMD ["sh", "/ironlaw/scripts/demo.sh", "/runs/demo"]
