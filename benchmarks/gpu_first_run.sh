#!/usr/bin/env bash
# Everything to be learned from a GPU that the kernel has not run on, in three parts that need nothing from each other, each within
# nine minutes with all limits and graces, for a GPU that is there for a short time:
#
#     benchmarks/gpu_first_run.sh [--dry-run] [--part 1|2|3] [--stages NAME,...] FOLDER
#
#   1  environment 30 s, tests 270 s (the kernel on this GPU, most important first), additions 40 s (what L2 takes),
#      order 70 s (what determinism costs), glance 100 s (five shapes against the stock kernels)
#   2  environment 30 s, tuning 190 s (stages, release positions, tiles), costs 165 s (constants of the cost model),
#      placement 130 s (schedules)
#   3  environment 30 s, table 365 s (all shapes, SDPA's and FlexAttention's, ours against the others), two-pass 60 s, gluon 60 s
#      (last: nothing bounds its waits for copies)
#
# The stages that write attention.csv or red_throughput.csv need pandas (the extra `bench`).
#
# Each stage has its limit and then a few seconds to end. Compilers' caches are of the one run, and go with it. Without --part all
# three run, one after another; --stages takes some of the stages. All write into FOLDER, which is flat:
#
#     environment.json  GPU, versions, clocks       summary.txt         what became of each stage
#     attention.csv     rows, as they come, told    log.txt             all output
#                       apart by their column run   red_throughput.csv  L2 additions
#     timings.jsonl     launches of `calibrate`     costs.toml          a cost file fitted to them
#
# `python -m benchmarks.attention.merge FOLDER... --out DIR` makes one folder and a report of several. A stage that fails or runs out
# of time is recorded, and the next one starts. Exit code: 0 if all went well, 1 if a stage did not, 2 without a GPU or for wrong
# arguments. PYTHON names the interpreter (default python3).
set -euo pipefail

usage() { echo "usage: $0 [--dry-run] [--part 1|2|3] [--stages NAME,...] FOLDER" >&2; exit 2; }

BUDGET=540 # seconds of a part
GRACE=5    # that a stage has to end after its limit
ENVIRONMENT=30
PYTHON=${PYTHON:-python3}
STAGES=(tests additions order glance tuning costs placement table two-pass gluon)
dry_run=0 part=all stages=all folder=
while (($#)); do
    case $1 in
        --dry-run) dry_run=1 ;;
        --part) part=${2:-}; [[ $part =~ ^[123]$ ]] || usage; shift ;;
        --stages)
            stages=${2:-}
            [[ -n $stages && $stages != *, ]] || usage
            for name in ${stages//,/ }; do [[ " ${STAGES[*]} " == *" $name "* ]] || usage; done
            shift ;;
        -*) usage ;;
        *) [[ -z $folder ]] || usage; folder=$1 ;;
    esac
    shift
done
[[ -n $folder ]] || usage
[[ $folder == /* ]] || folder=$PWD/$folder
cd "$(dirname "$0")/.."

unset TRITON_INTERPRET DASH_INDUCTOR_EMULATE
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # strict deterministic mode asks for it

failed=0 total=0

chosen() { [[ $stages == all || ,$stages, == *,$1,* ]] && [[ $part == all || $part == "$2" ]]; }

# stage NAME SECONDS COMMAND...: runs the command under a time limit, if the stage is chosen; of part $current.
stage() {
    local name=$1 limit=$2 status=0 said started=$SECONDS
    shift 2
    chosen "$name" "$current" || return 0
    if ((dry_run)); then
        total=$((total + limit + GRACE))
        printf '%s  %-12s %4d s  %s\n' "$current" "$name" "$limit" "$*"
        return 0
    fi
    echo "=== stage $name (at most $limit s): $*" | tee -a "$folder/log.txt"
    timeout --signal=INT --kill-after="$GRACE" "$limit" "$@" >>"$folder/log.txt" 2>&1 || status=$?
    case $status in
        0) said=ok ;;
        3) said="not available" ;; # benchmarks.gpu_tests, without pytest
        124 | 137) said="time limit" ;;
        *) said="failed (exit code $status)" ;;
    esac
    ((status == 0 || status == 3)) || failed=1
    echo "stage $name: $said, $((SECONDS - started)) s" | tee -a "$folder/summary.txt" "$folder/log.txt"
}

attention=("$PYTHON" -m benchmarks.attention --out "$folder" --no-pictures)
tuning=("$PYTHON" -m benchmarks.tuning --out "$folder" --no-pictures)

part_1() {
    stage tests 270 "$PYTHON" -m benchmarks.gpu_tests --minutes 4.1
    stage additions 40 "$PYTHON" -m benchmarks.red_throughput --out "$folder"
    stage order 70 "${tuning[@]}" --label order --minutes 1 --jobs 10 --contenders ours-unordered
    stage glance 100 "${attention[@]}" --label glance --quick --minutes 1.4 --jobs 10
}

part_2() {
    stage tuning 190 "${tuning[@]}" --label tuning --minutes 2.9 --jobs 14 \
        --contenders 'ours-*-stages,ours-release-*,ours-two-per-sm,ours-half-q'
    stage costs 165 "$PYTHON" -m dash_inductor calibrate --jobs 12 --minutes 2.5 \
        --timings "$folder/timings.jsonl" --device-out "$folder/costs.toml"
    stage placement 130 "${attention[@]}" --label placement --minutes 1.9 --jobs 14 --rounds 10 \
        --shapes 'd64-*-2048,d64-*-8192,d128-*-2048' --contenders 'ours,ours-ascending,ours-descending,ours-shift*,ours-symmetric*'
}

part_3() {
    stage table 365 "${attention[@]}" --label table --minutes 5.7 --jobs 14 --rounds 15 --contenders 'ours,sdpa-*,flex,fa*'
    stage two-pass 60 "${attention[@]}" --label two-pass --minutes 0.8 --jobs 14 --rounds 10 \
        --shapes 'd64-causal-8192,d128-*-8192,d256-causal-8192,vit-h-14,qwen2.5-7b-alone' --contenders 'ours,ours-one-pass,ours-two-pass'
    stage gluon 60 "${tuning[@]}" --label gluon --minutes 0.8 --jobs 10 --rounds 10 --contenders ours-gluon
}

parts=(1 2 3)
[[ $part == all ]] || parts=("$part")

if ((dry_run)); then
    for current in "${parts[@]}"; do
        total=$((ENVIRONMENT + GRACE))
        "part_$current"
        echo "part $current: at most $total s of $BUDGET s"
        ((total <= BUDGET)) || failed=1
    done
    exit "$failed"
fi

status=0
environment=$(timeout --signal=INT --kill-after="$GRACE" "$ENVIRONMENT" "$PYTHON" -m benchmarks.attention.environment --out "$folder" 2>&1) || status=$?
((status != 2)) || { echo "$0: needs a GPU; benchmarks.attention.environment says: $environment" >&2; exit 2; }
mkdir -p "$folder"
echo "$environment" | tee -a "$folder/log.txt"
touch "$folder/summary.txt"
((status == 0)) || { failed=1; echo "environment: failed (exit code $status)" | tee -a "$folder/summary.txt"; }
caches=$(mktemp -d)
trap 'rm -rf "$caches"' EXIT
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton
for current in "${parts[@]}"; do "part_$current"; done
cat "$folder/summary.txt"
exit "$failed"
