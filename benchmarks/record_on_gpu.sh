#!/usr/bin/env bash
# The lines of benchmarks/results/h200.jsonl: nine rows, each in three processes, beside compiled PyTorch.
#
#     benchmarks/record_on_gpu.sh FOLDER [LINES]      # then: python benchmarks/tables.py
#
# FOLDER and LINES are written into the lines as they are given: relative paths, such as out/record, can be replayed anywhere.
# Needs a GPU, TensorRT with the plugin library (mha-deploy plugins where), PyTorch and transformers, and the root of the
# checkout as the current folder. Exports run side by side, builds one at a time, since they measure algorithms, and the
# rows after them. PyTorch compiles in the first process and reads its cache in the others. The first round has all
# baselines; the others have those that can be the best one of their row, since a baseline costs a tenth of the round. On
# an H200 with 16 cores the three rounds took 670 s. No row begins later than LIMIT seconds after the start, and what is
# missing is named at the end. A second run of this script builds nothing again, and adds processes to the same lines.
set -uo pipefail
folder=$1
lines=${2:-benchmarks/results/h200.jsonl}
python=${PYTHON:-python3}
all=${BASELINES:-compile compile-tuned compile-cudnn}  # more, and slower: sdpa-cudnn-packed
rounds=${ROUNDS:-3} limit=${LIMIT:-1200}
deploy() { "$python" -m mha_deploy "$@"; }
missing=()

exported() { # name, model, options of export
  [ -f "$folder/$1/manifest.json" ] || deploy export "$2" -o "$folder/$1" --precision fp16 --device cuda "${@:3}" \
    > "$folder/$1.log" 2>&1
}
built() { # name, options of build-engine
  [ -f "$folder/$1/engines/plugin32.engine" ] || deploy build-engine "$folder/$1" --backend tensorrt --name plugin32 \
    --attention plugin --accumulate fp32 "${@:2}" >> "$folder/$1.log" 2>&1
}
timed() { # name, baselines, more options of bench
  if [ $SECONDS -ge "$limit" ]; then missing+=("$1"); return; fi
  local runtimes=(--runtime plugin32) each started=$SECONDS
  for each in $2; do runtimes+=(--runtime "$each"); done
  deploy bench "$folder/$1" "${runtimes[@]}" -o "$folder/bench-$1" --record "$lines" --trust-code "${@:3}" \
    >> "$folder/bench-$1.log" 2>&1 || missing+=("$1 (see $folder/bench-$1.log)")
  echo "$1: $((SECONDS - started)) s"
}

mkdir -p "$folder"
sizes=(--golden min --golden opt)
exported bert-base bert-base "${sizes[@]}" &
exported bert-large bert-large "${sizes[@]}" &
exported llama llama-3-8b --axis B=1 --axis S=1:2048:8192 "${sizes[@]}" &
exported gpt3 gpt3-175b --axis B=1 --golden opt &
exported decode llama-3-8b --cache preallocated --axis B=1:1:32 --axis S=1:256:3840 --axis T=4096 --golden min \
  --golden decode &
exported whole-bert benchmarks/own_models.py:bert_base "${sizes[@]}" --device cpu &
exported whole-llama benchmarks/own_models.py:llama_4_layers "${sizes[@]}" --device cpu &
wait
for name in bert-base bert-large llama whole-bert whole-llama; do built "$name"; done
# Without --refit, TensorRT 8.6 prepares gigabytes of weights for every tactic.
built gpt3 --profile B=1,S=512 --refit all
# One profile: TensorRT 8.6 cannot prepare a second one. Its optimal batch is not 1: with 1, other batches were wrong.
built decode --profile B=1:8:32,S=1:16:256
echo "exports and builds: $SECONDS s"

small=$all gpt3=$all
whole="compile compile-cudnn"  # compile-tuned is one layer written anew: a whole model is compiled as it is written
for round in $(seq "$rounds"); do
  kernels=() && [ "$round" = 1 ] && kernels=(--kernels)
  timed bert-base "$small" --at opt "${kernels[@]}"
  timed bert-large "$small" --at opt "${kernels[@]}"
  timed llama "$all" --at B=1,S=2048 --at B=1,S=8192 "${kernels[@]}"
  timed gpt3 "$gpt3" --at opt "${kernels[@]}"
  timed decode "$small" --at B=1,S=1,T=4096 --at B=32,S=1,T=4096 "${kernels[@]}"
  timed whole-bert "$whole" --at opt "${kernels[@]}"
  timed whole-llama "$whole" --at opt "${kernels[@]}"
  # Every stream compiles for itself; on an engine all of them share the weights.
  [ "$round" = 1 ] && timed bert-base compile-cudnn --at opt --streams 1,2,4,8
  small="compile-tuned compile-cudnn" gpt3="compile compile-tuned" whole=compile
done
echo "all: $SECONDS s"
[ ${#missing[@]} = 0 ] || { printf 'not measured: %s\n' "${missing[@]}"; exit 1; }
