#!/usr/bin/env bash
# Builds a library that runs in others' processes: build.sh NAME FILE [GOARCH] makes FILE of the sources in NAME/.
# It is linked with no C library, and the same sources give the same bytes. NAME/symbols.map, if there, names what is exported.
set -euo pipefail

name=$1 file=$2
goarch=${3:-$(${GO:-go} env GOARCH)}
here=$(cd "$(dirname "$0")" && pwd)
case $goarch in
amd64) machine=x86_64 flags=() ;;
arm64) machine=aarch64 flags=(-mno-outline-atomics) ;;
*) echo "no library $name for $goarch" >&2; exit 1 ;;
esac
headers=/usr/include/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
# The machine's own linker makes its own kind only, and its C library's headers are of its own kind.
if [ "$(uname -m)" != $machine ]; then
	flags+=(-fuse-ld=lld)
	[ ! -d /usr/$machine-linux-gnu/include ] || headers=/usr/$machine-linux-gnu/include
fi
soname=libheddle-$name.so
# Tables for unwinding: a program's thread may be cancelled in a call that goes through the library.
tables=-fno-asynchronous-unwind-tables
case $name in
pool) flags+=(-ffreestanding -fno-builtin) ;;
# Is preloaded, too, but passes calls on to the C library of the process.
guest | machine) flags+=(-std=gnu11 -fno-builtin -U_FORTIFY_SOURCE) tables=-fasynchronous-unwind-tables ;;
# Stands in for another library, and takes few functions from the C library of the process: clib/verbs/README.md.
verbs) soname=libibverbs.so.1 flags+=(-std=gnu11 -fno-builtin-bcmp -U_FORTIFY_SOURCE -Wl,-z,nodelete,--version-script="$here/verbs/symbols.map") ;;
esac
mkdir -p "$(dirname "$file")"
"${CLANG:-clang}" --target=$machine-linux-gnu "${flags[@]}" -I"$headers" -I"$here" -O2 -Wall -Wextra -Werror \
	-fno-stack-protector "$tables" -fPIC -fvisibility=hidden -nostdlib -shared -s \
	-Wl,-soname,"$soname",-z,relro,-z,noexecstack,--build-id=none,--hash-style=both -o "$file" "$here/$name"/*.c
