#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the Python package's tests with the package that `make python` has installed. Exit status 77
# (skipped) where there is none, or where the sources have changed since.
#
#   run.sh ROOT
set -euo pipefail
cd "$1"
python=build/python/venv/bin/python
if [ ! -f build/python/installed ]; then
  echo "skipped: the Python package is not installed; make python builds, installs and tests it"
  exit 77
fi
newer=$(find client/python cuda proto -newer build/python/installed \
  \( -name '*.py' -o -name '*.cc' -o -name '*.h' -o -name '*.toml' \) -print -quit)
if [ -n "$newer" ]; then
  echo "skipped: $newer is newer than the installed Python package; make python brings it up to date"
  exit 77
fi
exec "$python" -m pytest -q -p no:cacheprovider -o python_files='*_test.py' tests/client/python
