# Both machines have a router with a card.

# A server on node 1, its client on node 2. One that comes too early tries again.
both() {
	say "$1"
	stats
	card=$card_bytes tcp=$tcp_bytes
	if [ $node = 1 ]; then
		verbs $1 || fail "$1 ends with $?"
	else
		tries=0
		until verbs $2; do
			code=$?
			grep -qiE "couldn't connect|connection refused|unreachable|REJECTED" /run/out || fail "$2 ends with $code"
			tries=$((tries + 1))
			[ $tries -lt 100 ] || fail "$2 finds no server"
			sleep 0.1
		done
	fi
	case $1 in *pingpong*) tail -1 /run/out ;; esac
	stats
}

# The same, by the card and not by TCP; or the other way round.
by_card() { both "$@"; [ $card_bytes -gt $card ] && [ $tcp_bytes = $tcp ] || fail "$1 did not go by the card"; }
by_tcp() { both "$@"; [ $tcp_bytes -gt $tcp ] && [ $card_bytes = $card ] || fail "$1 did not go by TCP"; }
pingpong="ibv_rc_pingpong -g 0 -n 20"
port=/sys/class/infiniband/rxe0/ports/1

# Writes until something ends it, in the background. Both machines see that it has begun.
begin() {
	stats
	card=$card_bytes
	(
		[ $node = 1 ] || address=10.0.0.1
		tries=0
		until verbs ib_write_bw -x 0 -F -D 50 $address; do
			tries=$((tries + 1))
			grep -qiE "couldn't connect|refused" /run/out && [ $tries -lt 100 ] || exit 1
			sleep 0.1
		done
	) &
	load=$!
	await "stats; [ \$card_bytes -gt $card ]"
	meet
}

# It has ended, and says so.
ends() {
	wait $load && fail "$1: the program ends well"
	grep -iE "error|fail|bad|vendor|status" /run/out | head -3
	say "$1: the program has ended"
	meet
}

start --device rxe0
say "ready"
meet

by_card "$pingpong" "$pingpong 10.0.0.1"
by_card "ibv_uc_pingpong -g 0 -n 20" "ibv_uc_pingpong -g 0 -n 20 10.0.0.1"
by_card "ibv_srq_pingpong -g 0 -n 20 -q 2" "ibv_srq_pingpong -g 0 -n 20 -q 2 10.0.0.1"
for test in "ib_send_bw -n 60 -s 65536" "ib_send_lat -n 40 -s 8" "ib_write_bw -n 60 -s 65536" "ib_write_lat -n 20 -s 8" \
	"ib_read_bw -n 60 -s 65536" "ib_read_lat -n 40 -s 8" "ib_atomic_bw -n 60" "ib_atomic_lat -n 40 -A CMP_AND_SWAP"; do
	by_card "$test -x 0 -F" "$test -x 0 -F 10.0.0.1"
done
# Bytes that a card places by itself: a message says so, where frames would take five each.
sends() { cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rdma_sends; }
before=$(sends)
by_card "ib_write_bw -n 200 -s 65536 -x 0 -F" "ib_write_bw -n 200 -s 65536 -x 0 -F 10.0.0.1"
say "$(($(sends) - before)) messages of the card; regions that are not mapped: $reason_25, $reason_26"
[ $node = 1 ] || [ $(($(sends) - before)) -lt 500 ] || fail "the card does not place bytes by itself"
by_card "rping -s -a 10.9.0.1 -C 10 -S 60000 -V" "rping -c -a 10.9.0.1 -C 10 -S 60000 -V"
by_card "rping -s -a 10.9.0.1 -C 5" "rping -c -a 10.9.0.1 -C 5 -v"

say "connections are cut, as by a policy"
begin
[ $node = 1 ] || echo cut >&3
ends "cut"
by_card "$pingpong" "$pingpong 10.0.0.1"

say "a card goes away, and comes again"
begin
# A packet a second leaves: the kernel waits 50 s for the others, of a queue pair that it is to destroy.
# A program that does not hear of it meanwhile ends well.
[ $node = 1 ] || tc qdisc add dev wire1 root tbf rate 8kbit burst 1600 limit 1000000 || fail "nothing holds packets"
[ $node = 1 ] || await "[ \$(tc -s qdisc show dev wire1 | sed -n 's/.* backlog [^ ]* \([0-9]*\)p.*/\1/p') -gt 20 ]"
[ $node = 1 ] || ip link set eth1 down
[ $node = 1 ] || await "grep -q DOWN $port/state"
ends "no card"
by_tcp "$pingpong" "$pingpong 10.0.0.1"
[ $node = 1 ] || [ $reason_24 -gt 0 ] || fail "nobody says that the card has gone"
[ $node = 2 ] || [ $reason_19 -gt 0 ] || fail "nobody says that the other node has no card"
[ $node = 1 ] || tc qdisc del dev wire1 root
[ $node = 1 ] || ip link set eth1 up
# The kernel gives the card its GIDs back some time after its port.
[ $node = 1 ] || await "grep -q ACTIVE $port/state && grep -qs ffff:0a01 $port/gids/*"
meet
by_card "$pingpong" "$pingpong 10.0.0.1"

say "cards that do not reach each other"
[ $node = 1 ] || ip neigh replace 10.1.0.1 lladdr 52:54:00:ff:ff:ff dev eth1
meet
by_tcp "$pingpong" "$pingpong 10.0.0.1"
[ $reason_22 -gt 0 ] || fail "nobody says that the card was refused"
[ $node = 1 ] || ip neigh del 10.1.0.1 dev eth1
meet
by_card "$pingpong" "$pingpong 10.0.0.1"

say "an endpoint gets a cap"
begin
[ $node = 1 ] || echo "cap 1000000" >&3
ends "cap"
by_tcp "$pingpong" "$pingpong 10.0.0.1"
[ $node = 1 ] || [ $reason_20 -gt 0 ] || fail "nobody says that the cap is why"
[ $node = 1 ] || echo "cap 0" >&3
meet
by_card "$pingpong" "$pingpong 10.0.0.1"

say "the other end says that its card is where its node has none"
[ $node = 2 ] || echo "card 10.1.0.77" >&3
meet
by_tcp "$pingpong" "$pingpong 10.0.0.1"
[ $node = 2 ] || [ $reason_27 -gt 0 ] || fail "nobody says that the card is elsewhere"
[ $node = 2 ] || { stop; without=homes start --device rxe0; echo "card 10.1.0.77" >&3; }
meet
# Without the protection its bytes go where the other end wants them.
by_card "$pingpong" "$pingpong 10.0.0.1"
[ $node = 2 ] || { stop; without= start --device rxe0; }
meet
by_card "$pingpong" "$pingpong 10.0.0.1"
# Numbers and keys of theirs are the card's.
say "endpoints that may have peers without Heddle reach containers as before"
echo "outside 1" >&3
stats
meet
by_card "$pingpong" "$pingpong 10.0.0.1"
for test in "ib_send_bw -n 60 -s 65536" "ib_write_bw -n 60 -s 65536" "ib_read_bw -n 60 -s 65536" "ib_atomic_bw -n 60"; do
	by_card "$test -x 0 -F" "$test -x 0 -F 10.0.0.1"
done
echo "outside 0" >&3
meet

say "a node without a card"
[ $node = 2 ] || { stop; start; }
meet
by_tcp "$pingpong" "$pingpong 10.0.0.1"
[ $node = 2 ] && [ $reason_19 -eq 0 ] && fail "nobody says that the other node has no card"
say "done"
exit 0
