#!/usr/bin/env bash
# Builds a library that runs in others' processes: build.sh NAME FILE [GOARCH] makes FILE, libheddle-NAME.so, of the sources in NAME/.
# It needs no C library, and the same sources give the same bytes.
set -euo pipefail

name=$1 file=$2
goarch=${3:-$(${GO:-go} env GOARCH)}
here=$(cd "$(dirname "$0")" && pwd)
case $goarch in
amd64) machine=x86_64 flags=() ;;
arm64) machine=aarch64 flags=(-mno-outline-atomics) ;;
*) echo "no libheddle-$name.so for $goarch" >&2; exit 1 ;;
esac
# The machine's own linker makes its own kind only.
[ "$(uname -m)" = $machine ] || flags+=(-fuse-ld=lld)
headers=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
mkdir -p "$(dirname "$file")"
"${CLANG:-clang}" --target=$machine-linux-gnu "${flags[@]}" -I"/usr/include/$headers" -O2 -Wall -Wextra -Werror \
	-ffreestanding -fno-builtin -fno-stack-protector -fno-asynchronous-unwind-tables -fPIC -fvisibility=hidden -nostdlib -shared -s \
	-Wl,-soname,libheddle-"$name".so,-z,relro,-z,noexecstack,--build-id=none,--hash-style=both -o "$file" "$here/$name"/*.c
