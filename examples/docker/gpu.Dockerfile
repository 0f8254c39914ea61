# async_opd on NVIDIA GPUs: docker build -f examples/docker/gpu.Dockerfile -t async-opd:gpu .
# Then: docker run --rm --gpus all --shm-size=16g -v "$PWD":/runs async-opd:gpu run my-run.yaml
# The folder has to be writable by user 1000. Mount a folder at /home/opd/.cache/huggingface too, or
# each container downloads its models again. The driver of the host is used; CUDA's libraries come
# with PyTorch's wheels.
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
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
RUN uv pip install --system --no-cache "/source[gpu,all]" && rm -rf /source
USER 1000
WORKDIR /runs
ENTRYPOINT ["async_opd"]
