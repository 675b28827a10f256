# Runs stressors one after another: LIMIT in seconds, then a stressor with its options per argument. After the
# output of each comes a line with its name and exit code.
limit=$1
shift
for stressor in "$@"; do
	read -ra words <<<"$stressor"
	timeout --kill-after=2 "$limit" stress-ng "--${words[0]}" 1 "${words[@]:1}" --timeout 2s --metrics-brief --verify --no-rand-seed 2>&1
	echo "=== $stressor === $?"
done
