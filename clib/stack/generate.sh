#!/usr/bin/env bash
# Makes the Rust and the Go side of protocol.h and queues.h, the only source of what they share. `make generate` runs it, `make check`
# sees whether its results are those that are committed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
header=$here/protocol.h
# Padding would be bytes that nobody named, and that a message would carry out of its sender.
clang -std=gnu11 -Wall -Werror=padded -fsyntax-only -x c "$header"
clang -std=gnu11 -Wall -Werror=padded -fsyntax-only -x c "$here/queues.h"

# rustfmt is that of rust-toolchain.toml.
cd "$here/../../rust/heddle-stack"
bindgen --with-derive-default --no-layout-tests --no-doc-comments --no-prepend-enum-name \
	--allowlist-type 'stack_.*' --allowlist-var 'STACK_.*' "$header" -- -std=gnu11 >src/abi.rs
# Of shared memory only places are asked for.
bindgen --with-derive-default --no-layout-tests --no-doc-comments --no-prepend-enum-name \
	--no-default 'queues_(header|stream)' --no-debug 'queues_(header|stream)' \
	--allowlist-type 'queues_.*' --allowlist-var 'QUEUES_.*' "$here/queues.h" -- -std=gnu11 -DQUEUES_LAYOUT_ONLY >src/queues/abi.rs
rustfmt --edition 2024 --config-path ../rustfmt.toml src/abi.rs src/queues/abi.rs

# cgo reads the headers here; what it writes needs no cgo. Members are named as Go does.
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
for package in stacks queues; do
	cd "$here/../../internal/plane/$package/protocol"
	CGO_ENABLED=1 "${GO:-go}" tool cgo -objdir "$objects/" -godefs -- -I../../../../clib/stack types.go |
		sed -E -e '2s/.*/\/\/ clib\/stack\/generate.sh/' -e '/^\t\t[A-Z]/s/_([a-z])/\U\1/g' -e '/^\t\t/s/^\t\tId\t/\t\tID\t/' -e '/^\t\t/s/^\t\t(Mtu|Mac|Rtt|Mss)/\t\t\U\1/' >_abi
	gofmt <_abi >abi.go
	rm _abi
done
