#!/usr/bin/env bash
# Builds a program of the workspace for others: build.sh OUT DIR/PROGRAM [GOARCH] makes it, and keeps what cargo makes below
# OUT. The same sources give the same bytes, wherever they lie. STATIC=1 links it with no library, for images that have none;
# such a heddle-rdma cannot load the libraries of a card.
set -euo pipefail

mkdir -p "$1" "$(dirname "$2")"
out=$(cd "$1" && pwd) file=$(cd "$(dirname "$2")" && pwd)/$(basename "$2")
case ${3:-$(${GO:-go} env GOARCH)} in
amd64) machine=x86_64 ;;
arm64) machine=aarch64 ;;
*) echo "no $(basename "$2") for $3" >&2; exit 1 ;;
esac
cd "$(dirname "$0")"
target=$machine-unknown-linux-gnu
# Paths of the checkout and of crates stand in messages of panics.
flags="--remap-path-prefix=$PWD=rust --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo -Clink-arg=-Wl,--build-id=none"
# The machine's own linker makes its own kind only.
[ "$(uname -m)" = $machine ] || flags+=" -Clinker=$machine-linux-gnu-gcc"
[ -z "${STATIC:-}" ] || flags+=" -Ctarget-feature=+crt-static"
RUSTFLAGS=$flags "${CARGO:-cargo}" build --locked --quiet --release --package "$(basename "$file")" --target "$target" --target-dir "$out" \
	--config profile.release.debug=false --config 'profile.release.strip="symbols"'
install -m 755 "$out/$target/release/$(basename "$file")" "$file"
