#!/usr/bin/env bash
# sanitize.sh PROGRAMS [COMPUTE_SANITIZER]: our kernels under all tools of compute-sanitizer, on a GPU. PROGRAMS is
# the folder of the test programs. Ends with 3 where there is no GPU, else with the number of runs that found
# something.
set -uo pipefail
programs=$(cd "${1:?the folder of the test programs}" && pwd)
sanitizer=${2:-compute-sanitizer}
failed=0

check() {  # TOOL PROGRAM [option...]; what TOOL_OPTIONS holds is for the tool
    local tool=$1 program=$2
    shift 2
    echo "== $tool $program $*"
    # shellcheck disable=SC2086
    "$sanitizer" --tool "$tool" --kernel-name kernel_substring=mha_deploy --error-exitcode 9 ${TOOL_OPTIONS:-} \
        "$programs/$program" --gtest_brief=1 "$@" 2>&1 | grep -v "^ok " | tail -n 40
    local code=${PIPESTATUS[0]}
    [ "$code" != 3 ] || { echo "no GPU"; exit 3; }
    [ "$code" = 0 ] || { echo "FAILED: $tool $program ended with $code"; failed=$((failed + 1)); }
}

check memcheck driver_test --small
check memcheck sparse_heads_test --small
check memcheck attention_test
check memcheck linear_test --small
# racecheck does not survive cuBLASLt's kernels on Hopper, so no test with GEMMs is run from here on.
for tool in racecheck synccheck; do
    check $tool driver_test --small --gtest_filter=-*Linear*
    check $tool sparse_heads_test --small
    check $tool attention_test --gtest_filter=*cache*:*lengths*:*fp8*
done
# Reads of what nobody wrote: so nothing is filled before. Copies of outputs that cuDNN wrote are not judged.
export MHA_DEPLOY_TEST_UNFILLED=1
export TOOL_OPTIONS="--check-api-memory-access no"
check initcheck driver_test --small --gtest_filter=-*Linear*
check initcheck sparse_heads_test --small
echo "$failed runs found something"
exit "$failed"
