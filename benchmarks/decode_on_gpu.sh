#!/usr/bin/env bash
# The decode record: one layer with a static cache, stepped through and timed, batch 1 and 32.
#
#     benchmarks/decode_on_gpu.sh FOLDER [MODEL]
#
# Needs a GPU, TensorRT, ONNX Runtime CUDA and PyTorch. Every runtime is led through a prompt of 3840 tokens and 256 single
# ones; the engine takes the prompt in pieces of 256 tokens. Then everyone is timed at the last token of a full cache.
set -euo pipefail
folder=$1
model=${2:-llama-3-8b}
python=${PYTHON:-python3}
bundle=$folder/$model
deploy() { "$python" -m mha_deploy "$@"; }
[ -d "$bundle" ] || deploy export "$model" -o "$bundle" --device cuda --cache static --axis B=1:1:32 --axis S=1:256:3840 \
  --axis T=4096 --golden min --golden decode
[ -f "$bundle/engines/tensorrt.engine" ] || deploy build-engine "$bundle" --backend tensorrt \
  --profile B=1:1:32,S=1:256:256 --profile B=1,S=1 --profile B=32,S=1
runtimes=(--backend tensorrt --backend ort-cuda-contrib --backend ort-cuda)
for rows in 1 32; do
  deploy validate "$bundle" "${runtimes[@]}" --steps 256 --prompt 3840 --rows "$rows" --no-sweep --no-latency \
    -o "$folder/steps-$rows"
done
deploy bench "$bundle" --at B=1,S=1,T=4096 --at B=32,S=1,T=4096 --kernels --markdown -o "$folder"
