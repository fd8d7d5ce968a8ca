# mha-deploy for a machine without a GPU: exports, builds TensorRT-RTX engines, validates with ONNX Runtime.
#
#   docker build -f docker/cpu.Dockerfile -t mha-deploy:cpu .
#   docker run --rm -v "$PWD:/models" mha-deploy:cpu deploy bert-base
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist /source

FROM python:${PYTHON}-slim
COPY --from=wheel /dist /dist
# PyTorch without CUDA is a tenth of the size.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        "$(echo /dist/*.whl)[cpu]" \
    && rm -r /dist \
    && useradd --create-home user
USER user
WORKDIR /models
ENTRYPOINT ["mha-deploy"]
CMD ["--help"]
