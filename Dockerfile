# agentrl in a container, for a CPU:
#
#     make wheel
#     docker build -t agentrl .
#     docker run --rm -v "$PWD/runs:/app/runs" --shm-size 2g agentrl demo
#
# For GPUs, with vLLM: docker build --build-arg TORCH_INDEX= --build-arg EXTRAS=[gpu,ray] -t agentrl-gpu .
ARG BASE=python:3.11-slim
FROM ${BASE}

# Where the build of torch is taken from; empty: pip's own index, with torch for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of the wheel, such as [ray,lora].
ARG EXTRAS=
# Further options of pip, such as --no-index --no-deps.
ARG PIP_OPTIONS=

COPY dist/*.whl /tmp/wheel/
RUN if [ -n "$TORCH_INDEX" ]; then \
        python3 -m pip install --no-cache-dir --index-url "$TORCH_INDEX" torch; \
    fi && \
    python3 -m pip install --no-cache-dir $PIP_OPTIONS "$(echo /tmp/wheel/*.whl)$EXTRAS" && \
    rm -r /tmp/wheel

# Runs and caches are the user's: nothing is written elsewhere.
WORKDIR /app
ENV HOME=/app
ENTRYPOINT ["agentrl"]
CMD ["--help"]
