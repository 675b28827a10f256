#!/usr/bin/env bash
# Builds a congestion control that ships with Heddle: build-congestion.sh NAME FILE makes FILE of bpf/cc/NAME.bpf.c.
# The same source gives the same bytes, for every machine.
set -euo pipefail

name=$1 file=$(realpath -m "$2")
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$(dirname "$file")"
cd "$here"
"${CLANG:-clang}" -target bpf -mcpu=v3 -O2 -g -ffile-prefix-map="$here"=. -Wall -Werror \
	-I"/usr/include/$(uname -m)-linux-gnu" -c "bpf/cc/$name.bpf.c" -o "$file"
