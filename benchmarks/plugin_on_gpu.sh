#!/usr/bin/env bash
# The attention plugin: TensorRT alone, with the plugin, and PyTorch, layer by layer.
#
#     benchmarks/plugin_on_gpu.sh FOLDER
#
# Needs a GPU, TensorRT with the plugin library (mha-deploy plugins where), ONNX Runtime CUDA and PyTorch. Builds run side
# by side, since each keeps one core busy; the timings come after them, each layer in a separate process.
set -euo pipefail
folder=$1
python=${PYTHON:-python3}
deploy() { "$python" -m mha_deploy "$@"; }
exported() { [ -d "$folder/$1" ] || deploy export "$2" -o "$folder/$1" --device cuda "${@:3}"; }
built() { # layer, name, options
  [ -f "$folder/$1/engines/$2.engine" ] || deploy build-engine "$folder/$1" --backend tensorrt --name "$2" "${@:3}"
}
three() { # layer, options of every engine
  built "$1" tensorrt "${@:2}" &
  built "$1" plugin --attention plugin --accumulate fp16 "${@:2}" &
  built "$1" plugin32 --attention plugin --accumulate fp32 "${@:2}" &
  wait
}
timed() { # layer, sizes and more backends
  deploy bench "$folder/$1" --kernels --markdown -o "$folder/bench-$1" --backend sdpa-cudnn --backend sdpa-cudnn-packed \
    --backend ort-cuda --backend plugin32 "${@:2}"
}
mkdir -p "$folder"
(exported bert-base bert-base --golden min --golden opt && three bert-base) &
(exported bert-large bert-large --golden min --golden opt && three bert-large) &
(exported llama llama-3-8b --axis B=1 --axis S=1:2048:8192 --golden min --golden opt && three llama) &
(exported decode llama-3-8b --cache preallocated --axis B=1:1:32 --axis S=1:256:3840 --axis T=4096 --golden min --golden decode \
  && three decode --profile B=1:8:32,S=1:16:256) &
# Without --refit, 8.6 prepares gigabytes of weights for every tactic; beside the plugin the build of its own GEMMs had
# not ended after 420 s even with it.
(exported gpt3 gpt3-175b --axis B=1 --golden opt && built gpt3 tensorrt --profile B=1,S=512 --refit all \
  && built gpt3 plugin32 --profile B=1,S=512 --refit all --attention plugin --accumulate fp32) &
(exported sparse sparse-heads-base --golden min --golden opt && three sparse) &
wait
failed=0
timed bert-base --at opt --backend tensorrt --backend plugin --backend compile || failed=1
timed bert-large --at opt --backend tensorrt --backend plugin --backend compile || failed=1
timed sparse --at opt --backend tensorrt --backend plugin || failed=1
timed gpt3 --at opt --backend tensorrt || failed=1
timed decode --at B=1,S=1,T=4096 --at B=32,S=1,T=4096 --backend tensorrt --backend plugin --backend ort-cuda-contrib || failed=1
timed llama --at B=1,S=2048 --at B=1,S=8192 --backend plugin --backend compile || failed=1
deploy bench "$folder/llama" --markdown -o "$folder/bench-llama-alone" --at B=1,S=2048 --backend tensorrt || failed=1
for batch in 1 32; do
  deploy validate "$folder/decode" --backend plugin --backend plugin32 --steps 256 --prompt 3840 --batch $batch --no-sweep \
    --no-latency -o "$folder/steps-$batch" || failed=1
done
exit $failed
