#!/usr/bin/env bash
# All that waits for a GPU, in one run of at most 8 minutes: builds the CUDA kernels, runs the tests marked cuda, runs
# every op under compute-sanitizer's four tools, and times the kernels against the byte floors. A failing stage does not
# stop the next one; the summary at the end says what passed, failed, ran out of time or was skipped.
#
#   bench/device_check.sh [--dry-run] [--no-build]
#
# Needs: a CUDA toolkit with nvcc, and in $PYTHON (default: python3) torch with CUDA, pybind11, pytest and hypothesis.
# Writes logs, JSON and plots to $OUT (default: bench/results/device). Exit code: 0 all passed, 1 something did not,
# 2 there is no GPU (nothing was measured).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-bench/results/device}
BUILD=${BUILD:-build/device}
BUDGET_S=${BUDGET_S:-480}      # seconds for everything
SLOWEST_S=${SLOWEST_S:-480}    # and for any one stage
TOKENS=${TOKENS:-8192}
VOCAB=${VOCAB:-151936}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
dry_run=false
build=true
for option in "$@"; do
  case $option in
    --dry-run) dry_run=true ;;
    --no-build) build=false ;;
    *) echo "device_check: unknown option $option (expected --dry-run, --no-build)" >&2; exit 1 ;;
  esac
done

summary=()
failed=0

# stage NAME LIMIT_S COMMAND...: runs it with a time limit, the log in $OUT/NAME.log.
stage() {
  local name=$1 limit=$2 left start code verdict
  shift 2
  left=$((BUDGET_S - SECONDS - 5))
  if $dry_run; then
    printf '  %-22s at most %3d s: %s\n' "$name" "$limit" "$*"
    return 0
  fi
  if ((left < 10)); then
    summary+=("$(printf '%-22s skipped: the budget of %d s is spent' "$name" "$BUDGET_S")")
    failed=1
    return 1
  fi
  ((limit > left)) && limit=$left
  ((limit > SLOWEST_S)) && limit=$SLOWEST_S
  start=$SECONDS
  echo "== $name (at most $limit s)"
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  case $code in
    0) verdict=passed ;;
    124 | 137) verdict="out of time after $limit s" ;;
    *) verdict="failed with code $code" ;;
  esac
  ((code == 0)) || { failed=1; tail -n 15 "$OUT/$name.log"; }
  summary+=("$(printf '%-22s %-28s %4d s  %s' "$name" "$verdict" $((SECONDS - start)) "$OUT/$name.log")")
  return "$code"
}

# skip NAME REASON: a stage that cannot run here.
skip() {
  if $dry_run; then printf '  %-22s skipped: %s\n' "$1" "$2"; else summary+=("$(printf '%-22s skipped: %s' "$1" "$2")"); fi
}

find_tool() {
  command -v "$1" || { [ -x "/usr/local/cuda/bin/$1" ] && echo "/usr/local/cuda/bin/$1"; } || true
}

build_for() {
  local generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  stage configure 60 cmake -S . -B "$BUILD" "${generator[@]}" -DAREAL_CUDA=ON -DAREAL_INPLACE=ON \
    "-DAREAL_CUDA_ARCHS=$1" "-DPython_EXECUTABLE=$(command -v "$PYTHON")" &&
    stage build 200 cmake --build "$BUILD" -j "$(nproc)" --target _C
}

sanitize() {
  local sanitizer tool
  sanitizer=$(find_tool compute-sanitizer)
  for tool in memcheck racecheck synccheck initcheck; do
    if [ -z "$sanitizer" ] && ! $dry_run; then
      skip "$tool" "no compute-sanitizer in PATH or /usr/local/cuda/bin"
    else
      # The kernels of torch are not ours to check, and instrumenting them would take minutes.
      stage "$tool" 40 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${sanitizer:-compute-sanitizer}" --tool "$tool" \
        --kernel-name kns=areal --error-exitcode 1 "$PYTHON" bench/device_samples.py --sizes 1
    fi
  done
}

time_kernels() {
  local common=(--device cuda --repeats 15 --threads 1 --out "$OUT")
  stage bench_logprob 90 "$PYTHON" bench/bench_logprob.py "${common[@]}" --compile --tokens "$TOKENS" --vocab "$VOCAB" \
    --dtypes bfloat16
  stage bench_linear_logprob 60 "$PYTHON" bench/bench_linear_logprob.py "${common[@]}" --tokens "$TOKENS" --vocab "$VOCAB" \
    --hidden 4096 --live 1.0 --dtypes bfloat16
  stage bench_loss 40 "$PYTHON" bench/bench_loss.py "${common[@]}" --compile --tokens 1000000
  stage bench_scan 30 "$PYTHON" bench/bench_scan.py "${common[@]}"
  stage bench_peers 90 "$PYTHON" bench/bench_peers.py "${common[@]}" --compile --tokens "$TOKENS" --vocab "$VOCAB" \
    --hidden 4096 --sequences 512 --length 4096 --tasks logprob linear loss gae pack
}

gpu=$("$PYTHON" -c 'import torch; p = torch.cuda.is_available() and torch.cuda.get_device_properties(0)
print(f"{p.major}{p.minor} {p.name}" if p else "")' 2>/dev/null)
arch=${gpu%% *}
$dry_run || mkdir -p "$OUT"
if [ -z "$gpu" ]; then
  echo "device_check: no GPU that torch of $PYTHON can use; nothing was measured on a GPU" >&2
  $dry_run || exit 2
else
  echo "device_check: ${gpu#* }, sm_$arch, at most $BUDGET_S s"
fi

$dry_run && echo "stages:"
$build && build_for "${arch:-90}"
stage samples 60 "$PYTHON" bench/device_samples.py
stage tests 120 "$PYTHON" -m pytest -q -m cuda --maxfail=30 -p no:cacheprovider python_tests/ops
sanitize
time_kernels

if $dry_run; then
  [ -n "$gpu" ] || exit 2
  exit 0
fi
{
  echo "device_check on ${gpu#* }: $(git describe --always --dirty 2>/dev/null || echo 'no git'), $SECONDS s"
  printf '%s\n' "${summary[@]}"
  "$PYTHON" bench/floors.py "$OUT"
} | tee "$OUT/summary.txt"
exit "$failed"
