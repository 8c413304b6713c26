# syntax=docker/dockerfile:1
# Images of draco. One file, several targets:
#   docker build -t draco .                            CUDA, with the kernels of hybrid models (the default target)
#   docker build -t draco-cpu --target cpu .           CPU only: the embedded environment, tests, planning. About 2 GB with
#                                                      --build-arg CPU_INDEX=URL of PyTorch's CPU builds ("Get started" on
#                                                      its site shows it); without, pip's default build, which is larger
#   docker build -t draco-appworld --target appworld . CUDA and AppWorld's environment (mount its data at /work/.appworld)
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" draco train env=desk steps=40
# Keys (of a judge's provider, of Weights & Biases) go in at run time with `-e NAME`; none belongs in an image.
# The lines between `# install:` marks are what .ci/docker_install runs in a clean virtual environment.
ARG CUDA=13.0.1
ARG TORCH=2.13.0
ARG CPU_INDEX=

# --- CPU ----------------------------------------------------------------------------------------------------------------
FROM python:3.11.14-slim-trixie AS cpu-build
ARG TORCH
ARG CPU_INDEX
ENV PATH=/opt/draco/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# PyTorch in a layer of its own: it is most of the image and changes least. (The lint takes the index for a package.)
# hadolint ignore=DL3013
RUN python3 -m venv /opt/draco \
    && pip install "torch==${TORCH}" ${CPU_INDEX:+--index-url "${CPU_INDEX}"}
COPY pyproject.toml README.md LICENSE /opt/src/
COPY draco /opt/src/draco
COPY callbacks /opt/src/callbacks
COPY conf /opt/src/conf
# install: cpu
RUN pip install '/opt/src[gguf]'
# install: end

FROM python:3.11.14-slim-trixie AS cpu
RUN useradd --create-home --uid 10001 draco \
    && install -d -o draco -g draco /work /work/runs
COPY --from=cpu-build --chown=draco:draco /opt/draco /opt/draco
ENV PATH=/opt/draco/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/work/models WANDB_MODE=offline
USER 10001
WORKDIR /work
HEALTHCHECK --interval=60s --timeout=10s --start-period=30s --retries=3 CMD ["python", "-m", "draco.run.healthcheck"]
ENTRYPOINT ["draco"]
CMD ["train"]

# --- CUDA ---------------------------------------------------------------------------------------------------------------
# The PyTorch wheels bring their own CUDA libraries; only the kernels below are compiled, against the toolkit here.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
ARG TORCH
# Ubuntu removes old versions from its archive, so a pinned one would stop to build.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/draco/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 MAX_JOBS=4 \
    TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
RUN python3 -m venv /opt/draco \
    && pip install "torch==${TORCH}" 'setuptools>=80,<82' 'wheel>=0.45,<1' 'packaging>=25,<27' 'ninja>=1.13,<2' \
        'numpy>=2,<3' 'einops>=0.8,<1'
COPY pyproject.toml README.md LICENSE /opt/src/
COPY draco /opt/src/draco
COPY callbacks /opt/src/callbacks
COPY conf /opt/src/conf
# causal-conv1d and flash-attn build against the torch that is there, hence no isolation.
RUN pip install 'hatchling>=1.27,<2' \
    && pip install --no-build-isolation '/opt/src[gguf,gpu]'

FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04 AS cuda-base
# Triton compiles a launcher at run time: it needs a C compiler and the Python headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 draco \
    && install -d -o draco -g draco /work /work/runs
COPY --from=build --chown=draco:draco /opt/draco /opt/draco
ENV VIRTUAL_ENV=/opt/draco PATH=/opt/draco/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/work/models WANDB_MODE=offline
USER 10001
WORKDIR /work
HEALTHCHECK --interval=60s --timeout=10s --start-period=60s --retries=3 CMD ["python", "-m", "draco.run.healthcheck"]
ENTRYPOINT ["draco"]
CMD ["train"]

# --- optional: AppWorld beside it, in an environment of its own (its pins cannot live with the trainer's) ---------------
FROM cuda-base AS appworld
USER 0
COPY scripts /opt/src/scripts
COPY draco/env /opt/src/draco/env
RUN /opt/src/scripts/setup_appworld.sh --venv /opt/appworld --python /usr/bin/python3 \
    && chown -R draco:draco /opt/appworld
USER 10001

# --- the default target -------------------------------------------------------------------------------------------------
FROM cuda-base AS cuda
