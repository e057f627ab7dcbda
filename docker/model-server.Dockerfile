# The model server. Context: the repository's root.
#
#   docker build -f docker/model-server.Dockerfile -t kvroute/model-server .
#
# TORCH_INDEX_URL chooses torch's build: the default is for processors alone; empty is the package index's own, on x86-64
# for NVIDIA's GPUs (an image of 6 GB, with a C compiler for Triton): `make images CUDA=1`.
# `--target without-torch` ends before torch: it is found at /opt/torch, where one may be mounted.
# Plain Dockerfile syntax: builds with BuildKit and without it; offline from docker/wheelhouse (`make wheelhouse`).
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS packages
ARG PIP_INDEX_URL
WORKDIR /src
COPY docker/install docker/model-server.txt ./
COPY docker/wheelhouse wheelhouse
# What lies beside the packages is searched after them: a mounted torch may bring older copies of theirs.
RUN ./install /opt/venv model-server.txt \
    && find /opt/venv -type d -name tests -prune -exec rm -rf {} + \
    && printf '/opt/kvroute/lib\n/opt/torch\n' > "$(echo /opt/venv/lib/python3*/site-packages)/kvroute.pth"

FROM packages AS kvroute
COPY docker/build.txt ./
RUN ./install /opt/build build.txt
COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY planning planning
COPY tokenization tokenization
COPY indexer indexer
COPY router router
COPY kvroute kvroute
COPY model_server model_server
RUN /opt/build/bin/python -m hatchling build --target wheel \
    && python3 -m pip --no-cache-dir --disable-pip-version-check --python /opt/venv/bin/python \
       install --no-deps --no-index --target /opt/kvroute/lib dist/*.whl

FROM ${BASE_IMAGE} AS without-torch
LABEL org.opencontainers.image.title="kvroute model server" org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 kvroute && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin kvroute
COPY --from=packages /opt/venv /opt/venv
COPY --from=kvroute /opt/kvroute /opt/kvroute
# Attention's kernels are compiled for the processor or GPU that they run on, once for a temporary directory.
ENV PATH=/opt/kvroute/lib/bin:/opt/venv/bin:$PATH NUMBA_CACHE_DIR=/tmp/cache TRITON_CACHE_DIR=/tmp/triton \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/kvroute
# OpenAI's API; KV events and their replay (ZMQ).
EXPOSE 8000 8001 5557 5558
ENTRYPOINT ["kvroute"]
CMD ["model-server", "--help"]

FROM packages AS torch
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY docker/install-torch requirements.lock ./
RUN ./install-torch /opt/venv /opt/torch \
    && find /opt/torch -type d -name tests -prune -exec rm -rf {} +

FROM without-torch AS model-server
COPY --from=torch /opt/torch /opt/torch
COPY docker/install-compiler /opt/
USER root
RUN /opt/install-compiler /opt/torch
USER 10001:10001
