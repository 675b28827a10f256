#!/bin/sh
# Boots Debian's kernel, which takes BPF programs on security hooks, in an emulated machine and runs the test of the second
# lock (bpf/lsm.bpf.c) there. Needs qemu-system-x86, busybox-static, cpio and KERNEL, the package file linux-image-*.deb.
# Arguments: KERNEL, the test binary of internal/plane/tcp/datapath.
set -eu
kernel=$1 test=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir/root/bin" "$dir/root/proc" "$dir/root/sys" "$dir/root/tmp"
dpkg-deb --fsys-tarfile "$kernel" | tar -x -C "$dir" --wildcards './boot/vmlinuz-*'
cp /bin/busybox "$dir/root/bin/busybox"
cp "$test" "$dir/root/datapath.test"
cat >"$dir/root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t securityfs securityfs /sys/kernel/security
/bin/busybox ip link set lo up
echo "kernel $(/bin/busybox uname -r), security modules $(/bin/busybox cat /sys/kernel/security/lsm)"
HEDDLE_DEMAND_LSM=1 /datapath.test -test.run 'TestLock$' -test.v && echo "lsm test: passed"
/bin/busybox poweroff -f
INIT
chmod 755 "$dir/root/init"
(cd "$dir/root" && find . | cpio -o -H newc --quiet) | gzip -1 >"$dir/initramfs"
timeout 600 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -m 1024 -nographic -no-reboot -kernel "$dir"/boot/vmlinuz-* \
	-initrd "$dir/initramfs" -append "console=ttyS0 quiet panic=-1 lsm=capability,bpf" </dev/null | tee "$dir/log"
grep -q "lsm test: passed" "$dir/log"
