package pages

import (
	"strings"
	"testing"
)

// TestUninstallAdopted: `heddle uninstall` refuses while a container is attached behind another
// plugin, and by force leaves nothing of Heddle's at that plugin's devices, which go on working.
func TestUninstallAdopted(t *testing.T) {
	n := connect(t, "a=192.0.2.1", false)
	run := func(script string) string {
		t.Helper()
		out, err := n.terminal(t, "a").typed(script)
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return out
	}
	run(agentUp)
	run(`install -D bin/heddle-cni /usr/lib/cni/heddle-cni
ip netns add box
export CNI_COMMAND=ADD CNI_CONTAINERID=box CNI_NETNS=/run/netns/box CNI_IFNAME=eth0 CNI_PATH=/usr/lib/cni
echo '{"cniVersion": "1.0.0", "name": "chained", "type": "bridge", "bridge": "cni0", "isGateway": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.1.0/24"}]]}}' | /usr/lib/cni/bridge >/run/result
python3 -c 'import json; print(json.dumps({"cniVersion": "1.0.0", "name": "chained", "type": "heddle-cni", "prevResult": json.load(open("/run/result"))}))' |
  /usr/lib/cni/heddle-cni
heddle endpoints | grep chained/box/eth0
tc filter show dev $(ls /sys/class/net/cni0/brif) egress | grep heddle:
nft list table inet heddle | grep 10.88`)
	run(`pkill -INT -f 'heddled --node'; while heddle status; do sleep 0.05; done`)
	said := run(`! heddle uninstall`)
	if !strings.Contains(said, "1 containers live that another network carries") {
		t.Errorf("uninstall with a container behind another plugin: %s", said)
	}
	run(`tc filter show dev $(ls /sys/class/net/cni0/brif) egress | grep heddle:
heddle uninstall --force
for side in ingress egress; do ! tc filter show dev $(ls /sys/class/net/cni0/brif) $side | grep heddle || false; done
! tc qdisc show dev $(ls /sys/class/net/cni0/brif) | grep clsact || false
! nft list tables | grep heddle || false
! ip rule | grep 18532 || false
! ip -br link | grep heddle || false
nsenter --net=/run/netns/box ping -c1 -W5 10.88.1.1`)
	if said := run("heddle uninstall"); !strings.Contains(said, "nothing of Heddle's is here") {
		t.Errorf("once more: %s", said)
	}
}
