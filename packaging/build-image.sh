#!/usr/bin/env bash
# Builds the container image: build-image.sh OUT PROGRAM..., as `make image` calls it. It needs no engine: the result is a tar
# file in OCI's and in Docker's form, for `ctr images import`, `docker load` and `podman load`. The same commit gives the same
# bytes. VERSION overrides the version, IMAGE the name before its colon; ARCH is amd64 or arm64, or this machine's.
set -euo pipefail
umask 022
export LC_ALL=C TZ=UTC

out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
go=${GO:-go}
goarch=${ARCH:-$("$go" env GOARCH)}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
if [ -z "${VERSION:-}" ]; then
	VERSION=$(git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null | sed 's/^v//') || true
	[ -n "$VERSION" ] || VERSION=git$(git rev-parse --short=10 HEAD)
	[ -z "$(git status --porcelain --untracked-files=no)" ] || VERSION=$VERSION-dirty
fi
ref=${IMAGE:-heddle.dev/heddle}:$VERSION

work=$out/work
rm -rf "$work"
mkdir -p "$work/root/opt/heddle/bin" "$work/image/blobs/sha256"
for p in "$@"; do
	CGO_ENABLED=0 GOARCH=$goarch "$go" build -trimpath -buildvcs=false -ldflags "-s -w -buildid= -X heddle.dev/heddle/internal/version.release=$VERSION" \
		-o "$work/root/opt/heddle/bin/$p" "./cmd/$p"
done
for l in guest pool verbs; do
	clib/build.sh $l "$work/root/opt/heddle/bin/libheddle-$l.so" "$goarch"
done
for p in heddle-rdma heddle-stack; do # the image has no C library
	STATIC=1 rust/build.sh out/rust/image "$work/root/opt/heddle/bin/$p" "$goarch"
done
# What the kubelet and runtimes mount over, and the place of network namespaces by its other name.
mkdir -p "$work/root"/{etc/heddle,proc,sys,dev,run,tmp,var/lib/heddle,host}
chmod 1777 "$work/root/tmp"
ln -s /run "$work/root/var/run"

pack() { # DIR NAMES...: a tar with nothing of this machine in it, to standard output
	tar -C "$1" --sort=name --format=ustar --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -cf - "${@:2}"
}
blob() { # stores standard input, prints its hash
	cat >"$work/blob"
	local sum
	sum=$(sha256sum <"$work/blob" | cut -d' ' -f1)
	mv "$work/blob" "$work/image/blobs/sha256/$sum"
	echo "$sum"
}
size() { stat -c %s "$work/image/blobs/sha256/$1"; }

diff=$(pack "$work/root" . | sha256sum | cut -d' ' -f1)
layer=$(pack "$work/root" . | gzip -9n | blob)
created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
config=$(printf '{"architecture":"%s","os":"linux","created":"%s","config":{"Entrypoint":["/opt/heddle/bin/heddled"],"Env":["PATH=/opt/heddle/bin"],"Labels":{"org.opencontainers.image.version":"%s"}},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created":"%s","created_by":"make image"}]}' \
	"$goarch" "$created" "$VERSION" "$diff" "$created" | blob)
manifest=$(printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%s","size":%s},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:%s","size":%s}]}' \
	"$config" "$(size "$config")" "$layer" "$(size "$layer")" | blob)
printf '{"imageLayoutVersion":"1.0.0"}' >"$work/image/oci-layout"
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:%s","size":%s,"platform":{"architecture":"%s","os":"linux"},"annotations":{"io.containerd.image.name":"%s","org.opencontainers.image.ref.name":"%s"}}]}' \
	"$manifest" "$(size "$manifest")" "$goarch" "$ref" "$VERSION" >"$work/image/index.json"
printf '[{"Config":"blobs/sha256/%s","RepoTags":["%s"],"Layers":["blobs/sha256/%s"]}]' "$config" "$ref" "$layer" >"$work/image/manifest.json"

file=$out/heddle-image-$VERSION-$goarch.tar
pack "$work/image" blobs index.json manifest.json oci-layout >"$file"
rm -rf "$work"
(cd "$out" && sha256sum heddle-image-*.tar >SHA256SUMS)
echo "$ref"
echo "$file"
