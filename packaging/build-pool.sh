#!/usr/bin/env bash
# Builds libheddle-pool.so: build-pool.sh FILE [GOARCH]. It needs no C library, and the same source gives the same bytes.
set -euo pipefail

file=$1
goarch=${2:-$(${GO:-go} env GOARCH)}
here=$(cd "$(dirname "$0")" && pwd)
case $goarch in
amd64) machine=x86_64 flags=() ;;
arm64) machine=aarch64 flags=(-mno-outline-atomics) ;;
*) echo "no pool for $goarch" >&2; exit 1 ;;
esac
# The machine's own linker makes its own kind only.
[ "$(uname -m)" = $machine ] || flags+=(-fuse-ld=lld)
headers=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
mkdir -p "$(dirname "$file")"
"${CLANG:-clang}" --target=$machine-linux-gnu "${flags[@]}" -I"/usr/include/$headers" -O2 -Wall -Wextra -Werror \
	-ffreestanding -fno-builtin -fno-stack-protector -fno-asynchronous-unwind-tables -fPIC -fvisibility=hidden -nostdlib -shared -s \
	-Wl,-soname,libheddle-pool.so,-z,relro,-z,noexecstack,--build-id=none,--hash-style=both -o "$file" "$here/../pool/pool.c"
