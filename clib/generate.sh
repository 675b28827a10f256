#!/usr/bin/env bash
# Makes the Rust and the Go side of the headers in clib/ that are the only source of what C, Rust and Go share. `make generate`
# runs it, `make check` sees whether its results are those that are committed.
set -euo pipefail
clib=$(cd "$(dirname "$0")" && pwd)
# rustfmt is that of rust-toolchain.toml.
cd "$clib/../rust"

# rust HEADER RESULT PREFIX [OPTION...] [-- OPTION OF THE COMPILER...]
rust() {
	local header=$clib/$1 result=$2 prefix=$3
	shift 3
	# Padding would be bytes that nobody named, and that a message would carry out of its sender.
	clang -std=gnu11 -Wall -Werror=padded -fsyntax-only -x c "$header"
	[[ " $* " == *" -- "* ]] || set -- "$@" --
	bindgen --with-derive-default --no-layout-tests --no-doc-comments --no-prepend-enum-name \
		--allowlist-type "${prefix}_.*" --allowlist-var "${prefix^^}_.*" "$header" "$@" -std=gnu11 >"$result"
	rustfmt --edition 2024 --config-path rustfmt.toml "$result"
}
rust verbs/protocol.h verbs-protocol/src/abi.rs verbs
# Whole records are compared; of what is longer than 32 there is no default.
rust verbs/agent.h verbs-protocol/src/agent_abi.rs verbs_agent --with-derive-partialeq --with-derive-eq \
	--no-default 'verbs_agent_endpoint(_record)?'
rust stack/protocol.h heddle-stack/src/abi.rs stack
# Of shared memory only places are asked for.
rust stack/queues.h heddle-stack/src/queues/abi.rs queues --no-default 'queues_(header|stream)' --no-debug 'queues_(header|stream)' \
	-- -DQUEUES_LAYOUT_ONLY

# cgo reads the headers here; what it writes needs no cgo. Members are named as Go does.
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
for package in stacks:stack queues:stack verbs:verbs; do
	cd "$clib/../internal/plane/${package%:*}/protocol"
	CGO_ENABLED=1 "${GO:-go}" tool cgo -objdir "$objects/" -godefs -- -I"../../../../clib/${package#*:}" types.go |
		sed -E -e '2s/.*/\/\/ clib\/generate.sh/' -e '/^\t\t[A-Z]/s/_([a-z])/\U\1/g' \
			-e '/^\t\t/s/^\t\t(Id|Mtu|Mac|Rtt|Mss|Gid|Lid|Pid|Qp|Cq|Mr)(s?\t|[A-Z])/\t\t\U\1\E\2/' >_abi
	gofmt <_abi >abi.go
	rm _abi
done
