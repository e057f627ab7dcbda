# The router, the indexer and the tokenizer; no torch. Context: the repository's root.
#
#   docker build -f docker/router.Dockerfile -t kvroute/router .
#
# Plain Dockerfile syntax: builds with BuildKit and without it; offline from docker/wheelhouse (`make wheelhouse`).
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS packages
ARG PIP_INDEX_URL
WORKDIR /src
COPY docker/install docker/router.txt ./
COPY docker/wheelhouse wheelhouse
# xds-protos brings an old copy of opentelemetry-proto's files: whichever is installed last wins.
# Removed is what no router reads: Kubernetes' asyncio client, compiled models of its objects, tokenizers of Mistral's own
# models (each model directory has its own), names of countries in other languages.
# kvroute itself lies beside its packages, so that their layer stays as it is when only kvroute changes.
RUN ./install /opt/venv router.txt \
    && sed -n '/^opentelemetry-proto==/,/[^\\]$/p' router.txt > last.txt \
    && ./install /opt/venv last.txt --force-reinstall \
    && find /opt/venv -type d -name tests -prune -exec rm -rf {} + \
    && cd /opt/venv/lib/python3*/site-packages && rm -rf kubernetes/aio kubernetes/client/*/__pycache__ \
       mistral_common/data pycountry/locales && cd - \
    && echo /opt/kvroute/lib > "$(echo /opt/venv/lib/python3*/site-packages)/kvroute.pth"

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
# For any processor of this architecture: the kernels gain nothing from newer instructions, and numba takes kernels
# compiled for another processor for none at all. Making a router compiles all that it will need.
ENV NUMBA_CACHE_DIR=/opt/kvroute NUMBA_CPU_NAME=generic
RUN printf 'endpoints: []\n' > pods.yaml \
    && /opt/venv/bin/python -I -c "from router.app.config import parse_flags; from router.app.server import RouterServer; \
       RouterServer(parse_flags(['--pods-file', 'pods.yaml'])[0]).close()" \
    && chmod -R a+rX /opt/kvroute

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="kvroute router" org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 kvroute && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin kvroute
COPY --from=packages /opt/venv /opt/venv
COPY --from=kvroute /opt/kvroute /opt/kvroute
ENV PATH=/opt/kvroute/lib/bin:/opt/venv/bin:$PATH \
    NUMBA_CACHE_DIR=/opt/kvroute NUMBA_CPU_NAME=generic \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/kvroute
# gRPC, gRPC health, metrics and debug pages.
EXPOSE 9002 9003 9090
ENTRYPOINT ["kvroute"]
CMD ["router", "--help"]
