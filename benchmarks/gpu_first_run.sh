#!/usr/bin/env bash
# Everything to be learned from a GPU that the kernel has not run on, in the order in which each answer is needed, inside 25 minutes:
# correctness, L2 additions, tuning, the price of order, cost constants, placement, the table against others, other kernels of ours.
#
#     benchmarks/gpu_first_run.sh [--dry-run] [--stages 1,2,...] FOLDER
#
# FOLDER is flat: summary.txt (versions, what became of each stage), log.txt (all output), attention.csv (rows of stages 3 to 9, told
# apart by their column `run`), red_throughput.csv, costs.toml, attention.png, models.png. A stage that fails or runs out of time is
# recorded and the next one starts. Stages may be run one by one into the same folder. Exit code: 0 if all went well, 1 if a stage
# did not, 2 without a GPU or for wrong arguments. PYTHON names the interpreter (default python3).
set -euo pipefail

usage() { echo "usage: $0 [--dry-run] [--stages 1,2,...] FOLDER" >&2; exit 2; }

MINUTES=25 GRACE=5 # of the whole; seconds that a stage has to end after its limit
PYTHON=${PYTHON:-python3}
dry_run=0 stages=all folder=
while (($#)); do
    case $1 in
        --dry-run) dry_run=1 ;;
        --stages) stages=${2:-}; [[ $stages =~ ^[0-9]+(,[0-9]+)*$ ]] || usage; shift ;;
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

total=0 failed=0

chosen() { [[ $stages == all || ,$stages, == *,$1,* ]]; }

# stage NUMBER NAME SECONDS COMMAND...: runs the command under a time limit, if the stage is chosen.
stage() {
    local number=$1 name=$2 limit=$3 status=0 said started=$SECONDS
    shift 3
    chosen "$number" || return 0
    total=$((total + limit + GRACE))
    if ((dry_run)); then
        printf '%s  %-12s %4d s  %s\n' "$number" "$name" "$limit" "$*"
        return 0
    fi
    echo "=== stage $number, $name (at most $limit s): $*" | tee -a "$folder/log.txt"
    timeout --signal=INT --kill-after="$GRACE" "$limit" "$@" >>"$folder/log.txt" 2>&1 || status=$?
    case $status in
        0) said=ok ;;
        3) said="not available" ;; # benchmarks.gpu_tests, without pytest
        124 | 137) said="time limit" ;;
        *) said="failed (exit code $status)" ;;
    esac
    ((status == 0 || status == 3)) || failed=1
    echo "stage $number, $name: $said, $((SECONDS - started)) s" | tee -a "$folder/summary.txt" "$folder/log.txt"
}

all_stages() {
    local attention=("$PYTHON" -m benchmarks.attention --out "$folder") tuning=("$PYTHON" -m benchmarks.tuning --out "$folder")
    stage 1 tests 300 "$PYTHON" -m benchmarks.gpu_tests
    stage 2 additions 60 "$PYTHON" -m benchmarks.red_throughput --out "$folder"
    stage 3 tuning 170 "${tuning[@]}" --label tuning --no-pictures --minutes 2.5 --jobs 6 \
        --contenders 'ours-release-*,ours-two-per-sm,ours-half-q'
    stage 4 order 80 "${tuning[@]}" --label order --no-pictures --minutes 1 --jobs 6 --contenders ours-unordered
    stage 5 costs 120 "$PYTHON" -m dash_inductor calibrate --device-out "$folder/costs.toml"
    stage 6 placement 120 "${attention[@]}" --label placement --no-pictures --minutes 1.7 --jobs 6 \
        --shapes 'd64-*-2048,d64-*-8192,d128-*-2048' --contenders 'ours,ours-ascending,ours-descending,ours-shift*,ours-symmetric*'
    stage 7 table 420 "${attention[@]}" --label table --minutes 6.5 --jobs 12 --rounds 15 --contenders 'ours,sdpa-*,flex,fa*'
    stage 8 two-pass 80 "${attention[@]}" --label two-pass --no-pictures --minutes 1 --jobs 4 \
        --shapes 'd64-causal-8192,d128-*-8192,d256-causal-8192,vit-h-14,qwen2.5-7b-alone' --contenders 'ours,ours-one-pass,ours-two-pass'
    stage 9 gluon 70 "${attention[@]}" --label gluon --no-pictures --minutes 0.9 --jobs 4 \
        --shapes 'd64-*-8192,d128-*-8192' --contenders ours,ours-gluon
}

if ((dry_run)); then
    all_stages
    echo "in all at most $total s of $((60 * MINUTES)) s"
    ((total < 60 * MINUTES))
    exit
fi

"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 2)' || { echo "$0: needs a GPU" >&2; exit 2; }
mkdir -p "$folder"
caches=$(mktemp -d)
trap 'rm -rf "$caches"' EXIT
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton
"$PYTHON" -m benchmarks.attention.environment 2>&1 | tee -a "$folder/summary.txt" "$folder/log.txt" || true
all_stages
cat "$folder/summary.txt"
exit "$failed"
