# syntax=docker/dockerfile:1
# gpupipe on an NVIDIA GPU. From the repository's root:
#
#   docker build -f docker/gpu.Dockerfile -t gpupipe:gpu .
#   docker build -f docker/gpu.Dockerfile -t gpupipe:gpu-test --target test .
#
# CUDA comes with the wheels of torch and DALI, and the driver from the host (NVIDIA Container Toolkit), so the base is
# no CUDA image. TORCH_INDEX_URL names an index with builds of torch for another CUDA than PyPI's.
ARG BASE_IMAGE=debian:bookworm-20250520-slim

FROM ${BASE_IMAGE} AS python
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends -y ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

FROM python AS tools
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends -y python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build

FROM python AS requirements
WORKDIR /build
COPY docker/requirements.py pyproject.toml ./
RUN python3 requirements.py pyproject.toml fast lmdb measure > runtime.txt \
 && python3 requirements.py pyproject.toml test > test.txt

# The libraries, in a stage that sees nothing but what is asked for: cached while only code changes.
FROM tools AS libraries
COPY --from=requirements /build/runtime.txt ./
ARG TORCH_INDEX_URL=
# A pip.conf for a mirror goes in as a secret and stays out of the image: --secret id=pip_conf,src=pip.conf
# hadolint ignore=DL3013,DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    export PIP_CONFIG_FILE=/run/secrets/pip.conf \
 && python3 -m venv /opt/venv \
 && pip install --upgrade pip \
 && if [ -n "$TORCH_INDEX_URL" ]; then pip install --index-url "$TORCH_INDEX_URL" torch torchvision; fi \
 && pip install -r runtime.txt

FROM tools AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY gpupipe gpupipe
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    export PIP_CONFIG_FILE=/run/secrets/pip.conf \
 && python3 -m venv /opt/venv \
 && pip wheel --no-deps --wheel-dir /dist .

FROM python AS runtime
# Without "video" the JPEG engines of the GPU stay out of reach.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
# The home takes numba's kernels, compiled at the first start, and indexes of data that is mounted read-only.
RUN useradd --create-home --uid 1000 gpupipe
COPY --from=libraries /opt/venv /opt/venv
# Copied, not mounted: buildah does not look into mounts when it decides whether a cached layer still holds.
COPY --from=wheel /dist /opt/dist
RUN pip install --no-cache-dir --no-deps --no-index /opt/dist/*.whl
USER 1000:1000
WORKDIR /home/gpupipe
# All pixels are compared on generated images, which takes about 20 s of a core or two: hence the long interval.
HEALTHCHECK --interval=1h --timeout=5m --start-period=5m --retries=1 CMD ["gpupipe", "selfcheck", "--gpu"]
ENTRYPOINT ["gpupipe"]
CMD ["--help"]

# The suite, the tests that need a GPU included: without one they fail, they are not skipped. It runs when the image
# does, since a build sees no GPU.
FROM runtime AS test
USER 0:0
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    --mount=type=bind,from=requirements,source=/build,target=/build \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -r /build/test.txt
COPY --chown=1000:1000 . /src
WORKDIR /src
USER 1000:1000
ENV GPUPIPE_REQUIRE_GPU=1
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "pytest", "-p", "no:cacheprovider"]
CMD ["-n", "auto"]

# What a build without --target makes.
FROM runtime AS final
