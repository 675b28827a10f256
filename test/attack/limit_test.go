package attack

import (
	"encoding/json"
	"fmt"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks, attack{"send faster than the cap, by priority, TOS and pace", model.ProtectLimits, "n1", passLimit})
}

// drainScript is Python that reads a connection to its end in a thread, and times that.
const drainScript = `
import threading
took = []
def drain(l):
    c = l.accept()[0]
    begin = time.monotonic()
    while c.recv(65536):
        pass
    took.append(time.monotonic() - begin)
    c.close()
`

// passLimit sends, with a cap, what takes four seconds within it.
func passLimit(t *testing.T) string {
	const size = 2 << 20
	lab.Limit(t, "n1/c1", "--egress", "4mbit")
	p, sink, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1"), lab.FreePort()
	sink.Must("exec(%s)", lab.JSON(t, drainScript))
	sink.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	sink.Must(`d = threading.Thread(target=drain, args=(l,))`)
	sink.Must(`d.start()`)
	p.Must(`s = tcp(4)`)
	p.Must(`s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)`)
	p.Must(`s.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 6)`)
	p.Must(`s.setsockopt(socket.SOL_SOCKET, 47, 0xffffffff.to_bytes(4, "little"))`) // SO_MAX_PACING_RATE: none
	p.Must(`s.connect((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), port)
	p.Must(`s.sendall(bytes(%d))`, size)
	p.Must(`s.close()`)
	sink.Must(`d.join()`)
	var seconds float64
	if raw := sink.Must(`took[0]`); json.Unmarshal([]byte(raw), &seconds) != nil {
		t.Fatalf("it took %s", raw)
	}
	if seconds > 3 {
		return ""
	}
	return fmt.Sprintf("%d bytes in %.3f s", size, seconds)
}
