# The server on an NVIDIA GPU: docs/server.md says how to run it. Its weights lie in the volume /models.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# gcc and Python's headers: Triton compiles a launcher for each kernel. Versions are the
# distribution's, which replaces them by patched ones.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/specdec \
    && useradd --create-home --uid 1001 specdec \
    && install -d -o specdec -g specdec /models
ENV PATH=/opt/specdec/bin:$PATH
RUN --mount=type=bind,target=/src,rw \
    pip install --no-cache-dir -c /src/constraints-cuda.txt "specdec[server] @ file:///src"

USER 1001:1001
WORKDIR /models
ENV HF_HOME=/models/hub TRITON_CACHE_DIR=/models/triton SPECDEC_CACHE_DIR=/models/specdec
VOLUME /models
EXPOSE 8000
# a first start downloads weights and compiles kernels
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["specdec", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["demo", "--draft", "demo"]
