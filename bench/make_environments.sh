#!/usr/bin/env bash
# Makes the environments of bench_integrations.py.
#
#     bench/make_environments.sh DIR [areal slime nemo_rl prime_rl trl verl openrlhf]
#
# DIR/<framework> gets the framework and what its modules ask for when they are imported, and a file `paths` for
# PYTHONPATH. Nothing pulls in a torch: packages are installed without their requirements, one at a time, until the
# imports succeed; what does not is said and left as it is. Frameworks that are not on PyPI are cloned.
#   PYTHON   interpreter with torch and areal_core's requirements      SOURCES  folder of checkouts to use instead
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
dir=${1:?usage: make_environments.sh DIR [FRAMEWORK...]}
shift
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

declare -A requirement=([areal]=areal==1.0.4 [trl]=trl==1.16.0 [verl]=verl==0.9.1 [openrlhf]=openrlhf)
declare -A repository=([slime]=THUDM/slime [nemo_rl]=NVIDIA-NeMo/RL [prime_rl]=PrimeIntellect-ai/prime-rl)
declare -A subfolders=([slime]=. [nemo_rl]=. [prime_rl]="src packages/prime-rl-configs/src")
declare -A modules=(
  [areal]="areal.utils.functional areal.utils.seqpack areal.trainer.ppo.actor"
  [slime]="slime.utils.ppo_utils slime.utils.seqlen_balancing"
  [nemo_rl]="nemo_rl.distributed.model_utils nemo_rl.algorithms.advantage_estimator nemo_rl.data.packing"
  [prime_rl]="prime_rl.trainer.rl.loss"
  [trl]="trl.trainer.utils trl.trainer.grpo_trainer"
  [verl]="verl.trainer.ppo.core_algos verl.workers.config verl.utils.seqlen_balancing"
  [openrlhf]="openrlhf.models.utils openrlhf.models.loss openrlhf.utils.seqlen_balancing"
)
# Versions that the framework insists on, and packages that must come together.
declare -A first=([nemo_rl]="transformers<5.12 tokenizers<0.23 huggingface_hub>=1,<2" [areal]="swanlab==0.6.12")
# What pip calls a module of another name. (accelerate takes boto3 without botocore for half an installation.)
declare -A packages=(
  [yaml]=pyyaml [zmq]=pyzmq [pynvml]=nvidia-ml-py [PIL]=pillow [cv2]=opencv-python-headless [git]=gitpython
  [tensorboardX]=tensorboardx [math_verify]=math-verify [dotenv]=python-dotenv [google]=protobuf [attr]=attrs
  [hydra]=hydra-core [antlr4]=antlr4-python3-runtime==4.9.3 [prometheus_client]=prometheus-client
  [wadler_lindig]=wadler-lindig [pydantic_config]=prime-pydantic-config [boto3]="boto3 botocore s3transfer jmespath"
  [opentelemetry]="opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-proto
    opentelemetry-exporter-otlp-proto-http opentelemetry-exporter-otlp-proto-common googleapis-common-protos protobuf"
)

install() {  # TARGET REQUIREMENT...
  local target=$1
  shift
  "$python" -m pip install --quiet --no-deps --target "$target" "$@"
}

make_environment() {  # FRAMEWORK
  local name=$1 here=$dir/$1 source found missing i part
  mkdir -p "$here/packages"
  echo "$here/packages" >"$here/paths"
  if [ -n "${repository[$name]:-}" ]; then
    source=${SOURCES:-$here}/$name
    [ -d "$source" ] || git clone --quiet --depth 1 "https://github.com/${repository[$name]}" "$source" || return 1
    for part in ${subfolders[$name]}; do echo "$source/$part" >>"$here/paths"; done
  else
    install "$here/packages" "${requirement[$name]}" || return 1
  fi
  for part in ${first[$name]:-}; do install "$here/packages" "$part" || return 1; done
  for i in $(seq 80); do
    found=$(cd / && PYTHONPATH=$(paste -sd: "$here/paths") "$python" -c "
import importlib
for module in '${modules[$name]}'.split():
    importlib.import_module(module)" 2>&1 | tail -n 1)
    missing=$(sed -nE "s/.*No module named '([^'.]+).*/\1/p" <<<"$found")
    [ -n "$missing" ] || break
    echo "$name: installing ${packages[$missing]:-$missing}"
    # shellcheck disable=SC2086  # several packages
    install "$here/packages" ${packages[$missing]:-$missing} || break
  done
  if [ -z "$found" ]; then echo "$name: ready"; else echo "$name: does not import here: $found"; fi
}

if [ $# = 0 ]; then set -- areal slime nemo_rl prime_rl trl verl openrlhf; fi
for name in "$@"; do
  if [ -z "${modules[$name]:-}" ]; then echo "expected one of ${!modules[*]}, got $name" >&2; exit 2; fi
  make_environment "$name" || echo "$name: not made"
done
