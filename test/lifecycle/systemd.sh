#!/bin/sh
# The init process of a machine of its own for TestDebianPackage: this machine's files under a writable layer in DIR,
# namespaces of its own (the caller made them: unshare --mount --pid --net --cgroup --ipc --uts --fork), and then
# Debian's systemd. Nothing that it changes outlives it.
set -e
dir=$1
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"
mkdir "$dir/up" "$dir/work" "$dir/root"
root=$dir/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/up,workdir=$dir/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for d in null zero full random urandom tty; do
	: >"$root/dev/$d"
	mount --bind "/dev/$d" "$root/dev/$d"
done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t bpf bpf "$root/sys/fs/bpf"
mkdir -p "$root/mnt/deb"
mount --bind "$2" "$root/mnt/deb"

# Of Debian's units those that a bare machine needs: the journal, and nothing that sets up hardware or users.
rm -rf "$root"/lib/systemd/system/*.wants "$root"/etc/systemd/system/*.wants "$root"/lib/systemd/system-generators "$root"/usr/sbin/policy-rc.d
: >"$root/etc/fstab"
: >"$root/var/lib/dpkg/triggers/File" # no rebuilding of databases of manual pages
mkdir -p "$root/etc/systemd/system/basic.target.wants" "$root/etc/systemd/journald.conf.d"
ln -s /lib/systemd/system/systemd-journald.service "$root/etc/systemd/system/basic.target.wants/"
printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\n' >"$root/etc/systemd/journald.conf.d/test.conf"
printf '[Unit]\nDescription=Test\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' >"$root/etc/systemd/system/test.target"

ip link set lo up
ip link add under0 type veth peer name under1
ip addr add 192.0.2.1/24 dev under0
ip link set under0 up
ip link set under1 up
hostname heddle-test

cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
mount --make-rshared / # as systemd does, but not in a container
exec env -i container=heddle-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	/lib/systemd/systemd --system --unit=test.target --show-status=0 --log-target=journal-or-kmsg --log-level=notice
