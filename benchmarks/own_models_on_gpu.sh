#!/usr/bin/env bash
# Whole models: Hugging Face models from a config, exported, built, judged and timed beside PyTorch.
#
#     benchmarks/own_models_on_gpu.sh FOLDER
#
# Needs a GPU, TensorRT, ONNX Runtime CUDA, PyTorch and transformers. Run it from the root of the checkout: the factory
# is called again, by the same name, when PyTorch is compared with.
set -euo pipefail
folder=$1
python=${PYTHON:-python3}
bundles=()
for model in bert_base llama_4_layers; do
  bundle=$folder/$model; bundles+=("$bundle")
  [ -d "$bundle" ] || "$python" -m mha_deploy export "benchmarks/own_models.py:$model" -o "$bundle" --golden min --golden opt
  [ -f "$bundle/engines/tensorrt.engine" ] || "$python" -m mha_deploy build-engine "$bundle" --backend tensorrt
done
# The times first: they must not be lost if a validation fails.
"$python" -m mha_deploy bench "${bundles[@]}" --at opt --kernels --markdown -o "$folder"
for bundle in "${bundles[@]}"; do
  "$python" -m mha_deploy validate "$bundle" --no-sweep --no-latency
done
