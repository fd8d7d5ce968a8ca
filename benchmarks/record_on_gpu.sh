#!/usr/bin/env bash
# The lines of benchmarks/results/h200.jsonl: nine rows, each in three processes, beside compiled PyTorch.
#
#     benchmarks/record_on_gpu.sh FOLDER [LINES]      # then: python benchmarks/tables.py
#
# FOLDER and LINES are written into the lines as they are given: relative paths, such as out/record, can be replayed anywhere.
# Needs a GPU, TensorRT with the plugin library (mha-deploy plugins where), PyTorch and transformers, and the root of the
# checkout as the current folder. Exports and builds run side by side; the rows come after them, one at a time. PyTorch
# compiles in the first process and reads its cache in the others. The first round has all baselines; the others have those
# that can be the best one of their row, since a baseline costs a tenth of the round. On an H200 with 16 cores exports and
# builds took 145 s and the first round 340. No row begins later than LIMIT seconds after the start, and what is missing
# is named at the end. A second run of this script builds nothing again, and adds processes to the same lines.
set -uo pipefail
folder=$1
lines=${2:-benchmarks/results/h200.jsonl}
python=${PYTHON:-python3}
all=${BASELINES:-compile compile-tuned compile-cudnn}  # more, and slower: sdpa-cudnn-packed
rounds=${ROUNDS:-3} limit=${LIMIT:-1200}
deploy() { "$python" -m mha_deploy "$@"; }
missing=()

prepared() { # name, model, options of export -- options of build-engine
  local bundle=$folder/$1 model=$2 exported=() && shift 2
  while [ $# -gt 0 ] && [ "$1" != -- ]; do exported+=("$1"); shift; done
  [ -f "$bundle/manifest.json" ] || deploy export "$model" -o "$bundle" --precision fp16 --device cuda "${exported[@]}" || return
  [ -f "$bundle/engines/plugin32.engine" ] || deploy build-engine "$bundle" --backend tensorrt --name plugin32 \
    --attention plugin --accumulate fp32 "${@:2}"
}
timed() { # name, baselines, more options of bench
  if [ $SECONDS -ge "$limit" ]; then missing+=("$1"); return; fi
  local backends=(--backend plugin32) each started=$SECONDS
  for each in $2; do backends+=(--backend "$each"); done
  deploy bench "$folder/$1" "${backends[@]}" -o "$folder/bench-$1" --record "$lines" --trust-code "${@:3}" \
    >> "$folder/bench-$1.log" 2>&1 || missing+=("$1 (see $folder/bench-$1.log)")
  echo "$1: $((SECONDS - started)) s"
}

mkdir -p "$folder"
sizes=(--golden min --golden opt)
(prepared bert-base bert-base "${sizes[@]}") > "$folder/bert-base.log" 2>&1 &
(prepared bert-large bert-large "${sizes[@]}") > "$folder/bert-large.log" 2>&1 &
(prepared llama llama-3-8b --axis B=1 --axis S=1:2048:8192 "${sizes[@]}") > "$folder/llama.log" 2>&1 &
# Without --refit, TensorRT 8.6 prepares gigabytes of weights for every tactic.
(prepared gpt3 gpt3-175b --axis B=1 --golden opt -- --profile B=1,S=512 --refit all) > "$folder/gpt3.log" 2>&1 &
# One profile: TensorRT 8.6 cannot prepare a second one. Its optimal batch is not 1: with 1, other batches were wrong.
(prepared decode llama-3-8b --cache preallocated --axis B=1:1:32 --axis S=1:256:3840 --axis T=4096 --golden min \
  --golden decode -- --profile B=1:8:32,S=1:16:256) > "$folder/decode.log" 2>&1 &
(prepared whole-bert benchmarks/own_models.py:bert_base "${sizes[@]}" --device cpu) > "$folder/whole-bert.log" 2>&1 &
(prepared whole-llama benchmarks/own_models.py:llama_4_layers "${sizes[@]}" --device cpu) > "$folder/whole-llama.log" 2>&1 &
wait
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
