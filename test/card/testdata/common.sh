# What scripts of both machines begin with: node and other are 1 and 2. eth0 is the nodes' network,
# eth1 has the card; it is a part of wire1, which may hold what the card sends, also once eth1 is down.
# Endpoints are 10.9.0.NODE.
export PATH=$PATH:/heddle without=
step=0

say() { echo "[$(cut -d ' ' -f 1 /proc/uptime)] $*"; }
fail() {
	say "FAILED: $*"
	cat /run/router.log /run/out 2>/dev/null # all of it: the other machine's ends below
	grep -v "=0" /run/stats.part
	/run/counters
	timeout 10 nc -w 5 10.0.0.$other $counters </dev/null || say "the other machine does not say what its card has counted"
	echo "code 1" >/dev/ttyS1
	poweroff -f
	exit 1
}

# Waits until a command succeeds.
await() {
	local tries=0 # a condition may await something itself
	until eval "$1"; do
		tries=$((tries + 1))
		[ $tries -lt 300 ] || fail "waited for: $1"
		sleep 0.1
	done
}

# Waits until the other machine is here, too.
meet() {
	step=$((step + 1))
	if [ $node = 1 ]; then
		nc -l -p $((20000 + step)) </dev/null >/dev/null || fail "nobody came to step $step"
	else
		await "nc -w 5 10.0.0.1 $((20000 + step)) </dev/null >/dev/null 2>&1"
	fi
}

# Runs the router with arguments, and what stands in for the agent. $without is a protection that it
# does without.
start() {
	rm -f /run/rdma.sock /run/orders
	mkfifo /run/orders
	HEDDLE_WITHOUT=$without /heddle/${without:+attack/}heddle-rdma --agent /run/rdma.sock --sockets /dev/heddle-verbs "$@" >/run/router.log 2>&1 &
	router=$!
	await "[ -S /run/rdma.sock ]"
	agent /run/rdma.sock /dev/heddle-verbs/control 10.9.0.$node 10.0.0.$node 10.0.0.$other </run/orders &
	exec 3>/run/orders
	echo "card 10.1.0.$other" >&3
	stats
}

stop() {
	exec 3>&-
	kill $router
	wait
}

# Sets memory_bytes, tcp_bytes, card_bytes, reason_19 and so on (docs/protocols/verbs-agent.md).
stats() {
	rm -f /run/stats /run/stats.part
	echo "stats /run/stats.part" >&3
	await "grep -q reason_31 /run/stats.part 2>/dev/null"
	. /run/stats.part
}

# A program in the endpoint: it has Heddle's library.
verbs() { LD_LIBRARY_PATH=/heddle timeout 60 "$@" >/run/out 2>&1; }

# What the card has counted, which says whether it sent again, what was said last, whether the kernel
# could not destroy a queue pair, and where the router is; the other machine asks for it when it fails.
# No job of this shell: it waits for all that it has.
counters=19999
cat >/run/counters <<END
#!/bin/busybox sh
cd /sys/class/infiniband/rxe0/ports/1 && grep . state hw_counters/* | sed "s/^/machine $node: /"
tail -n 5 /run/router.log /run/out
dmesg | grep -A12 __rxe_cleanup
for process in \$(pidof heddle-rdma); do tail -n 12 /proc/\$process/task/*/stack; done
END
chmod +x /run/counters
(nc -ll -p $counters -e /run/counters &)

ip link set eth1 name wire1
echo 1 >/proc/sys/net/ipv4/conf/wire1/arp_ignore # else it says that eth1's address is its own
ip link set wire1 up
ip link add link wire1 name eth1 type macvlan mode bridge
for i in 0 1; do
	ip addr add 10.$i.0.$node/24 dev eth$i
	ip link set eth$i up
done
rdma link add rxe0 type rxe netdev eth1 || fail "no card"
mkdir -p /dev/heddle-verbs
