# manylora: the API process, which starts and watches the engine process beside it.
#
#   docker build -t manylora .                                  CPU
#   docker build -t manylora:gpu --build-arg TORCH_INDEX_URL= --build-arg EXTRAS=[cuda] .
#
# TORCH_INDEX_URL is where PyTorch comes from; empty means PyPI, whose Linux build brings CUDA.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CACHE_DIR=/var/cache/pip
WORKDIR /src
RUN python -m venv /opt/manylora
COPY . .
RUN /opt/manylora/bin/python web/fetch_static.py
RUN --mount=type=cache,target=/var/cache/pip \
    /opt/manylora/bin/pip install --constraint constraints.txt \
    ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} ".${EXTRAS}"

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --no-create-home --home-dir /var/lib/manylora manylora \
    && install -d -o manylora -g manylora -m 0700 /var/lib/manylora /var/cache/manylora
COPY --from=build /opt/manylora /opt/manylora
ENV PATH=/opt/manylora/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MANYLORA_HOST=0.0.0.0 \
    MANYLORA_PORT=8000 \
    MANYLORA_DATA_DIR=/var/lib/manylora \
    MANYLORA_CACHE=/var/cache/manylora
USER manylora
WORKDIR /var/lib/manylora
VOLUME ["/var/lib/manylora", "/var/cache/manylora"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['MANYLORA_PORT'] + '/ready', timeout=4)"]
CMD ["manylora", "serve"]
