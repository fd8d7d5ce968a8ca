#!/usr/bin/env bash
# Decode: one layer with a preallocated KV cache, validated and timed at batch 1 and 32.
#
#     benchmarks/decode_on_gpu.sh FOLDER [MODEL]
#
# Needs a GPU, TensorRT, ONNX Runtime CUDA and PyTorch. All runtimes are timed at the last token of a full cache.
# Then each runs the decode loop: a prompt and 256 steps; the engine takes the prompt in chunks of 256 tokens. Its build may
# take minutes.
set -euo pipefail
folder=$1
model=${2:-llama-3-8b}
python=${PYTHON:-python3}
bundle=$folder/$model
deploy() { "$python" -m mha_deploy "$@"; }
[ -d "$bundle" ] || deploy export "$model" -o "$bundle" --device cuda --cache preallocated --axis B=1:1:32 --axis S=1:256:3840 \
  --axis T=4096 --golden min --golden decode
# One profile: TensorRT 8.6 cannot prepare a second one. Its optimal batch is not 1: with 1, batches of 2 and more were wrong.
[ -f "$bundle/engines/tensorrt.engine" ] || deploy build-engine "$bundle" --backend tensorrt --profile B=1:8:32,S=1:16:256
# The times first: they must not be lost if a validation fails.
deploy bench "$bundle" --at B=1,S=1,T=4096 --at B=32,S=1,T=4096 --kernels --markdown -o "$folder"
failed=0
for backend in tensorrt ort-cuda-contrib ort-cuda; do
  deploy validate "$bundle" --backend $backend --steps 256 --prompt 3840 --batch 1 --no-sweep --no-latency \
    -o "$folder/$backend-1" || failed=1
done
for backend in tensorrt ort-cuda-contrib; do
  deploy validate "$bundle" --backend $backend --steps 256 --prompt 3840 --batch 32 --no-sweep --no-latency \
    -o "$folder/$backend-32" || failed=1
done
exit $failed
