# async_opd on CPUs: docker build -f examples/docker/cpu.Dockerfile -t async-opd:cpu .
# Then: docker run --rm --shm-size=2g async-opd:cpu quickstart
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home opd && pip install --no-cache-dir uv
COPY pyproject.toml LICENSE /source/
COPY docs/package.md /source/docs/
COPY async_opd /source/async_opd
COPY rollouter /source/rollouter
COPY teachers /source/teachers
COPY trainer /source/trainer
COPY examples/quickstart.yaml /source/examples/
COPY examples/quickstart /source/examples/quickstart
# vLLM for CPUs needs PyTorch's CPU builds
RUN uv pip install --system --no-cache --torch-backend=cpu "/source[cpu,all]" && rm -rf /source
USER 1000
WORKDIR /home/opd
ENTRYPOINT ["async_opd"]
