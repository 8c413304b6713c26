# A GPU image of draco. The PyTorch wheels bring their own CUDA libraries; the base adds the driver's compatibility layer.
#   docker build -t draco .
#   docker run --rm --gpus all -v "$PWD/runs:/work/runs" draco env=desk steps=40
# Keys (of a judge's provider, of Weights & Biases) go in at run time with `-e NAME`; none belongs in an image.
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${BASE}

# Triton compiles a launcher at run time: it needs a C compiler and the Python headers.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 draco \
    && install -d -o draco -g draco /opt/draco /work /work/runs
USER draco

ENV VIRTUAL_ENV=/opt/draco \
    PATH=/opt/draco/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/work/models \
    WANDB_MODE=offline

# PyTorch in a layer of its own: it is most of the image and changes least.
RUN python3 -m venv /opt/draco \
    && pip install --no-cache-dir 'torch~=2.13.0'

COPY --chown=draco:draco pyproject.toml README.md LICENSE /opt/src/
COPY --chown=draco:draco draco /opt/src/draco
COPY --chown=draco:draco callbacks /opt/src/callbacks
COPY --chown=draco:draco conf /opt/src/conf
RUN pip install --no-cache-dir '/opt/src[gguf]'

WORKDIR /work
ENTRYPOINT ["draco-train"]
