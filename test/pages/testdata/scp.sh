#!/bin/sh
# Stands in for scp [-p] FILE... HOST:PATH between the hosts of a test.
set -e
[ "$1" != -p ] || shift
for last; do :; done
host=${last%%:*} to=${last#*:}
while [ $# -gt 1 ]; do
	case $to in
	*/) path=$to$(basename "$1") ;;
	*) path=$to ;;
	esac
	ssh "$host" "cat >$path && chmod $(stat -c %a "$1") $path" <"$1"
	shift
done
