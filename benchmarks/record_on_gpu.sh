#!/usr/bin/env bash
# Lines for benchmarks/results: two layers in three processes each, with the samples of every runtime.
#
#     benchmarks/record_on_gpu.sh FOLDER [RESULTS]
#
# Needs a GPU, TensorRT, ONNX Runtime CUDA and PyTorch; takes about four minutes on an H200. Then run benchmarks/tables.py.
set -euo pipefail
folder=$1
results=${2:-benchmarks/results/h200.jsonl}
python=${PYTHON:-python3}
deploy() { "$python" -m mha_deploy "$@"; }
backends=(--backend sdpa-cudnn --backend ort-cuda --backend tensorrt)
for model in bert-base bert-large; do
  [ -d "$folder/$model" ] || deploy export "$model" --precision fp16 -o "$folder/$model" --device cuda --golden min --golden opt
  [ -f "$folder/$model/engines/tensorrt.engine" ] || deploy build-engine "$folder/$model" --backend tensorrt
done
if deploy plugins where > /dev/null 2>&1; then
  backends+=(--backend plugin32)
  for model in bert-base bert-large; do
    [ -f "$folder/$model/engines/plugin32.engine" ] || deploy build-engine "$folder/$model" --backend tensorrt --name plugin32 \
      --attention plugin --accumulate fp32
  done
fi
deploy bench "$folder/bert-base" "$folder/bert-large" --at opt "${backends[@]}" -o "$folder" --record "$results" --processes 3
