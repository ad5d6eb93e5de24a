# flowgrpo_rc in a container, for CPUs or, with DEVICE=cuda, for NVIDIA GPUs. docs/usage.md#in-a-container has the commands.
ARG DEVICE=cpu

FROM debian:bookworm-slim AS cpu
# Here the builds of torch for CPUs are preferred, which are a tenth of the size.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

# As new as the CUDA of torch's builds on PyPI, so that a driver which is too old fails here, and not silently.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS cuda
# Triton compiles in C: rollout.compile, adamw_8bit.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

FROM ${DEVICE}
# rapidocr's OpenCV needs libGL and GLib.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv libgl1 libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/flowgrpo_rc
ENV PATH=/opt/flowgrpo_rc/bin:$PATH PIP_NO_CACHE_DIR=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY flowgrpo_rc flowgrpo_rc
ARG EXTRAS=parquet,remote,serve,tensorboard
RUN pip install ".[${EXTRAS}]"

WORKDIR /work
RUN flowgrpo-rc doctor
ENTRYPOINT ["flowgrpo-rc"]
CMD ["--help"]
