#!/usr/bin/env bash
# Everything that only a card can tell, in one go and one JSON file: build for the card's architecture, the operation
# against the CPU, the tests of eviction on the device, memory checks by compute-sanitizer, times and memory of cuts with
# an 8B-shaped random model. For 16 cores, under 12 minutes; a step that overruns its limit is stopped and said so.
#
#   scripts/gpu_check.sh [--dry-run] [--out FILE]
#
# --dry-run takes the CPU in place of the card, and tiny sizes: nothing of it is a result, it shows that the steps run.
#
# Has to be there: nvcc, a C++ compiler, git, make; and `make gpu-check-tools` has been run, on this machine or on one
# whose folders .venv and build/upstream were brought along. No step downloads anything.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=
out=build/gpu-check.json
while test $# -gt 0; do
    case "$1" in
    --dry-run) dry=1 ;;
    --out)
        test $# -ge 2 || { echo "$0: --out needs a file" >&2; exit 2; }
        out=$2
        shift
        ;;
    *)
        echo "usage: $0 [--dry-run] [--out FILE] (got '$1')" >&2
        exit 2
        ;;
    esac
    shift
done

python=$PWD/.venv/bin/python
if ! test -x "$python"; then
    echo "$0: no .venv here. make gpu-check-tools makes it" >&2
    exit 1
fi
export PATH="$PWD/.venv/bin:$PATH"

jobs=${JOBS:-$(nproc)}
log=build/gpu-check
mkdir -p "$log"
steps=$log/steps.jsonl
: > "$steps"
failed=0

# step NAME SECONDS COMMAND...: runs it with a limit, notes what came of it, and goes on
step() {
    local name=$1 limit=$2 start end status=0
    shift 2
    echo "== $name" >&2
    start=$(date +%s.%N)
    timeout --kill-after=10 "$limit" "$@" > "$log/$name.log" 2>&1 || status=$?
    end=$(date +%s.%N)
    test "$status" -eq 0 || { failed=$((failed + 1)); tail -n 15 "$log/$name.log" >&2; }
    "$python" - "$name" "$status" "$start" "$end" "$limit" "$log/$name.log" >> "$steps" << 'PY'
import json, sys
name, status, start, end, limit, log = sys.argv[1:]
tail = open(log, encoding="utf-8", errors="replace").read().splitlines()[-8:]
step = {"name": name, "status": int(status), "timed_out": int(status) in (124, 137), "limit_s": float(limit)}
print(json.dumps({**step, "seconds": round(float(end) - float(start), 1), "tail": tail}))
PY
    echo "   status $status, $(tail -n 1 "$steps" | "$python" -c 'import json,sys; print(json.load(sys.stdin)["seconds"])') s" >&2
}

# limits of the steps with a card, in all 720 s
if test -n "$dry"; then
    device=CPU
    card="none: dry run on the CPU"
    # the libraries of `make dev`
    build=build/dev
    options=()
else
    if ! card=$(nvidia-smi --id=0 --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader); then
        echo "$0: nvidia-smi finds no card here. --dry-run does without" >&2
        exit 1
    fi
    arch=$(nvidia-smi --id=0 --query-gpu=compute_cap --format=csv,noheader | tr -d '. ')
    device=CUDA
    build=build/gpu-check/lib
    options=(-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch-real" -DGGML_NATIVE=ON)
fi
bin=$build/bin
export LLAMA_DGE_LIB_PATH=$PWD/$bin PYTHONPATH=$PWD/python LLAMA_DGE_TEST_DEVICE=$device

step configure 30 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$python" "${options[@]}"
step build 290 cmake --build "$build" -j "$jobs" --target llama-dge test-attn-score test-backend-ops
step attn-score 30 "$bin/test-attn-score"
step backend-ops 40 "$bin/test-backend-ops" test -o ATTN_SCORE
if test -n "$dry"; then
    step eviction 300 "$python" -m pytest -q tests/test_kept_sets.py -k other_caches
    step measure 120 "$python" -m bench.gpu --dry-run --out "$log/measure.json"
else
    step eviction 90 "$python" -m pytest -q -m vulkan tests/test_vulkan.py tests/test_vulkan_gather.py -k "not whole_model"
    step measure 150 "$python" -m bench.gpu --out "$log/measure.json"
    # by matrix units, and in f32
    step backend-perf 15 "$bin/test-backend-ops" perf -o ATTN_SCORE -b CUDA0 -p "type_k=(f16|q8_0),n_embd=128"
    step backend-perf-f32 15 env LLAMA_DGE_MMA=0 \
        "$bin/test-backend-ops" perf -o ATTN_SCORE -b CUDA0 -p "type_k=(f16|q8_0),n_embd=128"
    step sanitizer-memory 30 compute-sanitizer --tool memcheck --error-exitcode 1 "$bin/test-attn-score"
    step sanitizer-races 30 compute-sanitizer --tool racecheck --error-exitcode 1 "$bin/test-attn-score"
fi

"$python" - "$out" "$steps" "$log/measure.json" "$card" "$device" << 'PY'
import json, subprocess, sys
from pathlib import Path
out, steps, measure, card, device = sys.argv[1:]
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
result = {"card": card, "device": device, "dry_run": device == "CPU", "commit": commit or None}
result["steps"] = [json.loads(line) for line in Path(steps).read_text().splitlines()]
result["measure"] = json.loads(Path(measure).read_text()) if Path(measure).exists() else None
Path(out).write_text(json.dumps(result, indent=1) + "\n")
PY
echo "$out: $failed steps failed" >&2
test "$failed" -eq 0
