#!/usr/bin/env bash
# Builds the Debian package: build-deb.sh OUT PROGRAM..., as `make deb` calls it. The same commit gives the same bytes:
# nothing in it is of the machine or the moment. VERSION overrides the version; COMPRESS and LEVEL are dpkg-deb's -Z and -z.
# ARCH is for which machines it is, as Debian names them: amd64 or arm64. None: for machines like this one.
set -euo pipefail
umask 022
export LC_ALL=C TZ=UTC

out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
go=${GO:-go}
arch=${ARCH:-$(dpkg --print-architecture)}
case $arch in amd64 | arm64) goarch=$arch ;; *) echo "no package for $arch: ARCH is amd64 or arm64" >&2; exit 1 ;; esac

# A tag vX.Y.Z is version X.Y.Z, commits after it are X.Y.Z+git..., and before the first tag it is 0~git...: dates sort,
# and a shallow checkout knows them.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
if [ -z "${VERSION:-}" ]; then
	commit=$(date -u -d "@$SOURCE_DATE_EPOCH" +git%Y%m%d%H%M%S).$(git rev-parse --short=10 HEAD)
	if tag=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null); then
		VERSION=${tag#v}
		[ "$(git rev-parse "$tag^{commit}")" = "$(git rev-parse HEAD)" ] || VERSION=$VERSION+$commit
	else
		VERSION=0~$commit
	fi
	[ -z "$(git status --porcelain --untracked-files=no)" ] || VERSION=$VERSION+dirty
fi

root=$out/root
rm -rf "$root" "$out/tools"
mkdir -p "$root/DEBIAN" "$out/tools"

# Programs. -trimpath and no VCS stamp: the path and state of the checkout must not show.
flags=(-trimpath -buildvcs=false -ldflags "-s -w -buildid= -X heddle.dev/heddle/internal/version.release=$VERSION")
built=()
for p in "$@"; do
	case $p in
	heddled | heddle-kube) dir=usr/sbin ;;
	heddle-cni) dir=usr/lib/cni ;;
	heddle-netstack) dir=usr/lib/heddle ;;
	*) dir=usr/bin ;;
	esac
	mkdir -p "$root/$dir"
	CGO_ENABLED=0 GOARCH=$goarch "$go" build "${flags[@]}" -o "$root/$dir/$p" "./cmd/$p"
	built+=("$root/$dir/$p")
done
mkdir -p "$root/usr/lib/heddle"
GO=$go clib/build.sh guest "$root/usr/lib/heddle/libheddle-guest.so" "$goarch"
GO=$go clib/build.sh machine "$root/usr/lib/heddle/libheddle-machine.so" "$goarch"
GO=$go clib/build.sh pool "$root/usr/lib/heddle/libheddle-pool.so" "$goarch"
GO=$go clib/build.sh verbs "$root/usr/lib/heddle/libheddle-verbs.so" "$goarch"
chmod 644 "$root"/usr/lib/heddle/libheddle-*.so
for c in dctcp ledbat; do
	packaging/build-congestion.sh $c "$root/usr/lib/heddle/congestion/$c.bpf.o"
done
chmod 644 "$root"/usr/lib/heddle/congestion/*
for p in heddle-rdma heddle-stack; do
	rust/build.sh out/rust/deb "$root/usr/lib/heddle/$p" "$goarch"
done
rust/build.sh out/rust/deb "$root/usr/bin/heddle-machine" "$goarch" # people type it

# Manual pages and completions, from the flags of the same programs for this machine.
doc=$root/usr/share/doc/heddle
man=$root/usr/share/man/man8
mkdir -p "$man" "$doc" "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" \
	"$root/usr/share/fish/vendor_completions.d"
for p in heddle heddled heddle-kube; do
	for tags in man ''; do CGO_ENABLED=0 "$go" build -buildvcs=false -trimpath -tags "$tags" -o "$out/tools/$p$tags" "./cmd/$p"; done
	"$out/tools/${p}man" "$man"
	"$out/tools/$p" completion bash >"$root/usr/share/bash-completion/completions/$p"
	"$out/tools/$p" completion zsh >"$root/usr/share/zsh/vendor-completions/_$p"
	"$out/tools/$p" completion fish >"$root/usr/share/fish/vendor_completions.d/$p.fish"
done
cp packaging/heddle-runtime.8 "$man/"
gzip -9n "$man"/*

# Documents, settings, unit.
cp packaging/copyright "$doc/"
"$go" list -deps -f '{{with .Module}}{{if .Version}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' "${@/#/./cmd/}" | sort -u |
	while read -r module version dir; do
		for f in "$dir"/LICEN[SC]E* "$dir"/COPYING* "$dir"/NOTICE*; do
			[ ! -f "$f" ] || { printf '=== %s %s: %s\n' "$module" "$version" "${f##*/}" && cat "$f"; }
		done
	done >"$out/tools/licenses"
(cd rust && "${CARGO:-cargo}" tree --locked --package heddle-machine --package heddle-rdma --package heddle-stack --edges normal \
	--target "$([ $arch = amd64 ] && echo x86_64 || echo aarch64)-unknown-linux-gnu" --prefix none --format '{p}|{l}') | sort -u >"$out/tools/crates"
tr '|' ' ' <"$out/tools/crates" |
	while read -r crate version _; do
		for f in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"$crate-${version#v}"/{LICENSE,COPYING,NOTICE}*; do
			[ ! -f "$f" ] || { printf '=== %s %s: %s\n' "$crate" "$version" "${f##*/}" && cat "$f"; }
		done
	done >>"$out/tools/licenses"
printf '=== uPlot: LICENSE\n' | cat - internal/ui/assets/vendor/LICENSE >>"$out/tools/licenses"
gzip -9nc "$out/tools/licenses" >"$doc/third-party-licenses.gz"
"$go" run ./packaging/sbom heddle "$VERSION" "${built[@]}" <"$out/tools/crates" >"$doc/heddle.cdx.json"
gzip -9nc CHANGELOG.md >"$doc/changelog.gz"
cp -r README.md docs "$doc/"
install -D -m 644 packaging/heddled.default "$root/etc/default/heddled"
install -D -m 644 packaging/heddle-kube.default "$root/etc/default/heddle-kube"
install -D -m 644 -t "$root/lib/systemd/system" packaging/heddled.service packaging/heddle-kube.service
install -D -m 644 -t "$root/usr/share/heddle/monitoring" packaging/monitoring/heddle-alerts.yaml packaging/monitoring/heddle-dashboard.json
install -D -m 644 -t "$doc/kubernetes" packaging/kubernetes/heddle-package.yaml
printf '%s\n' /etc/default/heddled /etc/default/heddle-kube >"$root/DEBIAN/conffiles"

# Control files. preinst has the layout of this version's maps, for the version before it to judge.
layout=$("$out/tools/heddled" abi)
for script in preinst postinst prerm postrm; do
	while IFS= read -r line; do
		if [ "$line" = '@LAYOUT@' ]; then printf '%s\n' "$layout"; else printf '%s\n' "$line"; fi
	done <packaging/debian/$script >"$root/DEBIAN/$script"
	chmod 755 "$root/DEBIAN/$script"
done
size=$(du -k -s --apparent-size --exclude=DEBIAN "$root" | cut -f1)
sed -e "s|@VERSION@|$VERSION|; s|@ARCH@|$arch|; s|@SIZE@|$size|" packaging/debian/control >"$root/DEBIAN/control"
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\n' | sort | xargs -d '\n' md5sum) >"$root/DEBIAN/md5sums"

find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
deb=$out/heddle_${VERSION}_$arch.deb
cp "$doc/heddle.cdx.json" "${deb%.deb}.cdx.json"
dpkg-deb --root-owner-group --threads-max=1 "-Z${COMPRESS:-xz}" "-z${LEVEL:-3}" --build "$root" "$deb" >/dev/null
rm -rf "$root" "$out/tools"
(cd "$out" && sha256sum heddle_*.deb heddle_*.cdx.json >SHA256SUMS)
echo "$deb"
