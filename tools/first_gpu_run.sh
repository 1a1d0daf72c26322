#!/usr/bin/env bash
# What to run first where there is a GPU, in pieces of at most 10 minutes and
# 30 minutes in all:
#
#     tools/first_gpu_run.sh build         # configure, compile, one program
#     tools/first_gpu_run.sh correctness   # the sweeps, two ranks on one GPU
#     tools/first_gpu_run.sh alone         # what nobody could know before: one rank
#     tools/first_gpu_run.sh ranks         # and two, through the host and over NCCL
#     tools/first_gpu_run.sh table         # all results again
#     tools/first_gpu_run.sh               # the five in turn
#
# PYTHON (python3) has PyTorch with CUDA; JOBS (all cores) compile. DEVICE=cpu is a
# dry run without a GPU: small sizes, one test file.
set -u
cd "$(dirname "$0")/.."
CORES=$(env -u OMP_NUM_THREADS nproc) # which says what OpenMP was told
export DEVICE=${DEVICE:-cuda} OMP_NUM_THREADS=1
PYTHON=${PYTHON:-python3}
BUILD=${BUILD:-build-gpu}
OUT=out/first_gpu
MEASURE=(benchmarks/python/first_gpu.py "$OUT/measured.json")
SMOKE=(benchmarks/python/first_gpu.py "$OUT/smoke.json" --stages "one rank"
  --only "values at the edges")

if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c \
  'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "first_gpu_run: $PYTHON has no PyTorch that sees a GPU; nothing was run"
  exit 0
fi
mkdir -p "$OUT"
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}

build() {
  cmake --preset dev -B "$BUILD" -D Python_EXECUTABLE="$(command -v "$PYTHON")" &&
    timeout 480 cmake --build "$BUILD" -j "${JOBS:-$CORES}" &&
    timeout 60 "$PYTHON" "${SMOKE[@]}"
}

correctness() {
  local tests=(device halo rules/norm rules/stencil rules/index rules/matrix rules/ops rules/random)
  [ "$DEVICE" = cpu ] && tests=(halo)
  # A file's ranks wait for each other: half as many files as cores.
  timeout 420 "$PYTHON" -m pytest -q -m "not tail" --dist loadfile \
    -n "$((CORES > 1 ? CORES / 2 : 1))" "${tests[@]/#/python/tests/}" \
    2>&1 | tee "$OUT/correctness.log" | tail -40
}

alone() {
  "$PYTHON" "${MEASURE[@]}" --limit 330 --stages "one rank"
  if command -v compute-sanitizer >/dev/null; then
    timeout 60 compute-sanitizer --tool memcheck "$PYTHON" "${SMOKE[@]}" \
      2>&1 | tee "$OUT/memcheck.log" | tail -3
  fi
}

ranks() {
  "$PYTHON" "${MEASURE[@]}" --limit 330 --stages "two ranks" "two ranks of NCCL" \
    "a rank of 2" "a rank of 8" "a rank of 64"
}

table() {
  "$PYTHON" "${MEASURE[@]}" --show
  [ -f "$OUT/correctness.log" ] && echo && echo "Tests: $(tail -1 "$OUT/correctness.log")"
  [ -f "$OUT/memcheck.log" ] && echo && echo "memcheck: $(tail -1 "$OUT/memcheck.log")"
  return 0
}

case ${1:-all} in
  build | correctness | alone | ranks | table) "$1" ;;
  all) build && { correctness; alone; ranks; table; } ;;
  *)
    echo "first_gpu_run: expected build, correctness, alone, ranks or table, got $1"
    exit 2
    ;;
esac
