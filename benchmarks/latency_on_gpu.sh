#!/usr/bin/env bash
# Latency: exports models, builds their engines and times them beside the baselines in one run of `bench`.
#
#     benchmarks/latency_on_gpu.sh FOLDER [MODEL ...]
#
# Needs a GPU, TensorRT, ONNX Runtime CUDA and PyTorch. Engines are built one after the other: another build at the
# same time would disturb the timing of their kernels. FOLDER gets the bundles, bench.json and bench.html;
# the table for benchmarks/RECORD.md is printed.
set -euo pipefail
folder=$1; shift
models=("${@:-bert-base bert-large llama-3-8b gpt3-175b whisper-large-cross falcon-7b sparse-heads-base}")
read -ra models <<< "${models[*]}"
python=${PYTHON:-python3}
bundles=()
for model in "${models[@]}"; do
  bundle=$folder/$model; bundles+=("$bundle")
  [ -d "$bundle" ] || "$python" -m mha_deploy export "$model" -o "$bundle" --device cuda --golden min --golden opt --golden odd
  # TensorRT 8.6 prepares gigabytes of weights for every tactic, on one core, unless the engine is refittable.
  options=(); [ "$model" != gpt3-175b ] || options=(--refit all --profile B=1,S=512)
  [ -f "$bundle/engines/tensorrt.engine" ] || "$python" -m mha_deploy build-engine "$bundle" --backend tensorrt "${options[@]}"
done
"$python" -m mha_deploy bench "${bundles[@]}" --at opt --kernels --markdown -o "$folder"
