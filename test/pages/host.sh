#!/bin/sh
# The init process of a host on which pages are tried: this machine's files under a writable layer, namespaces of its own
# (the caller made them: unshare --mount --pid --net --cgroup --ipc --uts --fork) and cgroup version 2 alone. Nothing that is changed
# there outlives it. host.sh DIR NAME REPOSITORY BIN SHARE INIT: BIN are the programs that the pages call bin/, SHARE is seen as /mnt/pages,
# and INIT is "sh" or "systemd".
set -e
dir=$1 name=$2 repository=$3 bin=$4 share=$5 init=$6
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"
mkdir "$dir/up" "$dir/work" "$dir/root"
root=$dir/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/up,workdir=$dir/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/net"
for d in null zero full random urandom tty fuse net/tun; do
	[ -e "/dev/$d" ] || continue
	: >"$root/dev/$d"
	mount --bind "/dev/$d" "$root/dev/$d"
done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mkdir -p "$root/run/lock" "$root/var/lib/docker" "$root/var/lib/containerd" "$root/var/lib/containers" "$root/mnt/pages"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
# What engines keep is to be overlaid, and an overlay is not a place for another's upper layer.
for d in docker containerd containers; do
	mount -t tmpfs tmpfs "$root/var/lib/$d"
done
# Seen wherever it is, also below a directory that the host has anew; written above, like everything.
mkdir -p "$root$repository" "$dir/repository" "$dir/repository-work"
mount -t overlay overlay -o "lowerdir=$repository,upperdir=$dir/repository,workdir=$dir/repository-work" "$root$repository"
mkdir -p "$root$repository/bin"
mount --bind "$bin" "$root$repository/bin"
mount --bind "$share" "$root/mnt/pages"

# What this machine has of a host that installed nothing yet.
rm -rf "$root"/etc/heddle "$root"/var/lib/heddle "$root"/etc/cni/net.d "$root"/opt/cni "$root"/usr/lib/cni/heddle-cni "$root"/etc/docker/daemon.json "$root"/var/lib/etcd
mkdir -p "$root/etc/cni/net.d"

if [ "$init" = systemd ]; then # as test/systemd.sh has it
	mount -t bpf bpf "$root/sys/fs/bpf"
	rm -rf "$root"/lib/systemd/system/*.wants "$root"/etc/systemd/system/*.wants "$root"/lib/systemd/system-generators "$root"/usr/sbin/policy-rc.d
	: >"$root/etc/fstab"
	mkdir -p "$root/etc/systemd/system/basic.target.wants" "$root/etc/systemd/journald.conf.d"
	ln -s /lib/systemd/system/systemd-journald.service "$root/etc/systemd/system/basic.target.wants/"
	printf '[Journal]\nStorage=volatile\nReadKMsg=no\nAudit=no\n' >"$root/etc/systemd/journald.conf.d/test.conf"
	printf '[Unit]\nDescription=Test\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' >"$root/etc/systemd/system/test.target"
fi

ip link set lo up
hostname "$name"
echo "$name" >"$root/etc/hostname" # systemd sets it anew

cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
mount --make-rshared / # as systemd does
cd /
echo ready >/mnt/pages/ready
if [ "$init" = systemd ]; then
	exec env -i container=heddle-pages PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
		/lib/systemd/systemd --system --unit=test.target --show-status=0 --log-target=journal-or-kmsg --log-level=notice
fi
# Whoever's children lose their parent become this one's; it waits for them.
exec sh -c 'while :; do sleep 3600; done'
