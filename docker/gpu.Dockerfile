# mha-deploy on NVIDIA's PyTorch image, which has PyTorch, CUDA and TensorRT: everything, on a GPU.
#
#   docker build -f docker/gpu.Dockerfile -t mha-deploy:gpu .
#   docker run --rm --gpus all -v "$PWD:/models" mha-deploy:gpu deploy bert-base
ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${BASE}
COPY . /source
# The image's PyTorch and TensorRT stay: the extras that would replace them are not installed.
RUN pip install --no-cache-dir onnxscript \
        "$(pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /dist /source && echo /dist/*.whl)[cuda,plot,ort,serving]" \
    && rm -r /dist /source
WORKDIR /models
ENTRYPOINT ["mha-deploy"]
CMD ["--help"]
