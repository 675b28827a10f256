# Machine 1 has a card and nothing of Heddle's; machine 2 a container, which may have it for a peer.

# The place of the card's IPv4 address in its table of GIDs.
card_gid() {
	for file in /sys/class/infiniband/rxe0/ports/1/gids/*; do
		case $(cat $file 2>/dev/null) in 0000:0000:0000:0000:0000:ffff:*) basename $file && return ;; esac
	done
	return 1
}

# A program of machine 1 with the system's own library, or of machine 2's container.
ours() {
	if [ $node = 1 ]; then
		timeout 60 "$@" >/run/out 2>&1
	else
		verbs "$@"
	fi
}

# A server of machine 1, which is to end when its client has ended well. ibv_rc_pingpong may not: if
# its client's queue pair has gone before the last ACK was sent, as on a busy machine, it sends its
# message again without end, which is what rdma_rxe makes of its 7 retries. Once is no failure.
serve() {
	rm -f /run/served
	most=700 # a test of perftest has a minute of its own
	case $1 in ibv_rc_pingpong*) most=100 ;; esac
	(
		ours $1
		echo $? >/run/served
	) &
	meet
	tries=0
	until [ -s /run/served ]; do
		tries=$((tries + 1))
		sleep 0.1
		[ $tries = $most ] || continue
		case $1 in ibv_rc_pingpong*) ;; *) fail "$1 does not end" ;; esac
		[ $unacknowledged = 0 ] || fail "$1 does not end, nor did another one before"
		unacknowledged=1
		say "no ACK of the last message"
		killall ibv_rc_pingpong
		return
	done
	[ $(cat /run/served) = 0 ] || fail "$1 ends with $(cat /run/served)"
}
unacknowledged=0

# A server on the machine $1, a client on the other one; $2 is the program, with @ for the GID.
between() {
	command=$(echo "$2" | sed "s/@/$gid/")
	say "machine $1 serves: $command"
	[ $node = 1 ] || { stats; card=$card_bytes tcp=$tcp_bytes; }
	if [ $node = 1 ] && [ $1 = 1 ]; then
		serve "$command"
	elif [ $node = $1 ]; then
		ours $command || fail "$command ends with $?"
	else
		tries=0
		until ours $command 10.0.0.$1; do
			code=$?
			grep -qiE "couldn't connect|connection refused" /run/out || { [ $node = 1 ] || stats; fail "$command ends with $code"; }
			tries=$((tries + 1))
			[ $tries -lt 700 ] || fail "$command finds no server" # one before it may have a minute to end
			sleep 0.1
		done
	fi
	case $2 in *pingpong*) tail -1 /run/out ;; esac
	[ $node = 1 ] || stats
	[ $node = 1 ] && [ $1 = 1 ] || meet # serve has met
}

# What the container does or takes itself goes by the card, and nothing by TCP.
by_card() {
	between "$@"
	[ $node = 1 ] || { [ $card_bytes -gt $card ] && [ $tcp_bytes = $tcp ]; } || fail "$2 did not go by the card"
}

# What the peer does by itself the router does not see.
by_peer() {
	between "$@"
	[ $node = 1 ] || [ $tcp_bytes = $tcp ] || fail "$2 went by TCP"
}

# The container's end of a program fails, which is the server. The peer's hears nothing of it: it is
# not waited for.
fails() {
	command=$(echo "$1" | sed "s/@/$gid/")
	if [ $node = 2 ]; then
		stats
		verbs $command && fail "$command: ends well"
		stats
		meet
	else
		(
			until timeout 60 $command 10.0.0.2 >/run/refused 2>&1; do
				grep -qiE "couldn't connect|connection refused" /run/refused || break
				sleep 0.1
			done
		) &
		client=$!
		meet
		kill $client 2>/dev/null
		wait $client
	fi
}

# The container writes until something ends it, in the background.
begin() {
	(
		[ $node = 1 ] || address=10.0.0.1
		tries=0
		until ours ib_write_bw -x $gid -F -D 50 $patience $address; do
			tries=$((tries + 1))
			grep -qiE "couldn't connect|refused" /run/out && [ $tries -lt 100 ] || exit 1
			sleep 0.1
		done
	) &
	load=$!
	[ $node = 1 ] || { stats; card=$card_bytes; await "stats; [ \$card_bytes -gt $card ]"; }
	meet
}

# It has ended, of which the console tells the time.
ends() {
	if [ $node = 2 ]; then
		wait $load && fail "$1: the program ends well"
		say "$1: the program has ended"
	else
		wait $load
	fi
	meet
}

if [ $node = 2 ]; then
	mkdir -p /dev/heddle-verbs
	start --device rxe0
	gid=1
	verbs ibv_devinfo -v
	grep -q "GID\[  1\]" /run/out && fail "a container has the card's GID that the operator has not let outside"
	echo "outside 1" >&3
	stats
	verbs ibv_devinfo -v
	grep "GID\[" /run/out
	grep -q "GID\[  1\].*ffff:10.1.0.2" /run/out || fail "a container that may have peers outside does not have the card's GID"
else
	await "card_gid >/dev/null"
	gid=$(card_gid)
fi
say "ready"
meet

# A time-out of 4.3 s. rdma_rxe's own of perftest, 67 ms, runs out beside other load though nothing
# is lost, and when the ACK of all of a WRITE comes while the card is sending it again, it goes on
# with one without bytes, which has the number of the next message's first packet
# (docs/decisions/0080-peers-without-heddle.md): the peer takes that for a wrong request. UC sends
# nothing again.
patience="-u 20"

for server in 1 2; do
	by_card $server "ibv_rc_pingpong -g @ -n 20 -c"
	by_card $server "ibv_rc_pingpong -g @ -n 20 -c -s 100000"
	by_card $server "ibv_rc_pingpong -g @ -n 20 -e -s 9000"
	by_card $server "ib_send_bw -n 60 -s 65536 $patience -x @ -F"
	by_card $server "ib_send_lat -n 40 -s 8 $patience -x @ -F"
done
for test in "ib_write_bw -n 60 -s 65536" "ib_write_lat -n 20 -s 8" "ib_read_bw -n 60 -s 65536" "ib_read_lat -n 40 -s 8" \
	"ib_atomic_bw -n 60" "ib_atomic_lat -n 40 -A CMP_AND_SWAP"; do
	by_card 1 "$test $patience -x @ -F"
	by_peer 2 "$test $patience -x @ -F"
done
# What comes to a container before the agent has allowed it is lost: nobody sends it again for UC.
by_card 1 "ibv_uc_pingpong -g @ -n 20 -c"
by_card 1 "ib_write_bw -c UC -n 60 -s 65536 -x @ -F"
by_card 1 "ib_write_bw -n 20 -s 65536 -q 3 $patience -x @ -F"

say "policy forbids it: what there is ends"
begin
[ $node = 1 ] || { say "now"; echo "policy 13" >&3; }
ends "policy"
[ $node = 1 ] || { stats; [ $reason_29 -gt 0 ] || fail "nobody says that it was cut"; }
fails "ibv_rc_pingpong -g @ -n 20"
[ $node = 1 ] || [ $reason_28 -gt 0 ] || fail "nobody says that it was refused"
[ $node = 1 ] || echo "policy 0" >&3
meet
by_card 1 "ibv_rc_pingpong -g @ -n 20"

say "an endpoint with a cap"
begin
[ $node = 1 ] || echo "cap 1000000" >&3
ends "cap"
fails "ibv_rc_pingpong -g @ -n 20"
[ $node = 1 ] || { stats; [ $reason_20 -gt 1 ] || fail "nobody says that the cap is why"; echo "cap 0" >&3; }
meet
by_card 2 "ibv_rc_pingpong -g @ -n 20"

say "the operator lets it outside no more"
begin
[ $node = 1 ] || echo "outside 0" >&3
ends "outside"
[ $node = 1 ] || { verbs ibv_rc_pingpong -g 1 10.0.0.1 && fail "it goes outside all the same"; grep -i gid /run/out; }

# An attack of the container, $1, with the router and the agent as they are, or without the protection
# of its name. The peer waits for a pingpong.
attack() {
	if [ $node = 1 ]; then
		timeout 60 ibv_rc_pingpong -g $gid -p $2 >/run/out 2>&1 &
		server=$!
		meet
		kill $server
		wait $server
	else
		hostile $1 /dev/heddle-verbs/control 10.0.0.1 $2 >/run/hostile 2>&1 || { cat /run/hostile; fail "hostile $1"; }
		say "$1 without '$without': $(cat /run/hostile)"
		grep -q $3 /run/hostile || fail "the attack $1 without '$without' is not $3"
		meet
	fi
}

for without in "" outside; do
	[ $node = 1 ] || { cat /sys/class/infiniband/rxe0/ports/1/gids/$(card_gid) | tr -d : >/run/card-gid; stop; start --device rxe0; echo "policy 13" >&3; stats; }
	attack outside 2000${#without} $([ "$without" ] && echo reached || echo refused)
done
for without in "" peers; do
	[ $node = 1 ] || { stop; start --device rxe0; echo "outside 1" >&3; stats; }
	attack peers 2100${#without} $([ "$without" ] && echo reached || echo refused)
done
say "done"
exit 0
