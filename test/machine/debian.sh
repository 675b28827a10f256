#!/usr/bin/env bash
# Makes the files of a Debian for machines of another architecture: debian.sh DIR ARCH PACKAGE... puts what is in the packages,
# and in those that they depend on, into DIR/root. They are looked up beside this machine's own, whose architectures stay
# what they are, and none of their scripts runs: there are no alternatives, users beyond Debian's first, or services. With no
# package it only gets the lists, for whoever sets APT_CONFIG to DIR/apt.conf.
set -euo pipefail

mkdir -p "$1"/{lists/partial,archives/partial}
dir=$(cd "$1" && pwd) arch=$2
shift 2
printf '%s\n' "APT::Architecture \"$arch\";" "APT::Architectures { \"$arch\"; };" 'APT::Sandbox::User "root";' \
	"Dir::State \"$dir\";" 'Dir::State::status "/dev/null";' "Dir::Cache \"$dir\";" >"$dir/apt.conf"
export APT_CONFIG=$dir/apt.conf
apt-get update -qq
[ $# -gt 0 ] || exit 0
rm -f "$dir"/archives/*.deb
apt-get install -qq --yes --download-only --no-install-recommends base-files base-passwd "$@" >/dev/null

root=$dir/root
rm -rf "$root"
mkdir -p "$root"/{dev,proc,run,sys,tmp,usr/{bin,sbin,lib}}
for folder in bin sbin lib; do ln -s "usr/$folder" "$root/$folder"; done # as Debian has it
for package in "$dir"/archives/*.deb; do
	dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root"
done
cp "$root"/usr/share/base-passwd/passwd.master "$root/etc/passwd"
cp "$root"/usr/share/base-passwd/group.master "$root/etc/group"
echo "127.0.0.1 localhost" >"$root/etc/hosts"
echo "hosts: files" >"$root/etc/nsswitch.conf"
