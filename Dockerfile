# One image for training and evaluation on NVIDIA GPUs.
#
#   docker build -t kerple .
#   mkdir -p data runs
#   docker run --rm --gpus all --ipc=host -v "$PWD/data:/workspace/data" -v "$PWD/runs:/workspace/runs" \
#       kerple python train.py configs/quickstart.yml
#
# CUDA 13.0 is what PyPI's torch 2.13.0 is compiled with. "devel", because two things are compiled when
# a run needs them: Triton's launchers (a C compiler and Python's headers), and DeepSpeed's ops (nvcc,
# which must be of the same version as torch's). Ubuntu 24.04 has Python 3.12.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# libibverbs and its providers let NCCL use InfiniBand; without them it falls back to TCP.
# The base tag fixes the Ubuntu release; its archive keeps only the latest patch of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ ibverbs-providers libibverbs1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# Build with --build-arg UID="$(id -u)" to own the files that a run writes into mounted folders.
# The base image's own user holds 1000, the usual one.
ARG UID=1000
RUN if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --non-unique --uid "${UID}" --shell /bin/bash kerple \
    && install -d -o kerple -g kerple /opt/venv /workspace /workspace/data /workspace/runs
USER ${UID}
WORKDIR /workspace

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:${PATH} \
    CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1

# From what changes least to what changes most: torch, the other packages, the source.
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir pip==26.3
RUN pip install --no-cache-dir torch==2.13.0

# --build-arg REQUIREMENTS=requirements-dev.txt adds the tests' packages and Hugging Face's.
ARG REQUIREMENTS=requirements.txt
COPY --chown=kerple:kerple requirements.txt requirements-optional.txt requirements-hub.txt requirements-docs.txt requirements-dev.txt ./
RUN pip install --no-cache-dir -r "${REQUIREMENTS}"

COPY --chown=kerple:kerple . .
RUN pip install --no-cache-dir --no-deps -e .

CMD ["python", "train.py", "--help"]
