#!/bin/sh
# Build stage of the image: an environment in DIR with the program, from wheels with known hashes
# only. `install.sh SOURCES DIR`; PYTHON selects the interpreter.
#
# A separate script, so that tests run it without a container engine.
set -eu
sources=$1 target=$2
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheels=$work/wheels

"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --require-hashes --only-binary :all: \
    --requirement "$sources/requirements/build.txt"
(cd "$sources" && "$work/build/bin/python" -B -m hatchling build -t wheel -d "$wheels" >/dev/null)

"$python" -m venv --without-pip "$target"
install() {
    "$work/build/bin/pip" --python "$target/bin/python" install --quiet --no-compile "$@"
}
install --require-hashes --only-binary :all: --requirement "$sources/requirements/package.txt"
install --no-index --no-deps "$wheels"/wattspan-*.whl
# Compiled here, because the container's user cannot write.
"$target/bin/python" -m compileall -q -j 1 --invalidation-mode unchecked-hash "$target/lib"
"$target/bin/wattspan" --version
