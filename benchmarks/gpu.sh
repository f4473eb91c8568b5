#!/usr/bin/env bash
# Measures on an NVIDIA GPU, from a bare checkout, in under 8 minutes, installing included:
#
#   benchmarks/gpu.sh RESULTS.json
#
# Needs Python 3.11 or newer, a driver, and a package index. Rows for which no time is left are
# named below the table. Where nvidia-smi finds no GPU it stops, unless DRY_RUN=1 is set: then it
# measures one tiny row on the CPU, to show that everything before and after works.
set -euo pipefail

if [ $# -ne 1 ]; then
  echo "usage: benchmarks/gpu.sh RESULTS.json" >&2
  exit 2
fi
limit=480 # seconds
results=$(realpath -m "$1")
cd "$(dirname "$0")/.."

# All rows with 2048 environments would take longer than there is time for.
rows=(host 'mlp/*/2048' '*/FollowTarget/2048' '*/CartpoleBalance/2048')
arguments=(--full --rows "${rows[@]}")
extras=()

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null; then
  # JAX's plugin must not be newer than what the driver knows.
  cuda=$(nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1)
  if [ "${cuda:-0}" -ge 13 ]; then
    extras=("jax[cuda13]")
  else
    extras=("jax[cuda12]")
  fi
elif [ "${DRY_RUN:-0}" = 1 ]; then
  arguments=(--quick)
else
  echo "benchmarks/gpu.sh: nvidia-smi finds no GPU here; DRY_RUN=1 tries the script on the CPU" >&2
  exit 1
fi

# An environment of its own: the plugin for CUDA is not in the lock.
export UV_PROJECT_ENVIRONMENT=.venv-gpu
uv=$(make -s uv-path)
if [ "$uv" = .tools/bin/uv ]; then
  make -s "$uv"
fi
"$uv" sync --quiet --locked --no-default-groups
python=$UV_PROJECT_ENVIRONMENT/bin/python
if [ ${#extras[@]} -gt 0 ]; then
  jax=$("$python" -c 'import importlib.metadata as m; print(m.version("jax"))')
  "$uv" pip install --quiet --python "$python" "${extras[@]/%/==$jax}"
  "$python" -c 'import jax; assert jax.default_backend() == "gpu", jax.devices()'
fi

minutes=$(awk -v left=$((limit - SECONDS)) 'BEGIN { printf "%.2f", left / 60 }')
UV=$uv "$python" benchmarks/bench.py "${arguments[@]}" --minutes "$minutes" --output "$results"
