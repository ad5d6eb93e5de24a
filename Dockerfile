# flowgrpo_rc in a container, for CPUs or, with DEVICE=cuda, for NVIDIA GPUs. docs/usage.md#in-a-container has the commands.
ARG DEVICE=cpu

FROM debian:bookworm-slim AS cpu
# Here the builds of torch for CPUs are preferred, which are a tenth of the size.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

FROM nvidia/cuda:12.8.1-base-ubuntu24.04 AS cuda

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
