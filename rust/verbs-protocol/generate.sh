#!/usr/bin/env bash
# Makes abi.rs of clib/verbs/protocol.h, the only source of what C and Rust share. `make generate` runs it,
# `make check` sees whether its result is the one that is committed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# rustfmt is that of rust-toolchain.toml.
cd "$here"
header=$here/../../clib/verbs/protocol.h
# Padding would be bytes that nobody named, and that a reply would carry out of the router.
clang -std=gnu11 -Wall -Werror=padded -fsyntax-only -x c "$header"
bindgen --with-derive-default --no-layout-tests --no-doc-comments --no-prepend-enum-name \
	--allowlist-type 'verbs_.*' --allowlist-var 'VERBS_.*' "$header" -- -std=gnu11 >"$here/src/abi.rs"
rustfmt --edition 2024 --config-path "$here/../rustfmt.toml" "$here/src/abi.rs"
